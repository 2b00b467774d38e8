"""What products with 4-bit and with 8-bit weights share: tiles of activations, tile sizes, and the last sum.

Codes are whole numbers or fp8, exact in every run dtype, so tensor cores multiply them by activations
without rounding. A sum over the columns that share a scale is float32, and so is its product with the
scale: weights are never rounded to the run dtype.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from checkpoint.held import HeldPlan
from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, PRECISION, Launch


# fmt: off
@triton.jit
def input_tile(x, stride, order, rows, is_row, columns, WIDTH: tl.constexpr):
    """Elements [rows, columns] of `x`, whose column i is its element `order[i]`; zeros outside."""
    is_inside = columns < WIDTH
    places = columns if order is None else tl.load(order + columns, mask=is_inside, other=0)
    return tl.load(
        x + rows.to(tl.int64)[:, None] * stride + places[None, :],
        mask=is_row[:, None] & is_inside[None, :], other=0.0,
    )
# fmt: on


@triton.jit
def code_product(left, codes, total, WIDENS: tl.constexpr):
    """`total` [rows, outputs] plus the product of `left` [rows, n] and `codes` [outputs, n]."""
    right = codes.to(tl.float32)
    if WIDENS:
        left = left.to(tl.float32)
    else:
        right = right.to(left.dtype)
    return tl.dot(left, tl.trans(right), total, input_precision=PRECISION)


# fmt: off
@triton.jit
def write_sum(
    total, rows, is_row, outputs, is_output, bias, residual, residual_stride, found, num_outputs
):
    """Add bias and residual to `total` in float32, and round once."""
    mask = is_row[:, None] & is_output[None, :]
    if bias is not None:
        total = total + tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None]
    if residual is not None:
        kept = tl.load(residual + places * residual_stride + outputs[None, :], mask=mask, other=0.0)
        total = total + kept.to(tl.float32)
    tl.store(found + places * num_outputs + outputs[None, :], total.to(found.dtype.element_ty), mask=mask)
# fmt: on


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows of activations and outputs of one program.

    Few rows are bound by reading weights: more, smaller programs occupy the GPU. Programs with the same
    weights follow each other in the grid, so that its cache has them.
    """

    rows: int
    outputs: int
    num_warps: int

    @classmethod
    def of(cls, num_rows: int, element_bytes: int) -> ProductTile:
        """For activations of `element_bytes`: three products of float32 take more registers."""
        is_wide = element_bytes == 4
        if num_rows <= 16:
            return cls(16, 32, 8 if is_wide else 4)
        if is_wide:
            return cls(32, 64, 8)
        return cls(32, 64, 4) if num_rows <= 32 else cls(64, 64, 4)

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int]:
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, self.outputs)


def held_product(
    kernel: Any,
    x: Tensor,
    plan: HeldPlan,
    tensors: Sequence[Tensor | None],
    constants: Mapping[str, Any],
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    num_stages: int,
) -> Tensor:
    """`x` [n, columns] times a matrix, plus `bias` [rows] and `residual` [n, rows], in the dtype of `x`.

    Everything is added in float32, group by group, and rounded once. A row's result does not depend on the
    other rows, but for the sizes of tiles, which depend on their number. `tensors` and `constants` are the
    kernel's own ones of a matrix of `plan`.
    """
    _check(x, plan.columns, residual, plan.rows)
    num_rows = len(x)
    found = x.new_empty(num_rows, plan.rows)
    tile = ProductTile.of(num_rows, x.element_size())
    shared = {"WIDTH": plan.columns, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDENS": IS_INTERPRETED}
    grid = tile.grid(num_rows, plan.rows)
    Launch(kernel, grid, {**shared, **constants}, tile.num_warps, num_stages)(
        *(x, x.stride(0), *tensors, bias, residual),
        *(None if residual is None else residual.stride(0), found, num_rows, plan.rows),
    )
    return found


def _check(x: Tensor, columns: int, residual: Tensor | None, outputs: int) -> None:
    """Assert that kernels can read `x` [n, columns] and `residual` [n, outputs]."""
    assert x.dim() == 2 and x.shape[1] == columns and x.stride(1) == 1, "rows of another width"
    if residual is not None:
        assert residual.shape == (len(x), outputs) and residual.stride(1) == 1, "a residual of another shape"
