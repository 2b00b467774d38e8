"""Products of activations of 16 or 32 bits with weights of one byte, fp8 (E4M3) or int8 (W8A16).

Weights are converted inside. So activations keep their 16 bits, and GPUs before compute capability 8.9,
which cannot multiply fp8, run the same kernel. Decode steps are bound by reading weights, which are the same
bytes either way. `torch._scaled_mm` would round activations to fp8, too, and multiply at twice the rate of
bf16 from compute capability 8.9 on: faster prompts, for the error of that rounding.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.held_matrices import ByteMatrix
from stage_worker.model.triton_kernels.elements import from_e4m3
from stage_worker.model.triton_kernels.experts import expert_tile
from stage_worker.model.triton_kernels.held_products import (
    FEW_ROWS,
    HeldKernel,
    ProductTile,
    code_product,
    held_expert_products,
    held_product,
    input_tile,
    write_sum,
)


# fmt: off
@triton.jit
def _block_scales(scales, block, outputs, is_output, num_outputs, HEIGHT: tl.constexpr):
    places = block * tl.cdiv(num_outputs, HEIGHT) + outputs // HEIGHT
    return tl.load(scales + places, mask=is_output, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _byte_sum(
    x, stride, codes, scales, rows, is_row, outputs, is_output, num_outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_FP8: tl.constexpr, WIDENS: tl.constexpr,
):
    """Products float32 [ROWS, OUTPUTS] of `rows` of `x` and `outputs`, rows of a matrix of `num_outputs`.

    DEPTH columns at a time, of one block of BLOCK columns; a BLOCK of 0 has all columns.
    """
    lanes = tl.arange(0, DEPTH)
    of_outputs = codes + outputs.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        columns = start + lanes
        mask = is_output[:, None] & (columns < WIDTH)[None, :]
        found_codes = tl.load(of_outputs + start, mask=mask, other=0)
        values = from_e4m3(found_codes) if IS_FP8 else found_codes.to(tl.int8, bitcast=True)
        left = input_tile(x, stride, None, rows, is_row, columns, WIDTH)
        if BLOCK == 0:
            total = code_product(left, values, total, WIDENS)
        else:
            sums = code_product(left, values, tl.zeros([ROWS, OUTPUTS], tl.float32), WIDENS)
            total += sums * _block_scales(scales, start // BLOCK, outputs, is_output, num_outputs, HEIGHT)
    if BLOCK == 0:
        total = total * _block_scales(scales, 0, outputs, is_output, num_outputs, HEIGHT)
    return total


@triton.jit
def byte_kernel(
    x, stride, codes, scales, bias, residual, residual_stride, found, num_rows, num_outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_FP8: tl.constexpr, WIDENS: tl.constexpr,
):
    """A tile of the product: grid [tiles of rows, tiles of outputs]. See `ByteMatrix`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    total = _byte_sum(
        x, stride, codes, scales, rows, is_row, outputs, is_output, num_outputs,
        WIDTH, BLOCK, HEIGHT, DEPTH, ROWS, OUTPUTS, IS_FP8, WIDENS,
    )
    write_sum(total, rows, is_row, outputs, is_output, bias, residual, residual_stride, found, num_outputs)


@triton.jit
def byte_expert_kernel(
    x, stride, codes, scales, biases, counts, found, num_outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_FP8: tl.constexpr, WIDENS: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
):
    """As `byte_kernel`, of the rows of one expert, whose outputs are `num_outputs` rows of the matrix."""
    expert, rows, end = expert_tile(counts, tl.program_id(0), EXPERTS, PADDED_EXPERTS, ROWS)
    if expert >= PADDED_EXPERTS:
        return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output, first = rows < end, outputs < num_outputs, expert * num_outputs
    total = _byte_sum(
        x, stride, codes, scales, rows, is_row, first + outputs, is_output, EXPERTS * num_outputs,
        WIDTH, BLOCK, HEIGHT, DEPTH, ROWS, OUTPUTS, IS_FP8, WIDENS,
    )
    bias = None if biases is None else biases + first
    write_sum(total, rows, is_row, outputs, is_output, bias, None, None, found, num_outputs)
# fmt: on


_MOST_COLUMNS = 128
_MOST_WIDE_COLUMNS = 32
"""Columns at a time for activations of float32."""
_MOST_COLUMNS_OF_EXPERTS = 64
"""Columns at a time for tiles of many rows of an expert, whose registers do not suffice for more."""
_NUM_STAGES = 3


def _depth(block: int, element_bytes: int, most: int) -> int:
    """Columns at a time, `most` at most: a power of two that divides a block."""
    depth = _MOST_WIDE_COLUMNS if element_bytes == 4 else most
    while block % depth:
        depth //= 2
    return depth


def byte_product(
    x: Tensor, matrix: ByteMatrix, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `held_product`."""
    kernel = HeldKernel(byte_kernel, _constants(x, matrix, _MOST_COLUMNS), num_stages=_NUM_STAGES)
    return held_product(kernel, x, matrix.plan, (matrix.codes, matrix.scales), bias, residual)


def byte_expert_products(
    x: Tensor, counts: Tensor, matrix: ByteMatrix, biases: Tensor | None = None
) -> Tensor:
    """See `held_expert_products`."""
    tile = ProductTile.of_experts(len(x), matrix.plan.experts, x.element_size())
    most = _MOST_COLUMNS if tile.rows == FEW_ROWS else _MOST_COLUMNS_OF_EXPERTS
    kernel = HeldKernel(byte_expert_kernel, _constants(x, matrix, most), num_stages=_NUM_STAGES)
    return held_expert_products(kernel, x, counts, matrix.plan, (matrix.codes, matrix.scales), biases)


def _constants(x: Tensor, matrix: ByteMatrix, most_columns: int) -> dict[str, int]:
    plan = matrix.plan
    return {
        "BLOCK": plan.width,
        "HEIGHT": plan.height,
        "DEPTH": _depth(plan.width, x.element_size(), most_columns),
        "IS_FP8": plan.is_fp8,
    }
