"""Step results on the way to the coordinator, each under a checksum over all of it."""

import xxhash
from google.protobuf.message import DecodeError

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.step_codec import decode_result, encode_result
from wire.steps import StepResult


def encode_result_frame(result: StepResult) -> stage_pb2.DeliverRequest:
    """The message that carries `result`."""
    data = encode_result(result).SerializeToString()
    frame = stage_pb2.ResultFrame(result=data, checksum=xxhash.xxh3_64_intdigest(data))
    return stage_pb2.DeliverRequest(frame=frame)


def decode_result_frame(message: stage_pb2.DeliverRequest) -> StepResult:
    """The result in `message`. Raises StepFault CHECKSUM or UNDECODABLE."""
    if message.WhichOneof("message") != "frame":
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"message {message.WhichOneof('message')!r} where a result was due"
        )
    data, expected = message.frame.result, message.frame.checksum
    actual = xxhash.xxh3_64_intdigest(data)
    if actual != expected:
        raise StepFault(
            StepFaultKind.CHECKSUM, f"result checksum: expected {expected:016x}, got {actual:016x}"
        )
    try:
        return decode_result(stage_pb2.StepResult.FromString(data))
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"result: {error}") from error
