"""Norms of queries, keys and values, the rotation, and the write of keys and values to pages, in one launch.

Rounded to the run dtype where torch's operators round: after the norm, and after each product and sum of the
rotation. Keys and values exist in pages only; attention reads them there.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.triton_kernels.elements import encoded, row_scale
from stage_worker.model.triton_kernels.launch import Launch, padded

_HEADS = 8
"""Heads of one program."""
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadNorm:
    """RMSNorm of each query and key by `weights` [2, head_dim]: those of queries, then of keys.

    With `rounds_first` weights are in the run dtype, and multiply what is rounded to it; else float32.
    """

    weights: Tensor
    eps: float
    rounds_first: bool
    is_after_rotation: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadPlan:
    """What happens to heads beside the rotation: norms of queries and keys, unit norms of values."""

    norm: HeadNorm | None = None
    value_eps: float | None = None


@triton.jit
def _scaled_to_unit(x, y, eps, HALF: tl.constexpr):
    """Heads given as halves [heads, lanes], scaled to unit mean square."""
    factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
    return x * factor, y * factor


@triton.jit
def normed_halves(x, y, weights, mask, eps, into, HALF: tl.constexpr, ROUNDS: tl.constexpr):
    """Norm halves of heads by `weights` [heads, lanes]."""
    x, y = _scaled_to_unit(x, y, eps, HALF)
    if ROUNDS:
        x, y = x.to(into).to(tl.float32), y.to(into).to(tl.float32)
    x = x * tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    y = y * tl.load(weights + HALF, mask=mask, other=0.0).to(tl.float32)
    return x.to(into).to(tl.float32), y.to(into).to(tl.float32)


@triton.jit
def _turned(x, other, cos, sin, into):
    """x * cos + other * sin, rounded like torch's operators."""
    left, right = (x * cos).to(into).to(tl.float32), (other * sin).to(into).to(tl.float32)
    return (left + right).to(into).to(tl.float32)


@triton.jit
def rotated(x, y, cos, sin, lanes, is_lane, into, HALF: tl.constexpr):
    """Halves of heads, rotated; the first half of `sin` is negated."""
    lanes, is_lane = lanes[None, :], is_lane[None, :]
    return rotated_rows(x, y, cos + lanes, sin + lanes, is_lane, into, HALF)


@triton.jit
def rotated_rows(x, y, cos, sin, mask, into, HALF: tl.constexpr):
    """`rotated` by the angles at `cos` and `sin` [heads or 1, lanes], of the first halves."""
    cos_x = tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    cos_y = tl.load(cos + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_x = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    sin_y = tl.load(sin + HALF, mask=mask, other=0.0).to(tl.float32)
    return _turned(x, y, cos_x, sin_x, into), _turned(y, x, cos_y, sin_y, into)


@triton.jit
def _write(pages, scales, rows, x, y, mask, LARGEST: tl.constexpr, HALF: tl.constexpr):
    """Write halves of heads to `rows` of pages of 2 * HALF elements, with scales if there are any."""
    lanes = tl.arange(0, x.shape[1])[None, :]
    if scales is not None:
        # The sum is not a number if an element is not finite, which a maximum may hide.
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1)) + tl.sum((x + y) * 0.0, 1)
        scale = row_scale(largest, LARGEST)
        is_first = mask & (lanes == 0)
        scale = tl.broadcast_to(scale[:, None], x.shape)
        tl.store((scales + rows)[:, None] + lanes, scale, mask=is_first)
        x, y = encoded(x, scale, LARGEST), encoded(y, scale, LARGEST)
    into = pages + rows[:, None] * (2 * HALF) + lanes
    tl.store(into, x.to(pages.dtype.element_ty), mask=mask)
    tl.store(into + HALF, y.to(pages.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def heads_kernel(
    heads, stride, cos, sin, table_stride, weights, eps, value_eps, slots, pages, scales,
    QUERIES: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROUNDS: tl.constexpr, IS_LATE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """`HEADS` heads of one token, by halves of `HALF` elements: grid [tokens, blocks of heads]."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    head, is_lane = tl.program_id(1) * HEADS + tl.arange(0, HEADS), lanes < HALF
    mask = (head < QUERIES + 2 * KV)[:, None] & is_lane[None, :]
    own = heads + row * stride + head[:, None] * (2 * HALF) + lanes[None, :]
    into = heads.dtype.element_ty
    x = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)
    is_value, is_query = (head >= QUERIES + KV)[:, None], (head < QUERIES)[:, None]
    of_values_x, of_values_y = x, y
    if value_eps is not None:
        of_values_x, of_values_y = _scaled_to_unit(x, y, value_eps, HALF)
    if weights is not None:
        factors = weights + tl.where(is_query, 0, 2 * HALF) + lanes[None, :]
        if not IS_LATE:
            x, y = normed_halves(x, y, factors, mask, eps, into, HALF, ROUNDS)
    x, y = rotated(x, y, cos + row * table_stride, sin + row * table_stride, lanes, is_lane, into, HALF)
    if weights is not None and IS_LATE:
        x, y = normed_halves(x, y, factors, mask, eps, into, HALF, ROUNDS)
    tl.store(own, x.to(into), mask=mask & is_query)
    tl.store(own + HALF, y.to(into), mask=mask & is_query)
    slot = tl.load(slots + row)
    x, y = tl.where(is_value, of_values_x, x), tl.where(is_value, of_values_y, y)
    x, y = x.to(into).to(tl.float32), y.to(into).to(tl.float32)
    first = (slot // BLOCK_SIZE * (2 * KV) + head - QUERIES) * BLOCK_SIZE + slot % BLOCK_SIZE
    _write(pages, scales, first, x, y, mask & (head >= QUERIES)[:, None] & (slot >= 0), LARGEST, HALF)
# fmt: on


def rotate_and_write(
    heads: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    plan: HeadPlan,
    page_scales: Tensor | None = None,
) -> None:
    """Norm and rotate the queries of `heads` [n, num_heads + 2 * kv_heads, head_dim] in place, and write
    normed and rotated keys, and values, to `slots` int64 [n] of `pages` (-1: nowhere).

    `cos` and `sin` are of `RotaryTable`; pages and scales of `PagedKv`. Keys and values of `heads` are
    undefined afterwards.
    """
    num_tokens, all_heads, head_dim = heads.shape
    norm = plan.norm
    element = pages.dtype
    constants = {
        "QUERIES": num_heads,
        "KV": (all_heads - num_heads) // 2,
        "HALF": head_dim // 2,
        "LANES": padded(head_dim // 2),
        "HEADS": _HEADS,
        "BLOCK_SIZE": pages.shape[3],
        "ROUNDS": norm is not None and norm.rounds_first,
        "IS_LATE": norm is not None and norm.is_after_rotation,
        "LARGEST": _LARGEST.get(element, 0.0),
    }
    grid = (num_tokens, triton.cdiv(all_heads, _HEADS))
    Launch(heads_kernel, grid, constants, num_warps=1 if head_dim <= 64 else 4 if head_dim <= 128 else 8)(
        *(heads, heads.stride(0), cos, sin, cos.stride(0)),
        *(None if norm is None else norm.weights, None if norm is None else norm.eps, plan.value_eps),
        *(slots, pages.view(torch.uint8) if element is torch.float8_e4m3fn else pages, page_scales),
    )
