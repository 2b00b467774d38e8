"""Element types of weights, activations and KV pages."""

from __future__ import annotations

from enum import Enum

from checkpoint.errors import UnknownDType


class DType(Enum):
    """An element type; the value is its short name, as used in plans, flags and messages."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def size_bytes(self) -> int:
        return 4 if self is DType.F32 else 2

    @classmethod
    def from_name(cls, name: str) -> DType:
        """Parse a short name, torch's ("bfloat16", "torch.half") or safetensors' ("BF16").

        Raises UnknownDType with the valid names.
        """
        dtype = _BY_NAME.get(name.lower().removeprefix("torch."))
        if dtype is None:
            raise UnknownDType(f"dtype {name!r} is not one of {', '.join(_BY_NAME)}")
        return dtype


_BY_NAME = {
    "bf16": DType.BF16,
    "f16": DType.F16,
    "f32": DType.F32,
    "bfloat16": DType.BF16,
    "float16": DType.F16,
    "half": DType.F16,
    "float32": DType.F32,
    "float": DType.F32,
}
