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
from stage_worker.model.triton_kernels.held_products import (
    code_product,
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
def byte_kernel(
    x, stride, codes, scales, bias, residual, residual_stride, found, num_rows, num_outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_FP8: tl.constexpr, WIDENS: tl.constexpr,
):
    """A tile of the product: grid [tiles of rows, tiles of outputs]. See `ByteMatrix`.

    DEPTH columns at a time, of one block of BLOCK columns; a BLOCK of 0 has all columns.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output, lanes = rows < num_rows, outputs < num_outputs, tl.arange(0, DEPTH)
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
    write_sum(total, rows, is_row, outputs, is_output, bias, residual, residual_stride, found, num_outputs)
# fmt: on


_MOST_COLUMNS = 128
_MOST_WIDE_COLUMNS = 32
"""Columns at a time for activations of float32."""


def _depth(block: int, element_bytes: int) -> int:
    """The most columns at a time, a power of two, that divide a block."""
    depth = _MOST_WIDE_COLUMNS if element_bytes == 4 else _MOST_COLUMNS
    while block % depth:
        depth //= 2
    return depth


def byte_product(
    x: Tensor, matrix: ByteMatrix, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `held_product`."""
    plan = matrix.plan
    constants = {
        "BLOCK": plan.width,
        "HEIGHT": plan.height,
        "DEPTH": _depth(plan.width, x.element_size()),
        "IS_FP8": plan.is_fp8,
    }
    tensors = (matrix.codes, matrix.scales)
    return held_product(byte_kernel, x, plan, tensors, constants, bias, residual, num_stages=3)
