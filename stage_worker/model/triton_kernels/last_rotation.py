"""Queries and keys of compressed attention: norms, the rotation of last elements, and writes to pages.

Rounded to the run dtype where torch's operators round: after a norm, and after the rotation, whose products
and sums are float32, see `rope.rotate_last_`. A head is in two parts: elements that are not rotated, and
pairs, which are neighbours or halves of the last elements.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint import RopeConfig
from stage_worker.model.triton_kernels.elements import encoded, row_scale
from stage_worker.model.triton_kernels.launch import Launch, padded

_HEADS = 8
"""Heads of one program."""
_COPIED = 1024
"""Elements that are copied at a time."""
_LARGEST = {torch.uint8: 448.0, torch.int8: 127.0}
"""By elements of pages; kernels take fp8 as bytes."""


# fmt: off
@triton.jit
def angles(cos, sin, lanes, HALF: tl.constexpr, IS_BACK: tl.constexpr):
    """cos and sin float32 [1, lanes] of a token's pairs; the first half of `sin` is negated."""
    is_lane = lanes < HALF
    by_cos = tl.load(cos + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    by_sin = tl.load(sin + HALF + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    return by_cos, (-by_sin if IS_BACK else by_sin)


@triton.jit
def turned(x, y, cos, sin):
    """Pairs float32, rotated."""
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _rounded(x, into):
    return x.to(into).to(tl.float32)


@triton.jit
def normed_parts(rest, x, y, weight, columns, pairs, eps, into, WIDTH: tl.constexpr, PAIR: tl.constexpr):
    """Rows float32 scaled to unit mean square, times `weight` if there is one, and rounded: the elements at
    `columns` and both of `pairs`. Elements beyond a row are zero.
    """
    squares = tl.sum(rest * rest, 1) + tl.sum(x * x, 1) + tl.sum(y * y, 1)
    factor = tl.rsqrt(squares / WIDTH + eps)[:, None]
    rest, x, y = rest * factor, x * factor, y * factor
    if weight is not None:
        rest *= tl.load(weight + columns, mask=columns < WIDTH, other=0.0)[None, :]
        x *= tl.load(weight + pairs, mask=pairs < WIDTH, other=0.0)[None, :]
        y *= tl.load(weight + pairs + PAIR, mask=pairs + PAIR < WIDTH, other=0.0)[None, :]
    return _rounded(rest, into), _rounded(x, into), _rounded(y, into)


@triton.jit
def _loaded(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write_key(
    key, cos, sin, weight, eps, into, target, scale_at, WIDTH: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, PAIR: tl.constexpr, LARGEST: tl.constexpr,
):
    """The normed and rotated key of one token, to its row `target` of pages."""
    lanes, columns = tl.arange(0, LANES), tl.arange(0, REST)
    is_pair, is_rest = (lanes < HALF)[None, :], (columns < WIDTH - 2 * HALF)[None, :]
    pairs = WIDTH - 2 * HALF + lanes * STEP
    rest = _loaded(key + columns[None, :], is_rest)
    x, y = _loaded(key + pairs[None, :], is_pair), _loaded(key + pairs[None, :] + PAIR, is_pair)
    rest, x, y = normed_parts(rest, x, y, weight, columns, pairs, eps, into, WIDTH, PAIR)
    by_cos, by_sin = angles(cos, sin, lanes, HALF, False)
    x, y = turned(x, y, by_cos, by_sin)
    x, y = _rounded(x, into), _rounded(y, into)
    if scale_at is not None:
        # The sum is not a number if an element is not finite, which a maximum may hide.
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.maximum(tl.max(tl.abs(y), 1), tl.max(tl.abs(rest), 1)))
        largest += tl.sum((x + y) * 0.0, 1) + tl.sum(rest * 0.0, 1)
        scale = row_scale(largest, LARGEST)
        tl.store(scale_at + tl.arange(0, 1), scale)
        wide = tl.broadcast_to(scale[:, None], x.shape)
        x, y = encoded(x, wide, LARGEST), encoded(y, wide, LARGEST)
        rest = encoded(rest, tl.broadcast_to(scale[:, None], rest.shape), LARGEST)
    element = target.dtype.element_ty
    tl.store(target + columns[None, :], rest.to(element), mask=is_rest)
    tl.store(target + pairs[None, :], x.to(element), mask=is_pair)
    tl.store(target + pairs[None, :] + PAIR, y.to(element), mask=is_pair)


@triton.jit
def _turn_heads(
    own, is_head, cos, sin, eps, WIDTH: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    REST: tl.constexpr, STEP: tl.constexpr, PAIR: tl.constexpr, IS_BACK: tl.constexpr,
):
    """Heads of one token at `own` [heads], in place."""
    into = own.dtype.element_ty
    lanes, columns = tl.arange(0, LANES), tl.arange(0, REST)
    mask = is_head[:, None] & (lanes < HALF)[None, :]
    pairs = WIDTH - 2 * HALF + lanes * STEP
    at = own[:, None] + pairs[None, :]
    x, y = _loaded(at, mask), _loaded(at + PAIR, mask)
    if eps is not None:
        is_rest = is_head[:, None] & (columns < WIDTH - 2 * HALF)[None, :]
        rest = _loaded(own[:, None] + columns[None, :], is_rest)
        rest, x, y = normed_parts(rest, x, y, None, columns, pairs, eps, into, WIDTH, PAIR)
        tl.store(own[:, None] + columns[None, :], rest.to(into), mask=is_rest)
    by_cos, by_sin = angles(cos, sin, lanes, HALF, IS_BACK)
    x, y = turned(x, y, by_cos, by_sin)
    tl.store(at, x.to(into), mask=mask)
    tl.store(at + PAIR, y.to(into), mask=mask)


@triton.jit
def last_rotation_kernel(
    heads, cos, sin, table_stride, eps, keys, weight, slots, pages, scales, pending, pending_rows,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, PAIR: tl.constexpr, IS_BACK: tl.constexpr,
    LARGEST: tl.constexpr, PENDING: tl.constexpr, COPIED: tl.constexpr,
):
    """`HEADS` heads of one token, or its key, or what its entries are pooled of: grid [tokens, blocks of
    heads, and one for each of the others that there are].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos, sin = cos + row * table_stride, sin + row * table_stride
    if part < num_blocks:
        head = part * HEADS + tl.arange(0, HEADS)
        own = heads + (row * NUM_HEADS + head) * WIDTH
        _turn_heads(own, head < NUM_HEADS, cos, sin, eps, WIDTH, HALF, LANES, REST, STEP, PAIR, IS_BACK)
    elif keys is not None:
        slot = tl.load(slots + row)
        if slot >= 0:
            if part == num_blocks:
                at = None if scales is None else scales + slot
                _write_key(
                    keys + row * WIDTH, cos, sin, weight, eps, keys.dtype.element_ty, pages + slot * WIDTH,
                    at, WIDTH, HALF, LANES, REST, STEP, PAIR, LARGEST,
                )
            elif pending is not None:
                for begin in range(0, PENDING, COPIED):
                    columns = begin + tl.arange(0, COPIED)
                    found = tl.load(pending + row * PENDING + columns, mask=columns < PENDING)
                    tl.store(pending_rows + slot * PENDING + columns, found, mask=columns < PENDING)
# fmt: on


def pair_constants(head_dim: int, cos: Tensor, rope: RopeConfig | None) -> dict[str, int]:
    """Constants of kernels that rotate last elements of heads by tables like `cos` [n, 1, elements]."""
    half = 0 if rope is None else cos.shape[2] // 2
    is_interleaved = rope is not None and rope.is_interleaved
    return {
        "WIDTH": head_dim,
        "HALF": half,
        "LANES": padded(half),
        "REST": padded(head_dim - 2 * half),
        "STEP": 2 if is_interleaved else 1,
        "PAIR": 1 if is_interleaved else half,
    }


def norm_and_write(
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    rope: RopeConfig | None,
    weight: Tensor,
    eps: float,
    page_scales: Tensor | None = None,
    pending: Tensor | None = None,
    pending_rows: Tensor | None = None,
) -> None:
    """Scale `queries` [n, heads, head_dim] to unit mean square and rotate them, in place; write keys, normed
    by `weight` float32 [head_dim] and rotated, and copies of `pending`, to `slots` int64 [n] (-1: nowhere).

    `keys` are [n or more, head_dim], `pending` [n or more, width]; `pages` are [num_blocks, 1, 1, block_size,
    head_dim] with scales of elements of 8 bits, `pending_rows` [num_blocks, block_size, width]. `cos` and
    `sin` [n, 1, rotated elements] are of `RotaryTable`.
    """
    is_fp8 = pages.dtype is torch.float8_e4m3fn
    others = (
        *(keys, weight, slots, pages.view(torch.uint8) if is_fp8 else pages, page_scales),
        *(pending, pending_rows),
    )
    _launch(queries, cos, sin, rope, eps, others, is_back=False)


def rotate_last(
    heads: Tensor, cos: Tensor, sin: Tensor, *, rope: RopeConfig | None, is_back: bool = False
) -> None:
    """Rotate the last elements of `heads` [n, num_heads, head_dim] in place; with `is_back`, by the negative
    angles. `cos` and `sin` [n, 1, rotated elements] are of `RotaryTable`.
    """
    if rope is not None:
        _launch(heads, cos, sin, rope, None, (None,) * 7, is_back=is_back)


def _launch(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope: RopeConfig | None,
    eps: float | None,
    others: tuple[Tensor | None, ...],
    *,
    is_back: bool,
) -> None:
    """`others` are the kernel's arguments from `keys` on."""
    num_tokens, num_heads, head_dim = heads.shape
    keys, _, _, pages, _, pending, _ = others
    constants = pair_constants(head_dim, cos, rope) | {
        "NUM_HEADS": num_heads,
        "HEADS": _HEADS,
        "IS_BACK": is_back,
        "LARGEST": 0.0 if pages is None else _LARGEST.get(pages.dtype, 0.0),
        "PENDING": 0 if pending is None else pending.shape[1],
        "COPIED": _COPIED,
    }
    num_parts = triton.cdiv(num_heads, _HEADS) + (keys is not None) + (pending is not None)
    Launch(last_rotation_kernel, (num_tokens, num_parts), constants, 1 if eps is None else 4)(
        heads, cos, sin, cos.stride(0), eps, *others
    )
