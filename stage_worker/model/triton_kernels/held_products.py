"""What products with 4-bit and with 8-bit weights share: tiles of activations, tile sizes, and the last sum.

Codes are whole numbers or fp8, exact in every run dtype, so tensor cores multiply them by activations
without rounding. A sum over the columns that share a scale is float32, and so is its product with the
scale: weights are never rounded to the run dtype.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from checkpoint.held import HeldPlan
from stage_worker.model.triton_kernels.experts import num_row_tiles
from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, PRECISION, Launch, padded


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


FEW_ROWS = 16
"""Rows of the smallest tile, which tensor cores need."""


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
        if num_rows <= FEW_ROWS:
            return cls(FEW_ROWS, 32, 8 if is_wide else 4)
        if is_wide:
            return cls(32, 64, 8)
        return cls(32, 64, 4) if num_rows <= 32 else cls(64, 64, 4)

    @classmethod
    def of_experts(cls, num_rows: int, num_experts: int, element_bytes: int) -> ProductTile:
        """For rows that are sorted by expert. More warps have fewer registers each, and finding the expert
        takes some: tiles of many rows would spill.
        """
        tile = cls.of(triton.cdiv(num_rows, num_experts), element_bytes)
        return tile if tile.rows == FEW_ROWS else replace(tile, num_warps=8)

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int]:
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, self.outputs)


@dataclass(frozen=True, slots=True)
class HeldKernel:
    """A kernel with its constants of one matrix."""

    kernel: Any
    constants: Mapping[str, Any]
    num_stages: int

    def launch(
        self, x: Tensor, grid: tuple[int, int], tile: ProductTile, arguments: Sequence[Any], **more: int
    ) -> None:
        """Start it for `x` [n, columns] with `arguments`, and `more` constants."""
        shared = {"WIDTH": x.shape[1], "ROWS": tile.rows, "OUTPUTS": tile.outputs, "WIDENS": IS_INTERPRETED}
        constants = {**shared, **self.constants, **more}
        Launch(self.kernel, grid, constants, tile.num_warps, self.num_stages)(x, x.stride(0), *arguments)


def held_product(
    kernel: HeldKernel,
    x: Tensor,
    plan: HeldPlan,
    tensors: Sequence[Tensor | None],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """`x` [n, columns] times a matrix, plus `bias` [rows] and `residual` [n, rows], in the dtype of `x`.

    Everything is added in float32, group by group, and rounded once. A row's result does not depend on the
    other rows, but for the sizes of tiles, which depend on their number. `tensors` are the kernel's own ones
    of a matrix of `plan`.
    """
    _check(x, plan.columns, residual, plan.rows)
    num_rows = len(x)
    found = x.new_empty(num_rows, plan.rows)
    tile = ProductTile.of(num_rows, x.element_size())
    residual_stride = None if residual is None else residual.stride(0)
    arguments = (*tensors, bias, residual, residual_stride, found, num_rows, plan.rows)
    kernel.launch(x, tile.grid(num_rows, plan.rows), tile, arguments)
    return found


def held_expert_products(
    kernel: HeldKernel,
    x: Tensor,
    counts: Tensor,
    plan: HeldPlan,
    tensors: Sequence[Tensor | None],
    biases: Tensor | None,
) -> Tensor:
    """As `held_product`, of rows [m, columns] of `x` sorted by expert and matrices one below the other.

    `counts` int64 [experts] are the rows of each expert; `biases` are [experts, out]. The result is [m, out].
    """
    _check(x, plan.columns, None, plan.rows)
    num_rows, num_outputs = len(x), plan.rows // plan.experts
    assert len(counts) == plan.experts and plan.experts * num_outputs == plan.rows, "other experts"
    found = x.new_empty(num_rows, num_outputs)
    tile = ProductTile.of_experts(num_rows, plan.experts, x.element_size())
    row_tiles = num_row_tiles(num_rows, plan.experts, tile.rows)
    grid = (row_tiles, triton.cdiv(num_outputs, tile.outputs))
    arguments = (*tensors, biases, counts, found, num_outputs)
    experts = {"EXPERTS": plan.experts, "PADDED_EXPERTS": padded(plan.experts)}
    kernel.launch(x, grid, tile, arguments, **experts)
    return found


def _check(x: Tensor, columns: int, residual: Tensor | None, outputs: int) -> None:
    """Assert that kernels can read `x` [n, columns] and `residual` [n, outputs]."""
    assert x.dim() == 2 and x.shape[1] == columns and x.stride(1) == 1, "rows of another width"
    if residual is not None:
        assert residual.shape == (len(x), outputs) and residual.stride(1) == 1, "a residual of another shape"
