"""Tensors on the wire, without torch: header, dtype and payload size."""

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from checkpoint.boundary import HIDDEN_STATES
from checkpoint.dtypes import SCALE_BYTES, DType, ScaledDType, WeightFormat
from checkpoint.implementation import Implementation
from stageline_rpc.internal.v1 import step_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.errors import StepFault, StepFaultKind

WireDType: TypeAlias = DType | ScaledDType


class HopRoute(Enum):
    """Ways of hidden states between stages: AUTO the fastest one that both ends offer, GRPC frames only."""

    AUTO = "auto"
    GRPC = "grpc"


CHOICES: dict[str, WireDType] = {
    "bf16": DType.BF16,
    "fp8": ScaledDType.F8_E4M3,
    "int8": ScaledDType.I8,
}
WEIGHT_FORMAT_TO_MESSAGE: dict[WeightFormat | None, cluster_pb2.WeightFormat.ValueType] = {
    None: cluster_pb2.WEIGHT_FORMAT_UNSPECIFIED,
    WeightFormat.INT8: cluster_pb2.WEIGHT_FORMAT_INT8,
    WeightFormat.INT4: cluster_pb2.WEIGHT_FORMAT_INT4,
}
IMPLEMENTATION_TO_MESSAGE: dict[Implementation, cluster_pb2.Implementation.ValueType] = {
    Implementation.NATIVE: cluster_pb2.IMPLEMENTATION_NATIVE,
    Implementation.TRANSFORMERS: cluster_pb2.IMPLEMENTATION_TRANSFORMERS,
}
IMPLEMENTATION_FROM_MESSAGE: dict[int, Implementation] = {
    cluster_pb2.IMPLEMENTATION_UNSPECIFIED: Implementation.NATIVE,
    **{number: implementation for implementation, number in IMPLEMENTATION_TO_MESSAGE.items()},
}
WEIGHT_FORMAT_FROM_MESSAGE: dict[int, WeightFormat | None] = {
    number: weights for weights, number in WEIGHT_FORMAT_TO_MESSAGE.items()
}
WIRE_DTYPE_TO_MESSAGE: dict[WireDType, cluster_pb2.Dtype.ValueType] = {
    DType.BF16: cluster_pb2.DTYPE_BF16,
    DType.F16: cluster_pb2.DTYPE_F16,
    DType.F32: cluster_pb2.DTYPE_F32,
    ScaledDType.F8_E4M3: cluster_pb2.DTYPE_F8_E4M3,
    ScaledDType.I8: cluster_pb2.DTYPE_I8,
}
WIRE_DTYPE_FROM_MESSAGE: dict[int, WireDType] = {
    number: dtype for dtype, number in WIRE_DTYPE_TO_MESSAGE.items()
}


def parse_wire_dtype(name: str) -> WireDType:
    """Parse a wire dtype name as users write it. Raises ValueError with the valid names."""
    wire_dtype = CHOICES.get(name)
    if wire_dtype is None:
        raise ValueError(f"wire dtype {name!r} is not one of {', '.join(CHOICES)}")
    return wire_dtype


def wire_dtype_name(wire_dtype: WireDType) -> str:
    """The name that `parse_wire_dtype` reads."""
    return next(name for name, choice in CHOICES.items() if choice is wire_dtype)


def can_carry(wire_dtype: WireDType, computed: DType) -> bool:
    """Whether `wire_dtype` can transport hidden states computed in `computed`: unchanged, or smaller."""
    return wire_dtype is computed or (
        wire_dtype in CHOICES.values() and wire_dtype.size_bytes < computed.size_bytes
    )


def check_can_carry(wire_dtype: WireDType, computed: DType) -> None:
    """Raise ValueError unless `can_carry`."""
    if not can_carry(wire_dtype, computed):
        raise ValueError(
            f"wire dtype {wire_dtype.value} is not smaller than hidden states in {computed.value}"
        )


def payload_bytes(dtype: WireDType, shape: Sequence[int]) -> int:
    """Size of hidden states of this shape, including the row scales of a ScaledDType."""
    elements = math.prod(shape) * dtype.size_bytes
    return elements + SCALE_BYTES * math.prod(shape[:-1]) if isinstance(dtype, ScaledDType) else elements


def number_of(wire_dtype: WireDType | None) -> cluster_pb2.Dtype.ValueType:
    """Return the number in messages; DTYPE_UNSPECIFIED for None."""
    return cluster_pb2.DTYPE_UNSPECIFIED if wire_dtype is None else WIRE_DTYPE_TO_MESSAGE[wire_dtype]


KV_DTYPE_FROM_MESSAGE: dict[int, ScaledDType | None] = {
    cluster_pb2.DTYPE_UNSPECIFIED: None,
    cluster_pb2.DTYPE_F8_E4M3: ScaledDType.F8_E4M3,
    cluster_pb2.DTYPE_I8: ScaledDType.I8,
}
"""Dtype of keys and values in the cache; None for the run dtype."""


def kv_dtype_text(number: int) -> str:
    """Name in errors of a dtype of keys and values in a message."""
    if number not in KV_DTYPE_FROM_MESSAGE:
        return f"number {number}"
    found = KV_DTYPE_FROM_MESSAGE[number]
    return "the run dtype" if found is None else found.value


DTYPE_TO_MESSAGE: dict[DType, cluster_pb2.Dtype.ValueType] = {
    DType.BF16: cluster_pb2.DTYPE_BF16,
    DType.F16: cluster_pb2.DTYPE_F16,
    DType.F32: cluster_pb2.DTYPE_F32,
}
DTYPE_FROM_MESSAGE: dict[int, DType] = {number: dtype for dtype, number in DTYPE_TO_MESSAGE.items()}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensor payloads are little-endian and are not swapped; this machine is big-endian")


MAX_TENSORS = 16
"""Tensors in one frame, far above what a model hands on."""


@dataclass(slots=True, unsafe_hash=True)
class TensorView:
    """A dense, row-major, little-endian tensor over borrowed bytes; never modified.

    With a ScaledDType, the row scales follow the elements. `name` is the tensor's name in the boundary.
    """

    dtype: WireDType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    name: str = HIDDEN_STATES

    def __post_init__(self) -> None:
        actual = memoryview(self.data).nbytes
        if self.size_bytes != actual:
            raise ValueError(
                f"{self.dtype.value} tensor of shape {self.shape} has {self.size_bytes} bytes, got {actual}"
            )

    @property
    def size_bytes(self) -> int:
        return payload_bytes(self.dtype, self.shape)

    @property
    def label(self) -> str:
        """The tensor in messages."""
        return tensor_label(self.name)


HiddenStates: TypeAlias = tuple[TensorView, ...]
"""What crosses a cut for one step: the tensors of the boundary, in its order; empty without slices."""


def tensor_label(name: str) -> str:
    """A tensor of this name in messages."""
    return "hidden states" if name == HIDDEN_STATES else f"tensor {name[:64]!r}"


def payload_of(hidden: HiddenStates) -> memoryview:
    """The bytes of all tensors; a copy if they do not follow each other in one writable buffer."""
    parts = [memoryview(tensor.data).cast("B") for tensor in hidden]
    joined = parts[0] if len(parts) == 1 else _joined(parts)
    return memoryview(b"".join(parts)) if joined is None else joined


def _joined(parts: Sequence[memoryview]) -> memoryview | None:
    """One view of parts that follow each other in one writable buffer, which is not read; None for others."""
    buffer = parts[0].obj
    if any(part.obj is not buffer or part.readonly or not part.nbytes for part in parts):
        return None
    begin = end = _address(parts[0])
    for part in parts:
        if _address(part) != end:
            return None
        end += part.nbytes
    whole = memoryview(buffer).cast("B")
    first = begin - _address(whole)
    return whole[first : first + end - begin]


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data))


def encode_headers(hidden: HiddenStates) -> step_pb2.TensorHeaders:
    """Headers of the tensors whose bytes are `payload_of`."""
    return step_pb2.TensorHeaders(
        tensors=[
            step_pb2.TensorHeader(
                dtype=WIRE_DTYPE_TO_MESSAGE[tensor.dtype],
                shape=tensor.shape,
                byte_order=step_pb2.BYTE_ORDER_LITTLE_ENDIAN,
                size_bytes=tensor.size_bytes,
                name=tensor.name,
            )
            for tensor in hidden
        ]
    )


def decode_tensors(headers: step_pb2.TensorHeaders, payload: bytes | bytearray | memoryview) -> HiddenStates:
    """Check `payload` against `headers`. Raises StepFault (DTYPE or SHAPE) with the numbers."""
    num_tensors = len(headers.tensors)
    if not 0 < num_tensors <= MAX_TENSORS:
        raise StepFault(
            StepFaultKind.SHAPE, f"{num_tensors} tensors in one frame, expected 1 to {MAX_TENSORS}"
        )
    if num_tensors == 1:
        return (_decode_tensor(headers.tensors[0], payload),)
    whole, position = memoryview(payload), 0
    tensors: list[TensorView] = []
    for header in headers.tensors:
        end = position + header.size_bytes if len(tensors) < num_tensors - 1 else len(whole)
        tensors.append(_decode_tensor(header, whole[position:end]))
        position = end
    return tuple(tensors)


def _decode_tensor(header: step_pb2.TensorHeader, payload: bytes | bytearray | memoryview) -> TensorView:
    name = header.name
    dtype = WIRE_DTYPE_FROM_MESSAGE.get(header.dtype)
    if dtype is None:
        raise StepFault(StepFaultKind.DTYPE, f"unknown dtype number {header.dtype} of {tensor_label(name)}")
    if header.byte_order != step_pb2.BYTE_ORDER_LITTLE_ENDIAN:
        raise StepFault(
            StepFaultKind.DTYPE, f"unknown byte order number {header.byte_order} of {tensor_label(name)}"
        )
    shape = tuple(header.shape)
    expected = payload_bytes(dtype, shape)
    if not expected == header.size_bytes == len(payload):
        raise StepFault(
            StepFaultKind.SHAPE,
            f"{tensor_label(name)} {shape} in {dtype.value} need {expected} bytes; "
            f"the header says {header.size_bytes}, the payload has {len(payload)}",
        )
    return TensorView(dtype, shape, payload, name)
