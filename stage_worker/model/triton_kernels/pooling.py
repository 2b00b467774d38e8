"""Pooling of entries of compressed attention, and of their keys: one program an entry.

Gates and their softmax over the tokens of an entry are float32, weights are rounded to the run dtype before
they multiply values, as in transformers; so are products, and their sum, which is normed and rotated.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from checkpoint import RopeConfig
from checkpoint.compressed import Compressor
from stage_worker.model.triton_kernels.last_rotation import angles, normed_parts, pair_constants, turned
from stage_worker.model.triton_kernels.launch import Launch, padded

_TILE_BYTES = 8192
"""Bytes of gates that are read at a time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pooling:
    """How a layer pools entries, or their keys, of the rows that `plan` keeps of tokens.

    Values begin at column `first`, gates follow. `bias` float32 [ratio, columns] is that of gates, see
    `PoolingWeights`; `weight` float32 [width] and `eps` are the norm's.
    """

    plan: Compressor
    first: int
    bias: Tensor
    weight: Tensor
    eps: float
    rope: RopeConfig | None


# fmt: off
@triton.jit
def _gates(
    own, is_own, bias, place, columns, is_column, FIRST: tl.constexpr, ALL: tl.constexpr, RATIO: tl.constexpr
):
    """Gates float32 [tokens, columns] of tokens at `own`, with the bias of each one's place."""
    mask = is_own[:, None] & is_column[None, :]
    gates = tl.load(own[:, None] + FIRST + ALL + columns, mask=mask, other=0.0).to(tl.float32)
    gates += tl.load(bias + (place % RATIO)[:, None] * ALL + columns, mask=mask, other=0.0)
    return tl.where(is_own[:, None], gates, float("-inf"))


@triton.jit
def _tokens(
    pending, sources, begin, columns, SPAN: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
    PENDING: tl.constexpr, TOKENS: tl.constexpr,
):
    """Places of TOKENS tokens among the SPAN of an entry, whether there are such, where their rows are, and
    the columns that are for this entry: the first ones of earlier tokens, the second ones of its own.
    """
    place = begin + tl.arange(0, TOKENS)
    slot = tl.load(sources + place, mask=place < SPAN, other=-1)
    is_second = (place >= RATIO)[:, None] & (SPAN > RATIO)
    return place, slot >= 0, pending + slot * PENDING, columns[None, :] + tl.where(is_second, WIDTH, 0)


@triton.jit
def _pooled(
    pending, sources, bias, columns, is_column, FIRST: tl.constexpr, ALL: tl.constexpr, SPAN: tl.constexpr,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PENDING: tl.constexpr, TOKENS: tl.constexpr,
):
    """Elements float32 [1, columns] of an entry, rounded; zero outside of `is_column`."""
    into = pending.dtype.element_ty
    highest = tl.full(columns.shape, float("-inf"), tl.float32)
    total, mixed = tl.zeros(columns.shape, tl.float32), tl.zeros(columns.shape, tl.float32)
    for begin in range(0, SPAN, TOKENS):
        place, is_own, own, at = _tokens(
            pending, sources, begin, columns, SPAN, RATIO, WIDTH, PENDING, TOKENS
        )
        gates = _gates(own, is_own, bias, place, at, is_column, FIRST, ALL, RATIO)
        top = tl.maximum(highest, tl.max(gates, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(gates - base[None, :]), 0)
        highest = top
    for begin in range(0, SPAN, TOKENS):
        place, is_own, own, at = _tokens(
            pending, sources, begin, columns, SPAN, RATIO, WIDTH, PENDING, TOKENS
        )
        gates = _gates(own, is_own, bias, place, at, is_column, FIRST, ALL, RATIO)
        weights = tl.exp(gates - highest[None, :]) / total[None, :]
        mask = is_own[:, None] & is_column[None, :]
        values = tl.load(own[:, None] + FIRST + at, mask=mask, other=0.0).to(tl.float32)
        products = values * weights.to(into).to(tl.float32)
        mixed += tl.sum(products.to(into).to(tl.float32), 0)
    return mixed.to(into).to(tl.float32)[None, :]


@triton.jit
def pooling_kernel(
    pending, sources, bias, weight, eps, cos, sin, table_stride, slots, rows,
    SPAN: tl.constexpr, RATIO: tl.constexpr, PENDING: tl.constexpr, FIRST: tl.constexpr, ALL: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr,
    PAIR: tl.constexpr, TOKENS: tl.constexpr,
):
    """One entry: grid [entries]."""
    entry = tl.program_id(0).to(tl.int64)
    sources += entry * SPAN
    lanes, columns = tl.arange(0, LANES), tl.arange(0, REST)
    is_pair, is_rest, pairs = lanes < HALF, columns < WIDTH - 2 * HALF, WIDTH - 2 * HALF + lanes * STEP
    into = pending.dtype.element_ty
    rest = _pooled(
        pending, sources, bias, columns, is_rest, FIRST, ALL, SPAN, RATIO, WIDTH, PENDING, TOKENS
    )
    x = _pooled(pending, sources, bias, pairs, is_pair, FIRST, ALL, SPAN, RATIO, WIDTH, PENDING, TOKENS)
    y = _pooled(
        pending, sources, bias, pairs + PAIR, is_pair, FIRST, ALL, SPAN, RATIO, WIDTH, PENDING, TOKENS
    )
    rest, x, y = normed_parts(rest, x, y, weight, columns, pairs, eps, into, WIDTH, PAIR)
    by_cos, by_sin = angles(cos + entry * table_stride, sin + entry * table_stride, lanes, HALF, False)
    x, y = turned(x, y, by_cos, by_sin)
    target = rows + tl.load(slots + entry) * WIDTH
    tl.store(target + columns[None, :], rest.to(into), mask=is_rest[None, :])
    tl.store(target + pairs[None, :], x.to(into), mask=is_pair[None, :])
    tl.store(target + pairs[None, :] + PAIR, y.to(into), mask=is_pair[None, :])
# fmt: on


def pool(
    pooling: Pooling,
    pending: Tensor,
    sources: Tensor,
    kept: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    rows: Tensor,
) -> None:
    """Write the entries of `kept` int64 [c] (None: all) of `sources` int64 [all, span] to `slots` int64 [c]
    of `rows` [num_blocks, rows per block, width].

    `sources` are slots of tokens in `pending` [num_blocks, block_size, pending width], -1 before the first
    one. `cos` and `sin` [c, 1, rotated elements] are of the entries' first tokens.
    """
    if kept is not None:
        sources = sources.index_select(0, kept)  # and not another kernel, which few steps need
    plan, width = pooling.plan, rows.shape[2]
    constants = pair_constants(width, cos, pooling.rope)
    constants |= {
        "SPAN": plan.span,
        "RATIO": plan.ratio,
        "PENDING": pending.shape[2],
        "FIRST": pooling.first,
        "ALL": pooling.bias.shape[1],
        "TOKENS": min(padded(plan.span), max(1, _TILE_BYTES // pending.itemsize // constants["REST"])),
    }
    Launch(pooling_kernel, (len(slots),), constants, 8)(
        *(pending, sources, pooling.bias, pooling.weight, pooling.eps),
        *(cos, sin, cos.stride(0), slots, rows),
    )
