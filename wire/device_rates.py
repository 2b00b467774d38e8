"""How fast a device reads memory and multiplies, as measured or told, between workers and planner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from stageline_rpc.v1 import cluster_pb2

_RATES = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", re.ASCII)
_MOST = 1e9
"""Gigabytes, or tera-operations, per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """Bytes of memory that are read or written per second, and operations of matrix products per second.

    A multiplication and the addition of its product are two operations.
    """

    bytes_per_s: float
    operations_per_s: float

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s <= _MOST * 1e9 and 0 < self.operations_per_s <= _MOST * 1e12):
            raise ValueError(
                f"rates are {self.bytes_per_s:g} bytes and {self.operations_per_s:g} operations per second, "
                "must be above 0 and sensible"
            )

    @classmethod
    def parse(cls, text: str) -> DeviceRates:
        """Parse GB/s:TFLOP/s, such as 3350:800. Raises ValueError."""
        found = _RATES.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not GB/s:TFLOP/s, such as 3350:800")
        return cls(bytes_per_s=float(found[1]) * 1e9, operations_per_s=float(found[2]) * 1e12)

    @property
    def spec(self) -> str:
        """The text that `parse` reads, rounded to 6 digits."""
        return f"{self.bytes_per_s / 1e9:.6g}:{self.operations_per_s / 1e12:.6g}"

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.4g} GB/s, {self.operations_per_s / 1e12:.3g} TFLOP/s"


class RateSource(Enum):
    """Where the rates of a worker come from. AUTO measures GPUs, and leaves CPUs without."""

    AUTO = "auto"
    MEASURE = "measure"
    NONE = "none"


def parse_rate(text: str) -> RateSource | DeviceRates:
    """Parse the name of a source, or rates. Raises ValueError."""
    names = [source.value for source in RateSource]
    if text in names:
        return RateSource(text)
    try:
        return DeviceRates.parse(text)
    except ValueError as error:
        raise ValueError(f"device rate {text!r} is none of {', '.join(names)}, and {error}") from None


def rate_text(rate: RateSource | DeviceRates) -> str:
    """The text that `parse_rate` reads."""
    return rate.value if isinstance(rate, RateSource) else rate.spec


def encode_rates(rates: DeviceRates) -> cluster_pb2.DeviceRates:
    return cluster_pb2.DeviceRates(
        bytes_per_second=round(rates.bytes_per_s), operations_per_second=round(rates.operations_per_s)
    )


def decode_rates(message: cluster_pb2.DeviceRates) -> DeviceRates:
    """Raises ValueError for a rate of 0 or beyond all devices."""
    return DeviceRates(bytes_per_s=message.bytes_per_second, operations_per_s=message.operations_per_second)
