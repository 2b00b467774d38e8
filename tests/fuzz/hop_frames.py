"""Surfaces of a hop: streams of frames into a stage and of results into the coordinator, and the step codec.

A case of `frames` is a JSON list of hexadecimal messages after the kind of stream. A case of `steps` is the
kind of message in one byte, and its encoding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import xxhash
from google.protobuf.message import DecodeError, Message

from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from kvcache import (
    CopyState,
    Deref,
    Destroy,
    FreeState,
    FullBlock,
    LiveState,
    PartialBlock,
    Promote,
    SavedState,
    TakeState,
    Use,
)
from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, join_pb2, step_pb2
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import mutate_bytes
from tests.fuzz.protobuf import mutate_message
from wire.errors import StepFault
from wire.frames import (
    Frame,
    FrameAssembler,
    decode_result_frame,
    encode_hidden_states,
    encode_result_frame,
    encode_step_frame,
    hidden_checksum,
    step_frame_checksum,
)
from wire.ids import RequestId, SequenceKey
from wire.payloads import PayloadNotice
from wire.sampling import GrammarSpec, StepSampling
from wire.step_codec import decode_fault, decode_result, decode_step, encode_result, encode_step
from wire.steps import (
    Decode,
    EndRecord,
    Prefill,
    SequenceSignal,
    SliceError,
    SliceResult,
    StageTime,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
)
from wire.tensors import TensorView, WireDType, payload_bytes

_KEY, _OTHER = SequenceKey(RequestId(bytes(range(16))), 0), SequenceKey(RequestId(bytes(range(1, 17))), 3)
_SCORE = TokenLogprobs(7, -0.5, 1, ((7, -0.5), (8, -1.5)))
_TIMES = (StageTime(1, 2, 3, 4), StageTime(5, 6, -7, 8))
MAX_PAYLOAD = 1 << 20


def _step() -> Step:
    sampling = StepSampling(
        temperature=0.5,
        seed=1,
        logit_bias=((3, 1.0),),
        bad_words=((1, 2),),
        logprobs=2,
        grammar=GrammarSpec(definition="{}", tokenizer_checksum=5),
    )
    signals = (Use((FullBlock(1), PartialBlock(2)), (4,), 9), Promote(PartialBlock(2), 3, None, 4))
    more = (Deref(FullBlock(1)), Destroy(PartialBlock(2)))
    of_states = (
        TakeState(LiveState(5)),
        CopyState(LiveState(5), SavedState(6), 16),
        FreeState(SavedState(6)),
    )
    return Step.of(
        (StepSlice(_KEY, 0, (5,), Decode(9)), StepSlice(_OTHER, 1, (1, 2, 3), Prefill(0, 3, 9, True))),
        epoch=4,
        step_id=11,
        starts=(StartRecord(_OTHER, 1, 9, (1, 2, 3, 4, 5, 6, 7, 8, 9), sampling, ""),),
        ends=(EndRecord(_KEY, 0),),
        signals=tuple(SequenceSignal(_KEY, signal) for signal in (*signals, *more, *of_states)),
        digest=77,
    )


def _result() -> StepResult:
    failed = SliceError(step_pb2.SliceError.Kind.values()[-1], 1, "failed")
    rows = (SliceResult(_KEY, 0, 5, _SCORE, (_SCORE,)), SliceResult(_OTHER, 1, failed))
    return StepResult.of(4, 11, rows, _TIMES)


STEP, RESULT = _step(), _result()
_FAULT = join_pb2.StepFault(epoch=4, step_id=1, stage=1, kind=3, message="m", request_ids=[_KEY.request_id])
_KINDS: dict[bytes, tuple[Message, Callable[[bytes], object]]] = {
    b"s": (step_pb2.Step.FromString(encode_step(STEP)), decode_step),
    b"r": (encode_result(RESULT), lambda data: decode_result(step_pb2.StepResult.FromString(data))),
    b"f": (_FAULT, lambda data: decode_fault(join_pb2.StepFault.FromString(data))),
}


def make_step(random: Random) -> bytes:
    kind = random.choice(b"sssrrf").to_bytes(1, "little")
    return kind + mutate_message(_KINDS[kind][0], random)


def make_frames(random: Random) -> bytes:
    """Messages of one to three frames, with checksums made right again, mostly."""
    if random.random() < 0.25:
        return json.dumps(["results", _changed_result(random).hex()]).encode()
    kind = random.choice(("first", "middle", "open"))
    messages = []
    for number in range(random.randint(1, 3)):
        step = encode_step(STEP) if random.random() < 0.6 else mutate_message(_KINDS[b"s"][0], random)
        messages += [encode_step_frame(step, ready_at_us=number)]
        if kind != "first" or random.random() < 0.1:
            messages += _hidden(step, random)
    if random.random() < 0.5:
        at = random.randrange(len(messages))
        messages[at] = _changed_message(messages[at], random)
    if random.random() < 0.3:
        random.shuffle(messages)
    if random.random() < 0.2:
        messages = [b"".join(messages)]
    return json.dumps([kind, *(message.hex() for message in messages)]).encode()


def _hidden(step: bytes, random: Random) -> list[bytes]:
    dtype: WireDType = random.choice((DType.BF16, DType.F32, ScaledDType.I8))
    shape = random.choice(((4, 8), (0, 8), (4, 64), (1,)))
    data = random.randbytes(payload_bytes(dtype, shape))
    hidden = (TensorView(dtype, shape, data), TensorView(dtype, shape, data, "other"))[
        : random.choice((1, 2))
    ]
    is_remote = random.random() < 0.2
    notice = PayloadNotice(1, len(data), 5) if is_remote else None
    step_id = STEP.step_id if random.random() < 0.9 else 12
    return list(
        encode_hidden_states(step_id, step_frame_checksum(step, 0), hidden, _TIMES[:1], notice=notice)
    )


def _changed_message(message: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return mutate_bytes(message, random)
    changed = forward_pb2.ForwardRequest()
    try:
        changed.ParseFromString(mutate_message(forward_pb2.ForwardRequest.FromString(message), random))
    except DecodeError:
        return mutate_bytes(message, random)
    for frame in changed.steps:
        frame.checksum = step_frame_checksum(frame.step, frame.ready_at_us)
    if changed.HasField("hidden_states"):
        chunk = changed.hidden_states
        chunk.checksum = hidden_checksum(chunk, chunk.payload)
    return changed.SerializeToString()


def _changed_result(random: Random) -> bytes:
    message = encode_result_frame(RESULT)
    if random.random() < 0.8:
        message.frame.result = mutate_message(_KINDS[b"r"][0], random)
        message.frame.checksum = xxhash.xxh3_64_intdigest(message.frame.result)
    return message.SerializeToString() if random.random() < 0.7 else mutate_message(message, random)


@contextmanager
def opened_steps() -> Iterator[Opened]:
    def examine(data: bytes) -> str:
        _, decode = _KINDS[data[:1]]
        return _outcome(lambda: _use(decode(data[1:])), data[:1])

    yield Opened(examine, lambda: _check_steps(examine), (os.getpid(),))


def _use(decoded: object) -> None:
    """Read what stages and the coordinator read first."""
    if isinstance(decoded, Step):
        _ = decoded.request_ids, decoded.num_tokens, decoded.slices, list(decoded.grows)
        encoded = encode_step(decoded)
        if encode_step(decode_step(encoded)) != encoded:  # steps with NaN are not equal
            raise Broken("a step changes when it is decoded and encoded")
    elif isinstance(decoded, StepResult):
        decode_result(encode_result(decoded))


def _outcome(work: Callable[[], object], kind: bytes = b"") -> str:
    """Callers take DecodeErrors of results, and ValueErrors of faults, for invalid messages."""
    try:
        work()
    except StepFault as fault:
        return fault.kind.name
    except DecodeError:
        return "DecodeError"
    except ValueError:
        if kind != b"f":
            raise
        return "ValueError"
    return "ok"


def _check_steps(examine: Callable[[bytes], str]) -> None:
    for kind, (valid, _) in _KINDS.items():
        if examine(kind + valid.SerializeToString()) != "ok":
            raise Broken(f"a valid message {kind!r} is refused")


@contextmanager
def opened_frames() -> Iterator[Opened]:
    yield Opened(_examine_frames, _check_frames, (os.getpid(),))


def _examine_frames(data: bytes) -> str:
    kind, *messages = json.loads(data)
    received = [bytes.fromhex(message) for message in messages]
    if kind == "results":
        request = deliver_pb2.DeliverRequest
        return _outcome(lambda: decode_result_frame(request.FromString(received[0])))
    assembler = FrameAssembler(
        max_payload_bytes=MAX_PAYLOAD,
        takes_hidden=kind != "first",
        num_stages_before=1 if kind == "middle" else None,
        max_ahead_bytes=1 << 20,
    )
    return _outcome(lambda: _assemble(assembler, received))


def _assemble(assembler: FrameAssembler, messages: list[bytes]) -> None:
    for message in messages:
        for part in assembler.add(message):
            frame = assembler.add_payload(bytes(16)) if isinstance(part, PayloadNotice) else part
            _use(frame.step)
            for tensor in frame.hidden if isinstance(frame, Frame) else ():
                memoryview(tensor.data).tobytes()
    assembler.finish()


def _check_frames() -> None:
    step = encode_step(STEP)
    view = TensorView(DType.F32, (4, 8), bytes(128))
    hidden = encode_hidden_states(STEP.step_id, step_frame_checksum(step, 0), (view,), _TIMES[:1])
    case = json.dumps(["middle", encode_step_frame(step).hex(), *(message.hex() for message in hidden)])
    if (outcome := _examine_frames(case.encode())) != "ok":
        raise Broken(f"a valid frame ends in {outcome}")


SURFACES = (
    Surface(name="frames", share=12, make=make_frames, opened=opened_frames),
    Surface(name="steps", share=12, make=make_step, opened=opened_steps),
)
