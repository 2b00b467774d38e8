"""Frames as protobuf messages, for tests that inspect or damage one."""

from collections.abc import Iterator, Sequence

from stageline_rpc.internal.v1 import forward_pb2
from wire.frames import Frame, FrameAssembler, StepFrame, encode_hidden_states, encode_step_frame
from wire.payloads import PayloadNotice
from wire.steps import StageTime
from wire.tensors import HiddenStates


def step_message(step_bytes: bytes) -> forward_pb2.ForwardRequest:
    return forward_pb2.ForwardRequest.FromString(encode_step_frame(step_bytes))


def encode_frame(
    step_bytes: bytes,
    step_id: int,
    hidden: HiddenStates,
    stage_times: Sequence[StageTime] = (),
    *,
    to_first: bool = False,
) -> Iterator[forward_pb2.ForwardRequest]:
    """The step, then, unless the frame is `to_first`, its hidden states."""
    step = step_message(step_bytes)
    yield step
    if not to_first:
        for message in encode_hidden_states(step_id, step.steps[0].checksum, hidden, stage_times):
            yield forward_pb2.ForwardRequest.FromString(message)


def add_message(
    assembler: FrameAssembler, message: forward_pb2.ForwardRequest
) -> StepFrame | Frame | PayloadNotice | None:
    """`FrameAssembler.add` of a message with one part, as protobuf writes it."""
    received = assembler.add(message.SerializeToString())
    assert len(received) <= 1
    return received[0] if received else None
