"""A result arrives as it was sent, or is refused."""

import pytest

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import SequenceKey, new_request_id
from wire.result_frames import decode_result_frame, encode_result_frame
from wire.steps import SliceResult, StageTime, StepResult

RESULT = StepResult(
    3, 7, (SliceResult(SequenceKey(new_request_id(), 0), 2, 41),), (StageTime(1, 2), StageTime(3, 4))
)


def test_a_result_comes_back() -> None:
    data = encode_result_frame(RESULT).SerializeToString()
    assert decode_result_frame(stage_pb2.DeliverRequest.FromString(data)) == RESULT


def test_every_flipped_bit_is_noticed() -> None:
    frame = encode_result_frame(RESULT).frame
    for index in range(len(frame.result)):
        broken = bytearray(frame.result)
        broken[index] ^= 1 << index % 8
        message = stage_pb2.DeliverRequest(
            frame=stage_pb2.ResultFrame(result=bytes(broken), checksum=frame.checksum)
        )
        with pytest.raises(StepFault) as raised:
            decode_result_frame(message)
        assert raised.value.kind is StepFaultKind.CHECKSUM


@pytest.mark.parametrize(
    "message",
    [
        stage_pb2.DeliverRequest(),
        stage_pb2.DeliverRequest(hello=stage_pb2.HopHello()),
        stage_pb2.DeliverRequest(frame=stage_pb2.ResultFrame(result=b"\xff", checksum=0xD6BCEC3C6B29D72E)),
    ],
)
def test_what_is_no_result_is_refused(message: stage_pb2.DeliverRequest) -> None:
    with pytest.raises(StepFault):
        decode_result_frame(message)
