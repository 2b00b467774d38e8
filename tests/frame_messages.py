"""Frames as protobuf messages, for tests that inspect or damage one."""

from collections.abc import Iterator, Sequence

from stageline_rpc.internal.v1 import forward_pb2
from wire import frames
from wire.frames import Frame, FrameAssembler
from wire.steps import StageTime
from wire.tensors import TensorView


def encode_frame(
    step_bytes: bytes, step_id: int, hidden: TensorView | None, stage_times: Sequence[StageTime] = ()
) -> Iterator[forward_pb2.ForwardRequest]:
    """`wire.frames.encode_frame`, decoded again."""
    for message in frames.encode_frame(step_bytes, step_id, hidden, stage_times):
        yield forward_pb2.ForwardRequest.FromString(message)


def add_chunk(assembler: FrameAssembler, chunk: forward_pb2.FrameChunk) -> Frame | None:
    """`FrameAssembler.add` of a message as protobuf writes it."""
    return assembler.add(forward_pb2.ForwardRequest(chunk=chunk).SerializeToString())
