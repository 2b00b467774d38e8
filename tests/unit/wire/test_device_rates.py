"""Rates of devices: the text of flags, and the message of a hello."""

from __future__ import annotations

import pytest

from stageline_rpc.v1 import cluster_pb2
from wire.device_rates import DeviceRates, RateSource, decode_rates, encode_rates, parse_rate, rate_text

H100 = DeviceRates(bytes_per_s=3.35e12, operations_per_s=8e14)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("3350:800", H100),
        ("0.5:0.01", DeviceRates(bytes_per_s=5e8, operations_per_s=1e10)),
        *((source.value, source) for source in RateSource),
    ],
)
def test_a_rate_is_read_as_it_is_written(text: str, rate: RateSource | DeviceRates) -> None:
    assert parse_rate(text) == rate
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    "text", ["", "3350", "3350:", ":800", "0:800", "3350:0", "-1:2", "1e3:2", "fast", "1:2:3"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of auto, measure, none, and "):
        parse_rate(text)


def test_people_read_units() -> None:
    assert str(H100) == "3350 GB/s, 800 TFLOP/s"


def test_a_message_has_the_same_rates() -> None:
    assert decode_rates(encode_rates(H100)) == H100


@pytest.mark.parametrize(("read", "computed"), [(0, 1), (1, 0), (1 << 63, 1)])
def test_a_message_with_impossible_rates_is_refused(read: int, computed: int) -> None:
    message = cluster_pb2.DeviceRates(bytes_per_second=read, operations_per_second=computed)
    with pytest.raises(ValueError, match="must be above 0 and sensible"):
        decode_rates(message)
