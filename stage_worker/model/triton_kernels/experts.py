"""One product for all experts: rows sorted by expert, without the host knowing their numbers.

Matrices of 16 or 32 bits are multiplied here; those of 4 and 8 bits by `nibble_products` and
`byte_products`, in the same grid.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, PRECISION, Launch, padded


# fmt: off
@triton.jit
def _multiplied(
    x, matrix, rows, columns, num_rows, num_columns, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Products float32 of `rows` of `x` and of `matrix`, both of WIDTH elements, DEPTH at a time."""
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_inside = (depth < WIDTH)[None, :]
        left = tl.load(
            x + rows.to(tl.int64)[:, None] * WIDTH + depth[None, :],
            mask=(rows < num_rows)[:, None] & is_inside, other=0.0,
        )
        right = tl.load(
            matrix + columns.to(tl.int64)[:, None] * WIDTH + depth[None, :],
            mask=(columns < num_columns)[:, None] & is_inside, other=0.0,
        )
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    return total


@triton.jit
def expert_tile(
    counts, tile, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):
    """The expert of a tile of rows, the tile's rows [ROWS], and the end of the expert's rows.

    The expert is PADDED_EXPERTS for tiles after the last one.
    """
    numbers = tl.arange(0, PADDED_EXPERTS)
    rows_of = tl.load(counts + numbers, mask=numbers < EXPERTS, other=0).to(tl.int32)
    tiles_of = (rows_of + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(tiles_of)
    expert = tl.sum((last_tiles <= tile).to(tl.int32))
    is_before = numbers < expert
    first = tl.sum(tl.where(is_before, rows_of, 0))
    end = first + tl.sum(tl.where(numbers == expert, rows_of, 0))
    rows = first + (tile - tl.sum(tl.where(is_before, tiles_of, 0))) * ROWS + tl.arange(0, ROWS)
    return expert, rows, end


@triton.jit
def expert_kernel(
    x, matrices, biases, counts, found, num_columns,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDENS: tl.constexpr,
):
    """A tile of rows of one expert: grid [tiles of rows, tiles of columns]; more tiles than needed end."""
    expert, rows, end = expert_tile(counts, tl.program_id(0), EXPERTS, PADDED_EXPERTS, ROWS)
    if expert >= PADDED_EXPERTS:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = matrices + expert.to(tl.int64) * num_columns * WIDTH
    total = _multiplied(x, matrix, rows, columns, end, num_columns, WIDTH, DEPTH, WIDENS)
    if biases is not None:
        bias = tl.load(biases + expert * num_columns + columns, mask=columns < num_columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    into = found + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = (rows < end)[:, None] & (columns < num_columns)[None, :]
    tl.store(into, total.to(found.dtype.element_ty), mask=mask)
# fmt: on


_FEW_ROWS = 16
_MANY_ROWS = 64
_COLUMNS = 64


def num_row_tiles(num_rows: int, num_experts: int, rows: int) -> int:
    """Tiles of `rows` rows that suffice for any numbers of rows of each expert.

    Every expert with rows has at most one tile that is not full.
    """
    return num_rows // rows + min(num_experts, num_rows)


def expert_products(x: Tensor, counts: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
    """Rows [m, out] of `x` [m, in] sorted by expert, times `matrices` [experts, out, in].

    `counts` int64 [experts] are the rows of each expert. A row's product is summed in float32 in an order
    that depends on the number of rows per expert only in the size of its tile; `biases` [experts, out] are
    added before it is rounded.
    """
    num_experts, num_columns, width = matrices.shape
    rows = _FEW_ROWS if len(x) < _MANY_ROWS * num_experts else _MANY_ROWS
    found = x.new_empty(len(x), num_columns)
    constants = {
        "WIDTH": width,
        "EXPERTS": num_experts,
        "PADDED_EXPERTS": padded(num_experts),
        "ROWS": rows,
        "COLUMNS": _COLUMNS,
        "DEPTH": 64 if x.element_size() == 2 else 32,
        "WIDENS": IS_INTERPRETED,
    }
    grid = (num_row_tiles(len(x), num_experts, rows), triton.cdiv(num_columns, _COLUMNS))
    Launch(expert_kernel, grid, constants, num_stages=3)(x, matrices, biases, counts, found, num_columns)
    return found
