"""The product of one row with a matrix, which the matrix's bytes bound: cuBLAS divides its columns between
programs, and adds their sums by a second kernel. Products add up in float32 and are rounded once.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.triton_kernels.launch import Launch, padded

_ROWS = 4
"""Rows of the matrix of one program; measured on an H200 beside 2, 8 and 16, see bench/STUDIES.md."""
_COLUMNS = 1024
_NUM_STAGES = 3


# fmt: off
@triton.jit
def row_product_kernel(
    x, matrix, bias, added, found, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """`ROWS` rows of `matrix` [num_rows, num_columns]: grid [blocks of rows].

    IS_WHOLE: both sizes are multiples of a program's.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = matrix + rows.to(tl.int64)[:, None] * num_columns
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if IS_WHOLE:
            weights, given = tl.load(own + columns[None, :]), tl.load(x + columns)
        else:
            mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            weights = tl.load(own + columns[None, :], mask=mask, other=0.0)
            given = tl.load(x + columns, mask=columns < num_columns, other=0.0)
        sums += weights.to(tl.float32) * given.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    if added is not None:
        total += tl.load(added + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    tl.store(found + rows, total.to(found.dtype.element_ty), mask=rows < num_rows)
# fmt: on


def row_product(x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`matrix` [out, in] times `x` [1, in], plus `bias` [out]: [1, out], added to `residual` if given."""
    num_rows, num_columns = matrix.shape
    columns = min(_COLUMNS, padded(num_columns))
    found = x.new_empty(1, num_rows) if residual is None else residual
    constants = {
        "ROWS": _ROWS,
        "COLUMNS": columns,
        "IS_WHOLE": num_rows % _ROWS == 0 and num_columns % columns == 0,
    }
    Launch(row_product_kernel, (triton.cdiv(num_rows, _ROWS),), constants, num_stages=_NUM_STAGES)(
        x.contiguous(), matrix, bias, residual, found, num_rows, num_columns
    )
    return found
