"""The indexer of sparse attention: its keys in pages, scores of a query's units, the choice of the highest.

See `stage_worker.model.indexer`. Units are tokens, or entries or blocks of several tokens, of which a key
each is in pages, see `stage_worker.model.choice_work`.

Products are of elements in the run dtype, and add up in float32, as do the heads. A choice is exactly that of
`chosen_tokens` on the same scores: float32 in the order of integers, of which the least that is chosen is
found bit by bit; of equal scores the first units, and a score that is not a number as the highest. Nothing
is read beyond a query's units: pages need no zeros, and scores no limits.

A program chooses from CHOICE_PART scores, in registers. Of more, each part's choice goes on to the next
level, in the order of units: what is not among the highest of a part is not among those of all parts.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint.step_sizes import CHOICE_PART
from stage_worker.model.choice_work import BLOCK_FIELDS, ROW_FIELDS, ChoiceGroup
from stage_worker.model.triton_kernels.heads import rotated
from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, PRECISION, Launch, padded

_HEADS = 8
"""Heads of one program of the rotation."""
_KEYS, _SPLIT = 64, 1024
"""Keys that are scored at a time, and by one program."""
_LEAST_TILE = 16
_HIGHEST = tl.constexpr(0x7F800000)
"""Infinity, in the order of integers."""


# fmt: off
@triton.jit
def _halves(own, mask, HALF: tl.constexpr):
    x = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    return x, tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(own, x, y, mask, HALF: tl.constexpr):
    tl.store(own, x.to(own.dtype.element_ty), mask=mask)
    tl.store(own + HALF, y.to(own.dtype.element_ty), mask=mask)


@triton.jit
def rotation_kernel(
    queries, keys, cos, sin, table_stride, slots, pages,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):
    """`HEADS` queries of one token, in place, or its key, into pages: grid [tokens, blocks of heads + 1].

    Elements from FIRST on are rotated, 2 * HALF of them; the others, up to REST, are before or after them.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    is_lane = lanes < HALF
    cos, sin = cos + row * table_stride, sin + row * table_stride
    into = keys.dtype.element_ty
    if tl.program_id(1) == tl.num_programs(1) - 1:
        slot = tl.load(slots + row)
        if slot >= 0:
            mask = is_lane[None, :]
            x, y = _halves(keys + row * WIDTH + FIRST + lanes[None, :], mask, HALF)
            x, y = rotated(x, y, cos, sin, lanes, is_lane, into, HALF)
            _store_halves(pages + slot * WIDTH + FIRST + lanes[None, :], x, y, mask, HALF)
            if WIDTH > 2 * HALF:
                columns = (0 if FIRST > 0 else 2 * HALF) + tl.arange(0, REST)
                is_rest = tl.arange(0, REST) < WIDTH - 2 * HALF
                rest = tl.load(keys + row * WIDTH + columns, mask=is_rest, other=0.0)
                tl.store(pages + slot * WIDTH + columns, rest, mask=is_rest)
    elif queries is not None:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & is_lane[None, :]
        own = queries + (row * NUM_HEADS + head[:, None]) * WIDTH + FIRST + lanes[None, :]
        x, y = _halves(own, mask, HALF)
        x, y = rotated(x, y, cos, sin, lanes, is_lane, into, HALF)
        _store_halves(own, x, y, mask, HALF)


# A work list has parts at any offset.
@triton.jit(do_not_specialize_on_alignment=["table", "blocks"])
def scores_kernel(
    queries, weights, keys, table, blocks, scores,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDENS: tl.constexpr,
    RATIO: tl.constexpr, FIELDS: tl.constexpr,
):
    """Scores of SPLIT units of RATIO tokens for a block of queries: grid [blocks, parts of the most]."""
    block = blocks + tl.program_id(0) * FIELDS
    first, count, position = tl.load(block), tl.load(block + 1), tl.load(block + 3)
    first_page, stride, begin = tl.load(block + 2), tl.load(block + 5), tl.program_id(1) * SPLIT
    end = tl.minimum((position + count) // RATIO, begin + SPLIT)
    if (count == 0) | (begin >= end):
        return
    scores += tl.load(block + 4)
    heads, columns = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    is_element = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    for start in range(begin, end, KEYS):
        places = start + tl.arange(0, KEYS)
        is_key = places < end
        page = first_page + places // BLOCK_SIZE
        if table is not None:
            page = tl.load(table + page, mask=is_key, other=0)
        at = (page * BLOCK_SIZE + places % BLOCK_SIZE).to(tl.int64)
        found = tl.load(
            keys + at[:, None] * HEAD_DIM + columns[None, :],
            mask=is_key[:, None] & (columns < HEAD_DIM)[None, :], other=0.0,
        )
        found = tl.trans(found.to(tl.float32) if WIDENS else found)
        for index in range(count):
            row = (first + index).to(tl.int64)
            own = queries + (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
            asked = tl.load(own, mask=is_element, other=0.0)
            asked = asked.to(tl.float32) if WIDENS else asked
            products = tl.dot(asked, found, input_precision=PRECISION)
            products = tl.where(products < 0.0, 0.0, products)  # keeps what is not a number
            if weights is not None:
                weight = tl.load(weights + row * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=0.0)
                products = products * weight[:, None]
            is_seen = is_key & (places < (position + index + 1) // RATIO)
            tl.store(scores + index * stride + places, tl.sum(products, 0), mask=is_seen)


@triton.jit
def _ordered(scores):
    """int32 in the order of float32 `scores`, equal for equals; above -2 ** 31."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, _HIGHEST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _least_of_highest(keys, wanted):
    """The `wanted`-th highest of int32 `keys`."""
    found = tl.full([], -2147483648, tl.int32)
    for step in range(32):
        candidate = found ^ (tl.full([], 1, tl.int32) << (31 - step))
        found = tl.where(tl.sum((keys >= candidate).to(tl.int32), 0) >= wanted, candidate, found)
    return found


@triton.jit
def _chosen(keys, wanted):
    """Which `wanted` of `keys` are chosen, and the place of each among these."""
    least = _least_of_highest(keys, wanted)
    is_above, is_least = keys > least, keys == least
    missing = wanted - tl.sum(is_above.to(tl.int32), 0)
    sums = tl.cumsum(is_above.to(tl.int32) + (is_least.to(tl.int32) << 16), 0)
    num_least = sums >> 16
    is_chosen = is_above | (is_least & (num_least <= missing))
    return is_chosen, (sums & 0xFFFF) + tl.minimum(num_least, missing) - 1


@triton.jit(
    do_not_specialize=["source_stride", "target_stride"], do_not_specialize_on_alignment=["rows"]
)
def choice_kernel(
    rows, scores, sources, source_stride, targets, target_stride, chosen,
    TOP_K: tl.constexpr, LEVEL: tl.constexpr, PART: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr,
):
    """One part of what is left of one query's units: grid [queries, parts of the most of them].

    Those are all units, or on further levels `sources` [queries, source_stride]. A single part's choice is
    final, others go to `targets`. Rows of `chosen` have WIDTH units: if more than TOP_K, the next one after
    all that the query sees is behind the others.
    """
    row, lanes = tl.program_id(0), tl.arange(0, PART)
    num_left = tl.load(rows + row * FIELDS + 1)
    chosen += row.to(tl.int64) * WIDTH
    if WIDTH > TOP_K and LEVEL == 0 and tl.program_id(1) == 0:
        tl.store(chosen + tl.minimum(num_left, TOP_K), num_left)
    if LEVEL == 0 and num_left <= TOP_K:
        tl.store(chosen + lanes, lanes, mask=lanes < num_left)
        return
    is_open = num_left > TOP_K
    for _ in tl.static_range(LEVEL):
        is_open &= num_left > PART
        full = (num_left - 1) // PART
        num_left = full * TOP_K + tl.minimum(num_left - full * PART, TOP_K)
    begin = tl.program_id(1) * PART
    if (begin >= num_left) | (is_open == 0):
        return
    is_key = begin + lanes < num_left
    scores += tl.load(rows + row * FIELDS)
    if LEVEL == 0:
        units = begin + lanes
    else:
        sources += row.to(tl.int64) * source_stride + begin
        units = tl.load(sources + lanes, mask=is_key, other=0)
    keys = tl.where(is_key, _ordered(tl.load(scores + units, mask=is_key, other=0.0)), -2147483648)
    is_chosen, place = _chosen(keys, tl.minimum(num_left - begin, TOP_K))
    if LEVEL > 0:
        units = tl.load(sources + lanes, mask=is_chosen, other=0)
    further = targets + row.to(tl.int64) * target_stride + tl.program_id(1) * TOP_K
    into = tl.where(num_left <= PART, chosen, further)
    tl.store(into + place, units, mask=is_chosen)
# fmt: on


def rotate_and_write_keys(
    queries: Tensor | None,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    first: int,
) -> None:
    """Rotate `queries` [n, heads, head_dim] in place, and write rotated `keys` [n, head_dim] to `slots` int64
    [n] of `pages` [num_blocks, block_size, head_dim] (-1: nowhere).

    `cos` and `sin` [n, 1, width] are of `RotaryTable`; elements from `first` on are rotated, the first or the
    last ones. Rounded like torch's operators.
    """
    head_dim, half = keys.shape[1], cos.shape[2] // 2
    num_heads = 0 if queries is None else queries.shape[1]
    assert first in (0, head_dim - 2 * half), "elements in the middle are rotated"
    constants = {
        "NUM_HEADS": num_heads,
        "WIDTH": head_dim,
        "HALF": half,
        "LANES": padded(half),
        "FIRST": first,
        "REST": padded(head_dim - 2 * half),
        "HEADS": _HEADS,
    }
    grid = (len(cos), triton.cdiv(num_heads, _HEADS) + 1)
    Launch(rotation_kernel, grid, constants, 1)(queries, keys, cos, sin, cos.stride(0), slots, pages)


def score(
    queries: Tensor, weights: Tensor | None, group: ChoiceGroup, pages: Tensor, *, ratio: int = 1
) -> Tensor:
    """Scores float32 [group.num_scores] of the units of `ratio` tokens that the group's queries see.

    `queries` [n, heads, head_dim] and `weights` float32 [n, heads] (None: 1) are those of the step; `pages`
    are [num_blocks, units of a block, head_dim].
    """
    num_heads, head_dim = queries.shape[1:]
    scores = queries.new_empty(group.num_scores, dtype=torch.float32)
    constants = {
        "NUM_HEADS": num_heads,
        "HEADS": padded(num_heads, _LEAST_TILE),
        "HEAD_DIM": head_dim,
        "WIDTH": padded(head_dim, _LEAST_TILE),
        "KEYS": _KEYS,
        "SPLIT": _SPLIT,
        "BLOCK_SIZE": pages.shape[1],
        "RATIO": ratio,
        "WIDENS": IS_INTERPRETED,
        "FIELDS": BLOCK_FIELDS,
    }
    grid = (len(group.blocks), triton.cdiv(group.longest, _SPLIT))
    Launch(scores_kernel, grid, constants)(queries, weights, pages, group.table, group.blocks, scores)
    return scores


def choose(scores: Tensor, group: ChoiceGroup, top_k: int, *, has_last: bool = False) -> Tensor:
    """The units int32 [queries, top_k] with the highest `scores` of each query of the group, ascending.

    With `has_last` it is [queries, top_k + 1]: the unit that follows all that the query sees comes last. A
    query of fewer units has these, and undefined numbers after them.
    """
    num_rows = len(group.rows)
    chosen = group.rows.new_empty(num_rows, top_k + has_last)
    found = None
    for level, num_parts in enumerate(_parts_of_levels(group.longest, top_k)):
        # The last level has no targets, but the same kernel as one that is not the last.
        following = chosen if num_parts == 1 else group.rows.new_empty(num_rows, num_parts * top_k)
        constants = {
            "TOP_K": top_k,
            "LEVEL": level,
            "PART": CHOICE_PART,
            "FIELDS": ROW_FIELDS,
            "WIDTH": chosen.shape[1],
        }
        Launch(choice_kernel, (num_rows, num_parts), constants, 16)(
            *(group.rows, scores, found, 0 if found is None else found.shape[1]),
            *(following, following.shape[1], chosen),
        )
        found = following
    return chosen


def _parts_of_levels(num_units: int, top_k: int) -> list[int]:
    """Parts of each level of a choice from up to `num_units`; the last one has a single part."""
    found = [triton.cdiv(num_units, CHOICE_PART)]
    while found[-1] > 1:
        found.append(triton.cdiv(found[-1] * top_k, CHOICE_PART))
    return found
