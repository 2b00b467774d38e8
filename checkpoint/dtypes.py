"""Element types of weights, activations and KV pages, and of quantised weights in files."""

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

    def row_bytes(self, width: int) -> int:
        """Size of one row of `width` elements."""
        return width * self.size_bytes

    @classmethod
    def from_name(cls, name: str) -> DType:
        """Parse a short name, torch's ("bfloat16", "torch.half") or safetensors' ("BF16").

        Raises UnknownDType with the valid names.
        """
        dtype = _BY_NAME.get(name.lower().removeprefix("torch."))
        if dtype is None:
            raise UnknownDType(f"dtype {name!r} is not one of {', '.join(_BY_NAME)}")
        return dtype


class ScaledDType(Enum):
    """One byte per element and one float32 scale per row; the value is its name in flags.

    The values of a row are its elements times its scale.
    """

    F8_E4M3 = "fp8"
    I8 = "int8"

    @property
    def size_bytes(self) -> int:
        return 1

    def row_bytes(self, width: int) -> int:
        """Size of one row of `width` elements, with its scale."""
        return width + SCALE_BYTES

    @classmethod
    def from_name(cls, name: str) -> ScaledDType:
        """Parse a name as users write it. Raises UnknownDType with the valid names."""
        for found in cls:
            if found.value == name:
                return found
        names = ", ".join(found.value for found in cls)
        raise UnknownDType(f"dtype {name!r} of keys and values is not one of {names}")


SCALE_BYTES = 4
"""Size of the scale of a row."""


class WeightFormat(Enum):
    """How the matrices of layers are held in memory where that is not the run dtype; the value is its name.

    INT8 has a scale per row; INT4 a scale and an offset per row and group of `INT4_GROUP` columns. Scales and
    offsets have the run dtype.
    """

    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def from_name(cls, name: str) -> WeightFormat:
        """Parse a name as users write it. Raises UnknownDType with the valid names."""
        for found in cls:
            if found.value == name:
                return found
        raise UnknownDType(f"weight format {name!r} is not one of {', '.join(found.value for found in cls)}")

    def matrix_bytes(self, rows: int, columns: int, dtype: DType) -> int:
        """Size of a matrix [rows, columns] of a model in `dtype`."""
        if self is WeightFormat.INT8:
            return rows * (columns + dtype.size_bytes)
        return rows * (columns // 2 + columns // INT4_GROUP * 2 * dtype.size_bytes)


INT4_GROUP = 32
"""The smallest group of torch's kernel: as fast as 64 and 128 (see bench/STUDIES.md), and the most exact."""
INT4_ROWS = 16
"""Matrices of torch's kernel have a multiple of this number of rows."""


class PackedDType(Enum):
    """An element type that only quantised weights have: it is unpacked to a DType when it is read."""

    F8_E4M3 = "f8_e4m3"
    F8_E8M0 = "f8_e8m0"
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    I64 = "i64"

    @property
    def size_bytes(self) -> int:
        return {PackedDType.I32: 4, PackedDType.I64: 8}.get(self, 1)


class BlockDType(Enum):
    """A quantised type of GGUF files: blocks of a row's elements are unpacked to a DType together."""

    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MXFP4 = "mxfp4"

    @property
    def num_elements(self) -> int:
        """Elements of a block."""
        return _BLOCKS[self][0]

    @property
    def num_bytes(self) -> int:
        """Size of a block."""
        return _BLOCKS[self][1]


_BLOCKS = {
    BlockDType.Q4_0: (32, 18),
    BlockDType.Q4_1: (32, 20),
    BlockDType.Q5_0: (32, 22),
    BlockDType.Q5_1: (32, 24),
    BlockDType.Q8_0: (32, 34),
    BlockDType.Q2_K: (256, 84),
    BlockDType.Q3_K: (256, 110),
    BlockDType.Q4_K: (256, 144),
    BlockDType.Q5_K: (256, 176),
    BlockDType.Q6_K: (256, 210),
    BlockDType.IQ4_NL: (32, 18),
    BlockDType.IQ4_XS: (256, 136),
    BlockDType.MXFP4: (32, 17),
}
"""Elements and bytes of a block."""

StoredDType = DType | PackedDType | BlockDType
"""An element type in a file."""

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


OVERFLOWS_F16 = frozenset(("gemma2", "gemma3_text", "gemma4_text", "glm4"))
"""Families by `model_type` whose published checkpoints have hidden states beyond the range of float16."""
