"""Hidden states of 8 bits on the wire, one launch each way: bit by bit those of `backends.tensor_views`.

The scale of a row is not finite if an element is not, so scales are the flags of a check, too.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint import ScaledDType
from checkpoint.dtypes import SCALE_BYTES
from stage_worker.model.triton_kernels.elements import encoded, from_e4m3, row_scale
from stage_worker.model.triton_kernels.launch import Launch, padded

_LARGEST = {ScaledDType.F8_E4M3: 448.0, ScaledDType.I8: 127.0}
_COLUMNS = 1024


# fmt: off
@triton.jit
def scale_kernel(
    hidden, stride, payload, first_scale, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr
):
    """One row: grid [rows]. Scales begin at byte `first_scale`, which may be misaligned for float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(hidden + row * stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    # The sum is not a number if an element is not finite, which a maximum may hide.
    largest = tl.full([1], 0.0, tl.float32) + (tl.max(tl.abs(x), 0) + tl.sum(x * 0.0, 0))
    scale = row_scale(largest, LARGEST)
    codes = encoded(x, tl.broadcast_to(scale, x.shape), LARGEST)
    if LARGEST != 448.0:
        codes = codes.to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(payload + row * WIDTH + columns, codes, mask=columns < WIDTH)
    places = tl.arange(0, 4)
    octets = (tl.broadcast_to(scale, [4]).to(tl.uint32, bitcast=True) >> (8 * places).to(tl.uint32)) & 0xFF
    tl.store(payload + first_scale + row * 4 + places, octets.to(tl.uint8))


@triton.jit
def unscale_kernel(
    payload, first_scale, found, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, IS_FP8: tl.constexpr
):
    """`COLUMNS` columns of one row: grid [rows, blocks of columns]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    codes = tl.load(payload + row * WIDTH + columns, mask=columns < WIDTH, other=0)
    places = tl.arange(0, 4)
    octets = tl.load(payload + first_scale + row * 4 + places).to(tl.uint32)
    scale = tl.sum(octets << (8 * places).to(tl.uint32), 0).to(tl.uint32).to(tl.float32, bitcast=True)
    if IS_FP8:
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), from_e4m3(codes))
    else:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    tl.store(found + row * WIDTH + columns, (values * scale).to(found.dtype.element_ty), mask=columns < WIDTH)
# fmt: on


def scale_rows(hidden: Tensor, dtype: ScaledDType) -> Tensor:
    """Encode `hidden` [n, width] as uint8: the elements of all rows, then their n scales."""
    num_rows, width = hidden.shape
    payload = hidden.new_empty(num_rows * (width + SCALE_BYTES), dtype=torch.uint8)
    columns = padded(width)
    constants = {"WIDTH": width, "COLUMNS": columns, "LARGEST": _LARGEST[dtype]}
    Launch(scale_kernel, (num_rows,), constants, max(1, min(16, columns // 512)))(
        hidden, hidden.stride(0), payload, num_rows * width
    )
    return payload


def unscale_rows(payload: Tensor, dtype: ScaledDType, shape: tuple[int, int], into: torch.dtype) -> Tensor:
    """Decode a uint8 payload to hidden states [n, width] in `into`; does not modify the payload."""
    num_rows, width = shape
    found = payload.new_empty(shape, dtype=into)
    constants = {"WIDTH": width, "COLUMNS": _COLUMNS, "IS_FP8": dtype is ScaledDType.F8_E4M3}
    Launch(unscale_kernel, (num_rows, triton.cdiv(width, _COLUMNS)), constants)(
        payload, num_rows * width, found
    )
    return found
