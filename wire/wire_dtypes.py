"""What hidden states come in between stages: as they were computed, or smaller."""

import math
from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

from checkpoint.dtypes import DType
from stageline_rpc.v1 import stage_pb2


class ScaledDType(Enum):
    """One byte per element, and behind all elements one float32 per row that multiplies those of the row."""

    F8_E4M3 = "fp8"
    I8 = "int8"

    @property
    def size_bytes(self) -> int:
        """Bytes per element, without the scales."""
        return 1


WireDType: TypeAlias = DType | ScaledDType

_SCALE_BYTES = 4

CHOICES: dict[str, WireDType] = {
    "bf16": DType.BF16,
    "fp8": ScaledDType.F8_E4M3,
    "int8": ScaledDType.I8,
}
WIRE_DTYPE_TO_MESSAGE: dict[WireDType, stage_pb2.DType.ValueType] = {
    DType.BF16: stage_pb2.DTYPE_BF16,
    DType.F16: stage_pb2.DTYPE_F16,
    DType.F32: stage_pb2.DTYPE_F32,
    ScaledDType.F8_E4M3: stage_pb2.DTYPE_F8_E4M3,
    ScaledDType.I8: stage_pb2.DTYPE_I8,
}
WIRE_DTYPE_FROM_MESSAGE: dict[int, WireDType] = {
    number: dtype for dtype, number in WIRE_DTYPE_TO_MESSAGE.items()
}


def parse_wire_dtype(name: str) -> WireDType:
    """The dtype that a user calls `name`. Raises ValueError with all names."""
    found = CHOICES.get(name)
    if found is None:
        raise ValueError(f"wire dtype {name!r} is none of {', '.join(CHOICES)}")
    return found


def can_carry(wire_dtype: WireDType, computed: DType) -> bool:
    """Whether hidden states that are computed in `computed` may travel so: as they are, or smaller."""
    return wire_dtype is computed or (
        wire_dtype in CHOICES.values() and wire_dtype.size_bytes < computed.size_bytes
    )


def check_can_carry(wire_dtype: WireDType, computed: DType) -> None:
    """Raises ValueError where `can_carry` does not hold."""
    if not can_carry(wire_dtype, computed):
        raise ValueError(
            f"wire dtype {wire_dtype.value} does not make hidden states in {computed.value} any smaller"
        )


def payload_bytes(dtype: WireDType, shape: Sequence[int]) -> int:
    """Bytes of hidden states of this shape, with the scales of their rows if they have some."""
    elements = math.prod(shape) * dtype.size_bytes
    return elements + _SCALE_BYTES * math.prod(shape[:-1]) if isinstance(dtype, ScaledDType) else elements


def number_of(wire_dtype: WireDType | None) -> stage_pb2.DType.ValueType:
    """As messages have it; unspecified for None."""
    return stage_pb2.DTYPE_UNSPECIFIED if wire_dtype is None else WIRE_DTYPE_TO_MESSAGE[wire_dtype]
