"""Alterations of frames between two stages; altered steps are encoded again with a valid checksum."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpoint import DType
from kvcache import Deref, FullBlock
from tests.frame_messages import encode_frame
from tests.integration.stream_proxy import Alteration, HopStream, Messages, StreamCut
from tests.step_slices import with_slices
from wire.errors import StepFaultKind
from wire.frames import Frame, hidden_checksum
from wire.ids import SequenceKey, new_request_id
from wire.step_codec import encode_step
from wire.steps import Decode, Prefill, SequenceSignal, Step, StepSlice
from wire.tensors import HiddenStates, TensorView


@dataclass(frozen=True)
class FrameFault:
    """`alter` breaks a frame, `kind` is the fault that the stage must report.

    `is_detected_in_next`: the stage rejects the frame after the altered one. `needs_hidden`: not possible on
    the way to FIRST.
    """

    name: str
    kind: StepFaultKind
    alter: Alteration
    is_detected_in_next: bool = False
    needs_hidden: bool = False

    def __str__(self) -> str:
        return self.name


def encoded(step: Step, hidden: HiddenStates, stream: HopStream) -> Messages:
    return tuple(encode_frame(encode_step(step), step.step_id, hidden, to_first=stream.is_to_first))


def unchanged(frame: Frame, stream: HopStream) -> Messages:
    return encoded(frame.step, frame.hidden, stream)


async def drop(frame: Frame, stream: HopStream) -> Messages:
    return ()


async def repeat(frame: Frame, stream: HopStream) -> Messages:
    return (*unchanged(frame, stream), *unchanged(frame, stream))


async def hold_until_next(frame: Frame, stream: HopStream) -> Messages:
    stream.held = list(unchanged(frame, stream))
    return ()


async def truncate(frame: Frame, stream: HopStream) -> Messages:
    """Split the hidden states into two chunks and drop the last; into FIRST, cut the step."""
    step, *hidden = unchanged(frame, stream)
    if not hidden:
        step.steps[0].step = step.steps[0].step[: len(step.steps[0].step) // 2]
    for message in hidden:
        chunk = message.hidden_states
        chunk.payload = chunk.payload[: len(chunk.payload) // 2]
        chunk.is_last = False
    return step, *hidden


async def cut(frame: Frame, stream: HopStream) -> Messages:
    raise StreamCut


def delay(seconds: float) -> Alteration:
    async def delayed(frame: Frame, stream: HopStream) -> Messages:
        await asyncio.sleep(seconds)
        return unchanged(frame, stream)

    return delayed


async def remove_hidden(frame: Frame, stream: HopStream) -> Messages:
    return encoded(frame.step, (), stream)


async def remove_row(frame: Frame, stream: HopStream) -> Messages:
    num_tokens, width = _shape(frame)
    (tensor,) = frame.hidden
    data = memoryview(tensor.data)[: -width * tensor.dtype.size_bytes]
    return encoded(frame.step, (TensorView(tensor.dtype, (num_tokens - 1, width), data),), stream)


async def halve_dtype(frame: Frame, stream: HopStream) -> Messages:
    num_tokens, width = _shape(frame)
    (tensor,) = frame.hidden
    assert tensor.dtype is DType.F32
    data = memoryview(tensor.data)[: num_tokens * width * 2]
    return encoded(frame.step, (TensorView(DType.BF16, (num_tokens, width), data),), stream)


async def take_hidden_of_step_before(frame: Frame, stream: HopStream) -> Messages:
    """Valid but for the step of the hidden states."""
    step, message = unchanged(frame, stream)
    chunk = message.hidden_states
    chunk.step_id -= 1
    chunk.step_checksum ^= 1
    chunk.checksum = hidden_checksum(chunk, chunk.payload)
    return step, message


async def drop_step(frame: Frame, stream: HopStream) -> Messages:
    """Hidden states without the step ahead of them; into FIRST, nothing."""
    _, *hidden = unchanged(frame, stream)
    return hidden


async def drop_hidden(frame: Frame, stream: HopStream) -> Messages:
    """A step whose hidden states never come, though those of the next one do; into FIRST, nothing."""
    step, *hidden = unchanged(frame, stream)
    return (step,) if hidden else ()


async def swap_parts(frame: Frame, stream: HopStream) -> Messages:
    step, message = unchanged(frame, stream)
    return message, step


async def flip_byte(frame: Frame, stream: HopStream) -> Messages:
    step, *hidden = unchanged(frame, stream)
    if frame.hidden:
        hidden[0].hidden_states.payload = _flipped(hidden[0].hidden_states.payload)
    else:
        step.steps[0].step = _flipped(step.steps[0].step)
    return step, *hidden


async def corrupt_signal(frame: Frame, stream: HopStream) -> Messages:
    """Add a signal for a block without an owner."""
    signal = SequenceSignal(frame.step.slices[0].sequence, Deref(FullBlock(12345)))
    return encoded(replace(frame.step, signals=(*frame.step.signals, signal)), frame.hidden, stream)


def change_step(change: Callable[[Step], Step]) -> Alteration:
    async def changed(frame: Frame, stream: HopStream) -> Messages:
        return encoded(change(frame.step), frame.hidden, stream)

    return changed


def change_slice(change: Callable[[StepSlice], StepSlice]) -> Alteration:
    return change_step(lambda step: with_slices(step, (change(step.slices[0]), *step.slices[1:])))


def _later(step_slice: StepSlice) -> StepSlice:
    step = step_slice.inference_step
    if isinstance(step, Decode):
        return replace(step_slice, inference_step=Decode(step.position + 1))
    # Both numbers grow, or the chunk would pass the end of its prefill.
    return replace(
        step_slice, inference_step=Prefill(step.start + 1, step.num_tokens, step.num_prefill_tokens + 1)
    )


def _of_unknown_sequence(step_slice: StepSlice) -> StepSlice:
    return replace(step_slice, sequence=SequenceKey(new_request_id(), 0))


def _shape(frame: Frame) -> tuple[int, int]:
    num_tokens, width = frame.hidden[0].shape
    return num_tokens, width


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


FRAME_FAULTS = (
    FrameFault("dropped", StepFaultKind.STEP_ID, drop, is_detected_in_next=True),
    FrameFault("repeated", StepFaultKind.STEP_ID, repeat),
    FrameFault("reordered", StepFaultKind.STEP_ID, hold_until_next, is_detected_in_next=True),
    FrameFault("truncated", StepFaultKind.UNDECODABLE, truncate, needs_hidden=True),
    FrameFault(
        "without-hidden-states", StepFaultKind.HIDDEN_STATES_MISSING, remove_hidden, needs_hidden=True
    ),
    FrameFault("wrong-shape", StepFaultKind.SHAPE, remove_row, needs_hidden=True),
    FrameFault("wrong-dtype", StepFaultKind.DTYPE, halve_dtype, needs_hidden=True),
    FrameFault(
        "old-epoch", StepFaultKind.EPOCH, change_step(lambda step: replace(step, epoch=step.epoch - 1))
    ),
    FrameFault(
        "wrong-step-id",
        StepFaultKind.STEP_ID,
        change_step(lambda step: replace(step, step_id=step.step_id + 7)),
    ),
    FrameFault(
        "hidden-states-of-another-step",
        StepFaultKind.SLICE_SET,
        take_hidden_of_step_before,
        needs_hidden=True,
    ),
    FrameFault("without-its-step", StepFaultKind.SLICE_SET, drop_step, needs_hidden=True),
    FrameFault(
        "without-its-hidden-states",
        StepFaultKind.SLICE_SET,
        drop_hidden,
        is_detected_in_next=True,
        needs_hidden=True,
    ),
    FrameFault("hidden-states-before-their-step", StepFaultKind.SLICE_SET, swap_parts, needs_hidden=True),
    FrameFault("slice-of-unknown-sequence", StepFaultKind.SLICE_SET, change_slice(_of_unknown_sequence)),
    FrameFault("flipped-byte", StepFaultKind.CHECKSUM, flip_byte),
    FrameFault("wrong-position", StepFaultKind.POSITION, change_slice(_later)),
    FrameFault("corrupt-signal", StepFaultKind.KV_SIGNAL, corrupt_signal),
    FrameFault(
        "wrong-digest",
        StepFaultKind.KV_DIVERGENCE,
        change_step(lambda step: replace(step, digest=step.digest ^ 1)),
    ),
)
