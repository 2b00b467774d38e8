"""Matrices of 4 and 8 bits as products on a GPU read them, see `triton_kernels.nibble_products` and
`triton_kernels.byte_products`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from checkpoint.dtypes import INT4_GROUP
from checkpoint.held import HeldBytes, HeldNibbles
from stage_worker.model.quantize import int4_groups, int8_rows

_QUANTIZED_ROWS = 4096
"""Rows that are quantised at a time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NibbleMatrix:
    """A matrix [rows, columns] of 4-bit codes q: (q - zero) * scale + offset for each row and group.

    Attributes:
        plan: Its sizes.
        codes: uint8 [rows, `plan.row_bytes`]: byte i of a run has column i in its low bits and column
            `plan.half` + i in its high ones.
        scales: [groups, rows], of any dtype.
        zeros: uint8 [groups, rows]; None for 8 everywhere.
        offsets: [groups, rows]; None for 0 everywhere.
        order: int32 [columns], the element of the input for each column; None if in order.
    """

    plan: HeldNibbles
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def quantized(cls, weight: Tensor) -> Self:
        """Round `weight` [rows, columns] as `--quantize int4` does, see `quantize`."""
        plan = HeldNibbles(rows=weight.shape[0], columns=weight.shape[1], group=INT4_GROUP)
        codes = weight.new_empty(plan.rows, plan.row_bytes, dtype=torch.uint8)
        scales, offsets = (weight.new_empty(plan.num_groups, plan.rows) for _ in range(2))
        for begin in range(0, plan.rows, _QUANTIZED_ROWS):
            rows = slice(begin, begin + _QUANTIZED_ROWS)
            found, scale, offset = int4_groups(weight[rows])
            codes[rows] = packed_nibbles(found, plan.half)
            scales[:, rows], offsets[:, rows] = scale.t(), offset.t()
        return cls(plan=plan, codes=codes, scales=scales, offsets=offsets)


def packed_nibbles(codes: Tensor, half: int) -> Tensor:
    """Codes uint8 [rows, columns] up to 15 as bytes in runs, see `NibbleMatrix`; padded with zeros."""
    rows, columns = codes.shape
    missing = -columns % (2 * half)
    if missing:
        codes = torch.cat((codes, codes.new_zeros(rows, missing)), dim=1)
    low, high = codes.view(rows, -1, 2, half).unbind(2)
    return (low | (high << 4)).flatten(1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByteMatrix:
    """A matrix [rows, columns] of one byte a weight: a value times the scale of its block.

    Attributes:
        plan: Its sizes.
        codes: uint8 [rows, columns]: bytes of float8_e4m3fn without NaN if `plan.is_fp8`, else of int8.
        scales: [blocks of a row, blocks of a column], of any dtype.
    """

    plan: HeldBytes
    codes: Tensor
    scales: Tensor

    @classmethod
    def quantized(cls, weight: Tensor) -> Self:
        """Round `weight` [rows, columns] as `--quantize int8` does, see `quantize`."""
        rows, columns = weight.shape
        plan = HeldBytes(rows=rows, columns=columns, height=1, width=0, is_fp8=False)
        codes = weight.new_empty(rows, columns, dtype=torch.uint8)
        scales = weight.new_empty(1, rows)
        for begin in range(0, rows, _QUANTIZED_ROWS):
            part = slice(begin, begin + _QUANTIZED_ROWS)
            found, scales[0, part] = int8_rows(weight[part])
            codes[part] = found.view(torch.uint8)
        return cls(plan=plan, codes=codes, scales=scales)


HeldMatrix = NibbleMatrix | ByteMatrix
