"""Faulty frames: how to break a valid one, and the expected report."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from checkpoint import DType
from kvcache import Deref, FullBlock
from stageline_rpc.internal.v1 import forward_pb2
from tests.frame_messages import encode_frame, step_message
from tests.integration.stage_bench import GREEDY, hidden_for
from tests.step_slices import with_slices
from wire.errors import StepFaultKind
from wire.frames import hidden_checksum, step_frame_checksum
from wire.ids import SequenceKey, new_request_id
from wire.step_codec import encode_step
from wire.steps import NO_GROWS, Decode, EndRecord, Prefill, SequenceSignal, StartRecord, Step, StepSlice
from wire.tensors import HiddenStates, TensorView

Messages = Iterable[forward_pb2.ForwardRequest]

HIDDEN_SIZE = 64


@dataclass(frozen=True)
class FrameFault:
    """`messages` breaks a valid decode step of two sequences. `expected_texts` must occur in its message.

    `names` are the sequences whose requests the report must name; none where the frame is too broken.
    """

    name: str
    kind: StepFaultKind
    messages: Callable[[Step, HiddenStates], Messages]
    expected_texts: tuple[str, ...] = ()
    names: tuple[int, ...] = (0, 1)
    reported_step: int = 1

    def __str__(self) -> str:
        return self.name


def _frame(step: Step, hidden: HiddenStates) -> Messages:
    return encode_frame(encode_step(step), step.step_id, hidden)


def _changed(**changes: object) -> Callable[[Step, HiddenStates], Messages]:
    return lambda step, hidden: _frame(replace(step, **changes), hidden)


def _with_slice(change: Callable[[StepSlice], StepSlice]) -> Callable[[Step, HiddenStates], Messages]:
    return lambda step, hidden: _frame(with_slices(step, (change(step.slices[0]), *step.slices[1:])), hidden)


def _with_a_token_more(step: Step) -> Step:
    return replace(step, decodes=replace(step.decodes, tokens=step.decodes.tokens + bytes(4)))


def _one_row_less(step: Step, hidden: HiddenStates) -> Messages:
    return _frame(step, hidden_for(with_slices(step, step.slices[1:]), HIDDEN_SIZE))


def _other_width(step: Step, _: HiddenStates) -> Messages:
    return _frame(step, hidden_for(step, HIDDEN_SIZE - 1))


def _other_dtype(step: Step, _: HiddenStates) -> Messages:
    return _frame(step, hidden_for(step, HIDDEN_SIZE, dtype=DType.BF16))


def _flat(step: Step, hidden: HiddenStates) -> Messages:
    (tensor,) = hidden
    return _frame(step, (TensorView(tensor.dtype, (tensor.shape[0] * tensor.shape[1],), tensor.data),))


def _twice(step: Step, _: HiddenStates) -> Messages:
    doubled = with_slices(step, (step.slices[0], step.slices[0]))
    return _frame(doubled, hidden_for(doubled, HIDDEN_SIZE))


def _unknown_sequence(step_slice: StepSlice) -> StepSlice:
    return replace(step_slice, sequence=SequenceKey(new_request_id(), 0))


def _later(step_slice: StepSlice) -> StepSlice:
    assert isinstance(step_slice.inference_step, Decode)
    return replace(step_slice, inference_step=Decode(step_slice.inference_step.position + 1))


def _earlier(step_slice: StepSlice) -> StepSlice:
    assert isinstance(step_slice.inference_step, Decode)
    return replace(step_slice, inference_step=Decode(step_slice.inference_step.position - 1))


def _as_prefill(step_slice: StepSlice) -> StepSlice:
    position = step_slice.first_position
    return replace(step_slice, inference_step=Prefill(position, 1, position + 1))


def _second_start(step: Step, hidden: HiddenStates) -> Messages:
    step_slice = step.slices[0]
    start = StartRecord(step_slice.sequence, step_slice.restart_count, 1, (1, 2), GREEDY)
    return _frame(replace(step, starts=(start,)), hidden)


def _end_of_unknown(step: Step, hidden: HiddenStates) -> Messages:
    end = EndRecord(SequenceKey(new_request_id(), 0), 0)
    return _frame(replace(step, ends=(end,)), hidden)


def _end_that_keeps_blocks(step: Step, hidden: HiddenStates) -> Messages:
    end = EndRecord(step.slices[0].sequence, step.slices[0].restart_count)
    return _frame(replace(step, ends=(end,)), hidden)


def _impossible_signal(step: Step, hidden: HiddenStates) -> Messages:
    signal = SequenceSignal(step.slices[0].sequence, Deref(FullBlock(12345)))
    return _frame(replace(step, signals=(signal,), grows=NO_GROWS), hidden)


def _of_another_step(step: Step, hidden: HiddenStates) -> Messages:
    """A valid frame with the hidden states of other slices."""
    _, other = _frame(replace(step, digest=step.digest ^ 1), hidden)
    yield step_message(encode_step(step))
    yield other


def _without_its_step(step: Step, hidden: HiddenStates) -> Messages:
    _, message = _frame(step, hidden)
    yield message


def _before_its_step(step: Step, hidden: HiddenStates) -> Messages:
    yield from reversed(list(_frame(step, hidden)))


def _edited(
    edit: Callable[[forward_pb2.HiddenStatesChunk], None],
) -> Callable[[Step, HiddenStates], Messages]:
    """Edit the hidden states."""

    def messages(step: Step, hidden: HiddenStates) -> Iterator[forward_pb2.ForwardRequest]:
        ahead, message = _frame(step, hidden)
        edit(message.hidden_states)
        yield from (ahead, message)

    return messages


def _edited_step(edit: Callable[[forward_pb2.StepFrame], None]) -> Callable[[Step, HiddenStates], Messages]:
    def messages(step: Step, hidden: HiddenStates) -> Iterator[forward_pb2.ForwardRequest]:
        ahead, message = _frame(step, hidden)
        edit(ahead.steps[0])
        yield from (ahead, message)

    return messages


def _flip_payload(chunk: forward_pb2.HiddenStatesChunk) -> None:
    chunk.payload = bytes([chunk.payload[0] ^ 1]) + chunk.payload[1:]


def _flip_step(frame: forward_pb2.StepFrame) -> None:
    frame.step = frame.step[:-1] + bytes([frame.step[-1] ^ 1])


def _cut_payload(chunk: forward_pb2.HiddenStatesChunk) -> None:
    chunk.payload = chunk.payload[:-4]


def _of_step_before(chunk: forward_pb2.HiddenStatesChunk) -> None:
    chunk.step_id -= 1
    chunk.checksum = hidden_checksum(chunk, chunk.payload)


def _garbage_step(frame: forward_pb2.StepFrame) -> None:
    frame.step = b"\xff\xff\xff"
    frame.checksum = step_frame_checksum(frame.step, frame.ready_at_us)


def _begins_again(step: Step, hidden: HiddenStates) -> Messages:
    ahead, message = _frame(step, hidden)
    message.hidden_states.is_last = False
    return ahead, message, message


def _hello_again(step: Step, hidden: HiddenStates) -> Messages:
    yield forward_pb2.ForwardRequest(hello=forward_pb2.HopHello(epoch=step.epoch))


def _too_long(chunk: forward_pb2.HiddenStatesChunk) -> None:
    chunk.payload = bytes(32 * HIDDEN_SIZE * 4 + 4)


K = StepFaultKind

FRAME_FAULTS = (
    FrameFault(
        "no-hidden-states", K.HIDDEN_STATES_MISSING, lambda step, _: _frame(step, None), ("2 tokens",)
    ),
    FrameFault("one-row-less", K.SHAPE, _one_row_less, ("(1, 64)", "2 tokens of width 64")),
    FrameFault("other-width", K.SHAPE, _other_width, ("(2, 63)", "width 64")),
    FrameFault("flat", K.SHAPE, _flat, ("(128,)",)),
    FrameFault("longer-than-a-step-can-be", K.SHAPE, _edited(_too_long), ("8192",), names=()),
    FrameFault("other-dtype", K.DTYPE, _other_dtype, ("bf16", "f32")),
    FrameFault("epoch", K.EPOCH, _changed(epoch=77), ("77", "expected 1")),
    FrameFault("step-gap", K.STEP_ID, _changed(step_id=2), ("step 2", "expected 1"), reported_step=2),
    FrameFault("step-repeat", K.STEP_ID, _changed(step_id=0), ("step 0", "expected 1"), reported_step=0),
    FrameFault("never-started", K.SLICE_SET, _with_slice(_unknown_sequence), ("not started",), names=(1,)),
    FrameFault(
        "other-restart_count",
        K.SLICE_SET,
        _with_slice(lambda step_slice: replace(step_slice, restart_count=3)),
        ("restart count 3", "restart count 0"),
    ),
    FrameFault("twice-in-a-step", K.SLICE_SET, _twice, ("two slices",), names=(0,)),
    FrameFault(
        "token-outside-vocabulary",
        K.SLICE_SET,
        _with_slice(lambda step_slice: replace(step_slice, tokens=(128,))),
        ("token 128", "vocabulary of 128"),
    ),
    FrameFault(
        "token-count",
        K.UNDECODABLE,
        lambda step, hidden: _frame(_with_a_token_more(step), hidden),
        ("columns have",),
    ),
    FrameFault("prefill-after-prefill", K.SLICE_SET, _with_slice(_as_prefill), ("start record",)),
    FrameFault("hidden-of-another-step", K.SLICE_SET, _of_another_step, ("expected those of step 1",)),
    FrameFault(
        "hidden-of-the-step-before", K.SLICE_SET, _edited(_of_step_before), ("hidden states of step 0",)
    ),
    FrameFault("hidden-without-its-step", K.SLICE_SET, _without_its_step, ("no step waits",), names=()),
    FrameFault("hidden-before-its-step", K.SLICE_SET, _before_its_step, ("no step waits",), names=()),
    FrameFault("position-gap", K.POSITION, _with_slice(_later), ("position 6", "computed 5 tokens")),
    FrameFault("position-repeat", K.POSITION, _with_slice(_earlier), ("position 4", "computed 5 tokens")),
    FrameFault("second-start", K.RECORD, _second_start, ("is live",)),
    FrameFault("end-of-unknown", K.RECORD, _end_of_unknown, ("not live",)),
    FrameFault("end-that-keeps-blocks", K.RECORD, _end_that_keeps_blocks, ("holds 2 blocks",)),
    FrameFault("impossible-signal", K.KV_SIGNAL, _impossible_signal, ("Deref",)),
    FrameFault(
        "diverging-digest",
        K.KV_DIVERGENCE,
        lambda step, hidden: _frame(replace(step, digest=step.digest ^ 1), hidden),
        ("expected", "got"),
    ),
    FrameFault("flipped-payload", K.CHECKSUM, _edited(_flip_payload), ("expected", "got"), names=()),
    FrameFault("flipped-step", K.CHECKSUM, _edited_step(_flip_step), names=()),
    FrameFault("short-payload", K.CHECKSUM, _edited(_cut_payload), names=()),
    FrameFault("garbage-step", K.UNDECODABLE, _edited_step(_garbage_step), names=()),
    FrameFault("frame-within-frame", K.UNDECODABLE, _begins_again, names=()),
    FrameFault("no-chunk", K.UNDECODABLE, _hello_again, ("hello",), names=()),
)
