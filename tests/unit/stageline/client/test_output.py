"""Guarantees of client outputs."""

import pytest
from google.protobuf.duration_pb2 import Duration

from stageline import FinishReason
from stageline.client.output import Usage, output_from
from stageline_rpc.v1 import inference_pb2


def test_a_finish_reason_is_its_text() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length"]
    assert FinishReason.STOP == "stop"


def test_usage_has_every_field_of_the_message() -> None:
    expected = {field.name for field in inference_pb2.Usage.DESCRIPTOR.fields}
    assert {name.removesuffix("_s") for name in Usage.__dataclass_fields__} == expected


@pytest.mark.parametrize("time", ["queue_time", "first_token_time", "decode_time"])
def test_a_time_is_in_seconds_and_none_where_the_server_has_none(time: str) -> None:
    usage = inference_pb2.Usage(**{time: Duration(seconds=2, nanos=500_000_000)})  # type: ignore[arg-type]
    ended = inference_pb2.GenerateResponse(finish_reason=inference_pb2.FINISH_REASON_STOP, usage=usage)
    found = output_from(ended).usage
    assert found is not None
    times = {name: getattr(found, f"{name}_s") for name in ("queue_time", "first_token_time", "decode_time")}
    assert times == {name: 2.5 if name == time else None for name in times}
