"""Tensors on the wire, without torch: a header that states dtype, shape and byte order, and raw bytes."""

import sys
from dataclasses import dataclass

from checkpoint.dtypes import DType
from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.wire_dtypes import WIRE_DTYPE_FROM_MESSAGE, WIRE_DTYPE_TO_MESSAGE, WireDType, payload_bytes

DTYPE_TO_MESSAGE: dict[DType, stage_pb2.DType.ValueType] = {
    DType.BF16: stage_pb2.DTYPE_BF16,
    DType.F16: stage_pb2.DTYPE_F16,
    DType.F32: stage_pb2.DTYPE_F32,
}
DTYPE_FROM_MESSAGE: dict[int, DType] = {number: dtype for dtype, number in DTYPE_TO_MESSAGE.items()}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensor payloads are little-endian and are not swapped; this machine is big-endian")


@dataclass(slots=True, unsafe_hash=True)
class TensorView:
    """A dense, row-major, little-endian tensor over bytes that somebody else owns. Not modified once made.

    With a ScaledDType, the scales of its rows follow its elements.
    """

    dtype: WireDType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        actual = memoryview(self.data).nbytes
        if self.size_bytes != actual:
            raise ValueError(
                f"{self.dtype.value} tensor of shape {self.shape} has {self.size_bytes} bytes, got {actual}"
            )

    @property
    def size_bytes(self) -> int:
        return payload_bytes(self.dtype, self.shape)


def encode_header(tensor: TensorView, *, step_id: int, step_checksum: int) -> stage_pb2.TensorHeader:
    """The header of hidden states that were computed for the step with this id and checksum."""
    return stage_pb2.TensorHeader(
        dtype=WIRE_DTYPE_TO_MESSAGE[tensor.dtype],
        shape=tensor.shape,
        byte_order=stage_pb2.BYTE_ORDER_LITTLE_ENDIAN,
        size_bytes=tensor.size_bytes,
        step_id=step_id,
        step_checksum=step_checksum,
    )


def decode_tensor(header: stage_pb2.TensorHeader, payload: bytes | bytearray | memoryview) -> TensorView:
    """The tensor behind `header` and `payload`. Raises StepFault (DTYPE or SHAPE) with the numbers."""
    dtype = WIRE_DTYPE_FROM_MESSAGE.get(header.dtype)
    if dtype is None:
        raise StepFault(StepFaultKind.DTYPE, f"hidden states of unknown dtype number {header.dtype}")
    if header.byte_order != stage_pb2.BYTE_ORDER_LITTLE_ENDIAN:
        raise StepFault(
            StepFaultKind.DTYPE, f"hidden states of unknown byte order number {header.byte_order}"
        )
    shape = tuple(header.shape)
    expected = payload_bytes(dtype, shape)
    if not expected == header.size_bytes == len(payload):
        raise StepFault(
            StepFaultKind.SHAPE,
            f"hidden states {shape} in {dtype.value} need {expected} bytes; "
            f"the header says {header.size_bytes}, the payload has {len(payload)}",
        )
    return TensorView(dtype, shape, payload)
