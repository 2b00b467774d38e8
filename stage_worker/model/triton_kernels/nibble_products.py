"""Products of activations of 16 or 32 bits with 4-bit weights in groups along the columns (W4A16).

Weights are integers, or floats (E2M1) of MXFP4 and NVFP4.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.held_matrices import NibbleMatrix
from stage_worker.model.triton_kernels.elements import from_e2m1, from_e8m0
from stage_worker.model.triton_kernels.experts import expert_tile
from stage_worker.model.triton_kernels.held_products import (
    HeldKernel,
    code_product,
    held_expert_products,
    held_product,
    input_tile,
    write_sum,
)

_MIDDLE = tl.constexpr(8)
_NUM_STAGES = 4


# fmt: off
@triton.jit
def _plus_group(
    total, left, codes, scales, zeros, offsets, outputs, is_output, group, num_outputs,
    IS_FLOAT: tl.constexpr, HAS_EXPONENTS: tl.constexpr, WIDENS: tl.constexpr,
):
    """`total` plus the product of `left` with the weights of `codes` int32 [outputs, n], of one group."""
    of_group = group * num_outputs + outputs
    if IS_FLOAT:
        codes = from_e2m1(codes)
    elif zeros is None:
        codes = codes - _MIDDLE
    else:
        codes = codes - tl.load(zeros + of_group, mask=is_output, other=0).to(tl.int32)[:, None]
    sums = code_product(left, codes, tl.zeros([left.shape[0], codes.shape[0]], tl.float32), WIDENS)
    scale = tl.load(scales + of_group, mask=is_output, other=0)
    scale = from_e8m0(scale) if HAS_EXPONENTS else scale.to(tl.float32)
    total += sums * scale[None, :]
    if offsets is not None:
        offset = tl.load(offsets + of_group, mask=is_output, other=0.0).to(tl.float32)
        total += tl.sum(left.to(tl.float32), 1)[:, None] * offset[None, :]
    return total


@triton.jit
def _nibble_sum(
    x, stride, order, codes, scales, zeros, offsets, rows, is_row, outputs, is_output, num_outputs,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ROW_BYTES: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_EXPONENTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Products float32 [ROWS, OUTPUTS] of `rows` of `x` and `outputs`, rows of a matrix of `num_outputs`."""
    lanes = tl.arange(0, HALF)
    of_outputs = codes + outputs.to(tl.int64)[:, None] * ROW_BYTES + lanes[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for run in range(0, ROW_BYTES, HALF):
        both = tl.load(of_outputs + run, mask=is_output[:, None], other=0).to(tl.int32)
        first = 2 * run
        left = input_tile(x, stride, order, rows, is_row, first + lanes, WIDTH)
        total = _plus_group(
            total, left, both & 15, scales, zeros, offsets, outputs, is_output, first // GROUP, num_outputs,
            IS_FLOAT, HAS_EXPONENTS, WIDENS,
        )
        if first + HALF < WIDTH:
            left = input_tile(x, stride, order, rows, is_row, first + HALF + lanes, WIDTH)
            total = _plus_group(
                total, left, both >> 4, scales, zeros, offsets, outputs, is_output, (first + HALF) // GROUP,
                num_outputs, IS_FLOAT, HAS_EXPONENTS, WIDENS,
            )
    return total


@triton.jit
def nibble_kernel(
    x, stride, order, codes, scales, zeros, offsets, bias, residual, residual_stride, found,
    num_rows, num_outputs, WIDTH: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    ROW_BYTES: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_EXPONENTS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDENS: tl.constexpr,
):
    """A tile of the product: grid [tiles of rows, tiles of outputs]. See `NibbleMatrix`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    total = _nibble_sum(
        x, stride, order, codes, scales, zeros, offsets, rows, is_row, outputs, is_output, num_outputs,
        WIDTH, GROUP, HALF, ROW_BYTES, IS_FLOAT, HAS_EXPONENTS, ROWS, OUTPUTS, WIDENS,
    )
    write_sum(total, rows, is_row, outputs, is_output, bias, residual, residual_stride, found, num_outputs)


@triton.jit
def nibble_expert_kernel(
    x, stride, order, codes, scales, zeros, offsets, biases, counts, found, num_outputs,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ROW_BYTES: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_EXPONENTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDENS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
):
    """As `nibble_kernel`, of the rows of one expert, whose outputs are `num_outputs` rows of the matrix."""
    expert, rows, end = expert_tile(counts, tl.program_id(0), EXPERTS, PADDED_EXPERTS, ROWS)
    if expert >= PADDED_EXPERTS:
        return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output, first = rows < end, outputs < num_outputs, expert * num_outputs
    total = _nibble_sum(
        x, stride, None if order is None else order + expert * WIDTH, codes, scales, zeros, offsets,
        rows, is_row, first + outputs, is_output, EXPERTS * num_outputs,
        WIDTH, GROUP, HALF, ROW_BYTES, IS_FLOAT, HAS_EXPONENTS, ROWS, OUTPUTS, WIDENS,
    )
    bias = None if biases is None else biases + first
    write_sum(total, rows, is_row, outputs, is_output, bias, None, None, found, num_outputs)
# fmt: on


def nibble_product(
    x: Tensor, matrix: NibbleMatrix, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `held_product`."""
    kernel = HeldKernel(nibble_kernel, _constants(matrix), num_stages=_NUM_STAGES)
    return held_product(kernel, x, matrix.plan, _tensors(matrix), bias, residual)


def nibble_expert_products(
    x: Tensor, counts: Tensor, matrix: NibbleMatrix, biases: Tensor | None = None
) -> Tensor:
    """See `held_expert_products`."""
    kernel = HeldKernel(nibble_expert_kernel, _constants(matrix), num_stages=_NUM_STAGES)
    return held_expert_products(kernel, x, counts, matrix.plan, _tensors(matrix), biases)


def _constants(matrix: NibbleMatrix) -> dict[str, int]:
    plan = matrix.plan
    return {
        "GROUP": plan.group or 2 * plan.row_bytes,
        "HALF": plan.half,
        "ROW_BYTES": plan.row_bytes,
        "IS_FLOAT": plan.is_float,
        "HAS_EXPONENTS": plan.has_exponents,
    }


def _tensors(matrix: NibbleMatrix) -> tuple[Tensor | None, ...]:
    return matrix.order, matrix.codes, matrix.scales, matrix.zeros, matrix.offsets
