"""Sampled tokens of rows of logits, certain to be those that a CPU samples.

The filters and the draw are those of `stage_worker.sampling.random_choice`. A kernel's sums are rounded in
another order than a CPU's: a row whose token could change if a sum was wrong by MARGIN is left open, and so
is a row whose filters may keep more than NUM_CANDIDATES tokens. Sums of n float64 of one sign are wrong by at
most n * 2 ** -53 of themselves in any order, and weights by some 2 ** -43: together below MARGIN / 2 for
MAX_VOCAB tokens. A flat distribution of 128,000 tokens leaves one row in 10,000 open, others hardly any.

A filtered row is decided on its candidates: all tokens above a score that at most NUM_CANDIDATES exceed. The
whole row counts by its total weight only, which is added up in parts, as for a draw without filters. The
first such score that is tried is the one of normally distributed scores, with the total; where it has too
many tokens above it or too few, one program looks for another, and each look reads the row again.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.triton_kernels.launch import IS_INTERPRETED, Launch, padded
from stage_worker.sampling.step_rows import NOT_FINITE, OPEN

NUM_CANDIDATES = 4096
"""Also the tokens of a part."""

_WIDTH = tl.constexpr(NUM_CANDIDATES)
_COUNTED = tl.constexpr(NUM_CANDIDATES if IS_INTERPRETED else NUM_CANDIDATES // 2)
"""Tokens of a part that one program counts together: more would spill registers."""
_NUM_GUESSES = tl.constexpr(6)
_OPEN, _NOT_FINITE = tl.constexpr(OPEN), tl.constexpr(NOT_FINITE)
MARGIN = tl.constexpr(2.0**-32)
"""Relative to a row's total weight, or to a weight."""
_SMALLEST_LOG_WEIGHT = tl.constexpr(-700.0)
_LOWEST_KEY = tl.constexpr(-(2**31))
_INTERPRETED_ELEMENTS = 1 << 18
"""Of one program: the interpreter's time is by operation."""


# fmt: off
@triton.jit
def parts_kernel(
    logits, stride, part_maxima, part_ids, part_flags, part_sums, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Maximum of one part of one row, its lowest id, and whether a value is not finite; number, sum and sum
    of squares of values above -inf.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    ids = part * _WIDTH + columns
    x = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=float("-inf"))
    largest = tl.max(x, 0)
    if part_maxima is not None:
        tl.store(part_maxima + row * PARTS + part, largest)
        tl.store(part_ids + row * PARTS + part, tl.min(tl.where(x == largest, ids, VOCAB), 0))
    if part_flags is not None:
        is_bad = ~(tl.abs(x) < float("inf")) & (ids < VOCAB)
        tl.store(part_flags + row * PARTS + part, tl.max(is_bad.to(tl.int32), 0))
    if part_sums is not None:
        is_there = x > float("-inf")
        there, into = tl.where(is_there, x, 0.0), part_sums + (row * PARTS + part) * 3
        tl.store(into, tl.sum(is_there.to(tl.float32), 0))
        tl.store(into + 1, tl.sum(there, 0))
        tl.store(into + 2, tl.sum(there * there, 0))


@triton.jit
def _weights(scores, maxima, temperature):
    """float64 [rows, columns] of float32 `scores`, relative to the `maxima` [rows] of whole rows."""
    below = (scores.to(tl.float64) - maxima.to(tl.float64)[:, None]) / temperature[:, None]
    return tl.exp(tl.maximum(below, _SMALLEST_LOG_WEIGHT))


@triton.jit
def _row_maxima(part_maxima, rows, is_row, PARTS: tl.constexpr, PADDED: tl.constexpr):
    parts = tl.arange(0, PADDED)[None, :]
    is_part = is_row[:, None] & (parts < PARTS)
    return tl.load(part_maxima + rows[:, None] * PARTS + parts, mask=is_part, other=float("-inf"))


@triton.jit
def _keys(scores):
    """int32 in the order of float32 `scores`, equal for equals."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _row_sums(part_sums, row, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Number, mean and standard deviation of a row's values above -inf."""
    parts = tl.arange(0, PADDED)
    first = part_sums + (row * PARTS + parts) * 3
    number = tl.sum(tl.load(first, mask=parts < PARTS, other=0.0), 0)
    mean = tl.sum(tl.load(first + 1, mask=parts < PARTS, other=0.0), 0) / tl.maximum(number, 1.0)
    square = tl.sum(tl.load(first + 2, mask=parts < PARTS, other=0.0), 0) / tl.maximum(number, 1.0)
    return number, mean, tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@triton.jit
def _is_filtered(reals, top_k, row, num_rows, VOCAB: tl.constexpr):
    """Whether a row is drawn from some of its tokens."""
    is_filtered = (tl.load(top_k + row) < VOCAB) | (tl.load(reals + num_rows + row) < 1.0)
    is_filtered |= tl.load(reals + 2 * num_rows + row) > 0.0
    return is_filtered & (tl.load(reals + row) > 0.0)


@triton.jit
def _first_guess(number, mean, deviation, DEVIATIONS: tl.constexpr):
    """The key that is tried first for a row's candidates; the one below all of a few tokens."""
    return _keys(tl.where(number <= _WIDTH, float("-inf"), mean + DEVIATIONS * deviation))


@triton.jit(do_not_specialize=["num_rows"])
def masses_kernel(
    logits, stride, reals, top_k, part_maxima, part_sums, masses, part_counts, num_rows, VOCAB: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, DEVIATIONS: tl.constexpr,
):
    """Weight of one part of one row that needs its total, and its tokens above the first guess of one with
    filters.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.zeros([1], tl.int64)
    temperature, top_p = tl.load(reals + row), tl.load(reals + num_rows + row)
    is_whole = tl.load(top_k + row) >= VOCAB
    needs_total = is_whole & ((top_p < 1.0) | (tl.load(reals + 2 * num_rows + row) == 0.0))
    ids = part * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    if needs_total & (temperature > 0.0):
        maxima = tl.max(_row_maxima(part_maxima, one + row, one == 0, PARTS, PADDED), 1)
        x = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=float("-inf"))
        weights = tl.where(ids < VOCAB, _weights(x, maxima, one.to(tl.float64) + temperature), 0.0)
        tl.store(masses + row * PARTS + part + one, tl.sum(weights, 1))
    if _is_filtered(reals, top_k, row, num_rows, VOCAB):
        number, mean, deviation = _row_sums(part_sums, row, PARTS, PADDED)
        guess = _first_guess(number, mean, deviation, DEVIATIONS)
        x = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=float("-inf"))
        is_above = (_keys(x) > guess) & (ids < VOCAB)
        tl.store(part_counts + row * PARTS + part + one, tl.sum(is_above.to(tl.int32), 1))


@triton.jit
def _num_above(logits, VOCAB: tl.constexpr, key):
    """Number of tokens of a row with higher keys."""
    found = tl.zeros([_COUNTED], tl.int32)
    for first in range(0, VOCAB, _COUNTED):
        ids = first + tl.arange(0, _COUNTED)
        x = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
        found += ((_keys(x) > key) & (ids < VOCAB)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _bound(
    logits, wanted, largest, number, mean, deviation, num_first, VOCAB: tl.constexpr, DEVIATIONS: tl.constexpr
):
    """A key that `wanted` to NUM_CANDIDATES tokens exceed, or the lowest one that no more than these exceed.

    Looked for at DEVIATIONS above the mean, which `num_first` tokens exceed, then lower; by halving, between
    a key that too many exceed and one that too few exceed. Also whether it is the first one that was tried.
    """
    low, high = tl.full([], _LOWEST_KEY, tl.int64), _keys(largest).to(tl.int64)
    first = _first_guess(number, mean, deviation, DEVIATIONS).to(tl.int64)
    guess, num_looks, found = mean + DEVIATIONS * deviation, 1, 0
    if number <= _WIDTH:
        high, found = first, wanted
    elif num_first > _WIDTH:
        low = tl.minimum(first, high)
    elif first < high:
        high, found = first, num_first
        guess -= deviation
        deviation *= 2.0
    while (found < wanted) & (high - low > 1):
        middle = _keys(guess).to(tl.int64)
        if (num_looks >= _NUM_GUESSES) | (low > _LOWEST_KEY) | (middle >= high):
            middle = (low + high) >> 1
        above = _num_above(logits, VOCAB, middle.to(tl.int32))
        if above > _WIDTH:
            low = middle
        else:
            high = middle
            found = above
            guess -= deviation
            deviation *= 2.0
        num_looks += 1
    return high, high == first


@triton.jit
def _counts_above(logits, high, VOCAB: tl.constexpr, PADDED: tl.constexpr):
    """Tokens int32 [PADDED] of each part with higher keys."""
    parts = tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], tl.int32)
    for first in range(0, VOCAB, _COUNTED):
        ids = first + tl.arange(0, _COUNTED)
        x = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
        above = tl.sum(((_keys(x) > high) & (ids < VOCAB)).to(tl.int32), 0)
        counts += tl.where(parts == first // _WIDTH, above, 0)
    return counts


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    logits, stride, reals, top_k, part_maxima, part_sums, part_counts, counts, bounds, keys, num_rows,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, DEVIATIONS: tl.constexpr,
):
    """The bound of one filtered row, as a score and as a key, and how many candidates are above it.

    Its `part_counts` become the places of the first candidates of its parts.
    """
    row = tl.program_id(0).to(tl.int64)
    one = tl.zeros([1], tl.int64)
    if not _is_filtered(reals, top_k, row, num_rows, VOCAB):
        return
    num_kept = tl.load(top_k + row)
    wanted = tl.minimum(tl.maximum(num_kept * (num_kept < VOCAB), _WIDTH // 2), _WIDTH).to(tl.int32)
    largest = tl.max(tl.max(_row_maxima(part_maxima, one + row, one == 0, PARTS, PADDED), 1), 0)
    number, mean, deviation = _row_sums(part_sums, row, PARTS, PADDED)
    parts = tl.arange(0, PADDED)
    places = part_counts + row * PARTS + parts
    above = tl.load(places, mask=parts < PARTS, other=0)
    high, is_first = _bound(
        logits + row * stride, wanted, largest, number, mean, deviation, tl.sum(above, 0), VOCAB,
        DEVIATIONS,
    )
    if not is_first:
        above = _counts_above(logits + row * stride, high.to(tl.int32), VOCAB, PADDED)
    tl.store(places, tl.cumsum(above, 0) - above, mask=parts < PARTS)
    tl.store(counts + row, tl.minimum(tl.sum(above, 0), _WIDTH))
    bits = high.to(tl.int32)
    tl.store(keys + row, bits)
    tl.store(bounds + row, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def move_kernel(
    logits, stride, reals, top_k, part_places, keys, candidates, candidate_ids, num_rows, VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Candidates of one part of one filtered row, in the order of ids: its tokens above the row's key."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_filtered(reals, top_k, row, num_rows, VOCAB):
        ids = part * _WIDTH + tl.arange(0, _WIDTH)
        x = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=float("-inf"))
        is_kept = (_keys(x) > tl.load(keys + row)) & (ids < VOCAB)
        first = tl.load(part_places + row * PARTS + part)
        places = first + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        is_kept &= places < _WIDTH  # a NaN is above all
        tl.store(candidates + row * _WIDTH + places, x, mask=is_kept)
        tl.store(candidate_ids + row * _WIDTH + places, ids, mask=is_kept)


@triton.jit
def _edge(keys, masses, targets, largest):
    """The highest keys [rows] whose tokens and those above have masses that reach `targets`, as int64.

    A key below all with a mass if no key is reached; `largest` are the highest of all.
    """
    low = tl.min(tl.where(masses > 0.0, keys, largest[:, None]), 1).to(tl.int64) - 1
    high = largest.to(tl.int64) + 1
    num_halvings, distance = 0, tl.max(high - low, 0)
    while distance > 1:
        num_halvings, distance = num_halvings + 1, (distance + 1) >> 1
    for _ in range(num_halvings):
        middle = (low + high) >> 1
        reached = tl.sum(tl.where(keys >= middle.to(tl.int32)[:, None], masses, 0.0), 1) >= targets
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
    return low


@triton.jit
def _is_far(values, targets, margins, is_used):
    """Whether all used `values` [rows, columns] differ from `targets` [rows] by more than `margins`."""
    is_near = is_used & ~(tl.abs(values - targets[:, None]) > margins[:, None])
    return tl.max(is_near.to(tl.int32), 1) == 0


@triton.jit
def _top_k(keys, weights, is_token, num_kept, is_used, largest):
    """Weights of the `num_kept` likeliest tokens with their equals, and whether they are all candidates."""
    present = tl.where(is_token, 1.0, 0.0).to(tl.float64)
    wanted = tl.where(is_used, num_kept, 1).to(tl.float64)
    edge = _edge(keys, present, wanted, largest)
    is_dropped = is_used[:, None] & (keys < edge[:, None])
    return tl.where(is_dropped, 0.0, weights), tl.sum(present, 1) >= wanted


@triton.jit
def _top_p(keys, weights, top_p, totals, largest):
    """Weights of the likeliest tokens that reach `top_p` of `totals`, and whether that is certain."""
    targets, margins = top_p * totals, totals * MARGIN
    edge = _edge(keys, weights, targets, largest)[:, None]
    is_equal = (keys == edge) & (weights > 0.0)
    above = tl.sum(tl.where(keys > edge, weights, 0.0), 1)
    weight = tl.max(tl.where(is_equal, weights, 0.0), 1)
    equals = tl.cumsum(is_equal.to(tl.int32), 1)
    before = above[:, None] + (equals - 1).to(tl.float64) * weight[:, None]
    reached = above + tl.sum(is_equal.to(tl.int32), 1).to(tl.float64) * weight
    is_certain = (reached - targets > margins) & _is_far(before, targets, margins, is_equal)
    is_dropped = (keys < edge) | (is_equal & (before >= targets[:, None]))
    is_used = top_p < 1.0
    return tl.where(is_used[:, None] & is_dropped, 0.0, weights), ~is_used | is_certain


@triton.jit
def _min_p(scores, maxima, weights, min_p):
    """Weights of at least `min_p`, and whether that is certain: a weight of exactly 1 is."""
    is_near = ~(tl.abs(weights - min_p[:, None]) > min_p[:, None] * MARGIN) & (scores < maxima[:, None])
    is_near &= weights > 0.0
    is_certain = (tl.max(is_near.to(tl.int32), 1) == 0) | (min_p == 0.0)
    return tl.where(weights >= min_p[:, None], weights, 0.0), is_certain


@triton.jit
def _tokens_of_vocabulary(logits, stride, rows, is_row, VOCAB: tl.constexpr, COLUMNS: tl.constexpr):
    """Scores [rows, COLUMNS] of all tokens, and which are some."""
    columns = tl.arange(0, COLUMNS)[None, :]
    is_token = is_row[:, None] & (columns < VOCAB)
    return tl.load(logits + rows[:, None] * stride + columns, mask=is_token, other=float("-inf")), is_token


@triton.jit
def _tokens_of_part(logits, stride, rows, part, is_used, VOCAB: tl.constexpr):
    """Like `_tokens_of_vocabulary`, of one part [rows]."""
    ids = part[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    is_token = is_used[:, None] & (ids < VOCAB)
    return tl.load(logits + rows[:, None] * stride + ids, mask=is_token, other=float("-inf")), is_token


@triton.jit
def _candidate_tokens(candidates, rows, count):
    """Like `_tokens_of_vocabulary`, of `count` [rows] candidates."""
    columns = tl.arange(0, _WIDTH)[None, :]
    is_token = columns < count[:, None]
    found = tl.load(candidates + rows[:, None] * _WIDTH + columns, mask=is_token, other=float("-inf"))
    return found, is_token


@triton.jit
def _drawn_part(mass, share, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """The part [rows] with the token drawn from the whole row, the mass before it, and whether that is
    certain.
    """
    is_part = tl.arange(0, PADDED)[None, :] < PARTS
    totals = tl.sum(mass, 1)
    targets, sums = share * totals, tl.cumsum(mass, 1)
    part = tl.minimum(tl.sum((is_part & (sums <= targets[:, None])).to(tl.int32), 1), PARTS - 1)
    before = tl.sum(tl.where(tl.arange(0, PADDED)[None, :] < part[:, None], mass, 0.0), 1)
    return part, before, _is_far(sums, targets, totals * MARGIN, is_part)


@triton.jit
def _filtered(
    scores, weights, is_token, maxima, totals, is_random, num_kept, top_p, min_p, VOCAB: tl.constexpr
):
    """Weights after top_k, top_p and min_p, and whether they are certain; `totals` are of whole rows."""
    keys, largest = _keys(scores), _keys(maxima)
    is_limited = num_kept < VOCAB
    is_certain = is_random | True
    if tl.max((is_random & is_limited).to(tl.int32), 0) > 0:
        weights, is_exact = _top_k(keys, weights, is_token, num_kept, is_limited, largest)
        totals = tl.where(is_limited, tl.sum(weights, 1), totals)
        is_certain &= is_exact
    if tl.max((is_random & (top_p < 1.0)).to(tl.int32), 0) > 0:
        weights, is_exact = _top_p(keys, weights, top_p, totals, largest)
        is_certain &= is_exact
    if tl.max((is_random & (min_p > 0.0)).to(tl.int32), 0) > 0:
        weights, is_exact = _min_p(scores, maxima, weights, min_p)
        is_certain &= is_exact
    return weights, is_certain


@triton.jit
def _inverse(weights, base, totals, share, COLUMNS: tl.constexpr):
    """Columns [rows] where the sums of `weights` exceed `share` of `totals`, and whether that is certain."""
    sums, targets = tl.cumsum(weights, 1) + base[:, None], share * totals
    is_certain = _is_far(sums, targets, totals * MARGIN, tl.arange(0, COLUMNS)[None, :] < COLUMNS)
    place = tl.sum((sums <= targets[:, None]).to(tl.int32), 1)
    return tl.minimum(place, COLUMNS - 1), is_certain


@triton.jit
def _drawn_narrow(
    logits, stride, rows, is_row, maxima, is_random, temperature, top_p, min_p, share, num_kept,
    VOCAB: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Tokens [rows] drawn from rows of up to NUM_CANDIDATES tokens, and whether they are certain."""
    scores, is_token = _tokens_of_vocabulary(logits, stride, rows, is_row, VOCAB, COLUMNS)
    weights = tl.where(is_token, _weights(scores, maxima, temperature), 0.0)
    weights, is_certain = _filtered(
        scores, weights, is_token, maxima, tl.sum(weights, 1), is_random, num_kept, top_p, min_p, VOCAB
    )
    place, is_exact = _inverse(weights, tl.zeros_like(share), tl.sum(weights, 1), share, COLUMNS)
    return place, is_certain & is_exact


@triton.jit
def _drawn_wide(
    logits, stride, rows, is_row, maxima, is_random, temperature, top_p, min_p, share, num_kept, masses,
    candidates, candidate_ids, counts, bounds, VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
):
    """Tokens [rows] drawn from rows of many tokens, and whether they are certain."""
    is_limited = num_kept < VOCAB
    is_whole = ~is_limited & (top_p == 1.0) & (min_p == 0.0)
    has_total = is_row & is_random & ~is_limited & ((top_p < 1.0) | (min_p == 0.0))
    parts = tl.arange(0, PADDED)[None, :]
    mass = tl.load(
        masses + rows[:, None] * PARTS + parts, mask=has_total[:, None] & (parts < PARTS), other=0.0
    )
    part, before, is_exact = _drawn_part(mass, share, PARTS, PADDED)
    is_certain = ~is_whole | is_exact
    is_filtered = is_row & is_random & ~is_whole
    scores, is_token = _tokens_of_part(logits, stride, rows, part, is_row & is_whole, VOCAB)
    count = tl.load(counts + rows, mask=is_filtered, other=0)
    found, is_candidate = _candidate_tokens(candidates, rows, count)
    scores, is_token = tl.where(is_whole[:, None], scores, found), is_token | is_candidate
    # Without top_k and top_p, tokens beside the candidates must be below min_p.
    bound = tl.load(bounds + rows, mask=is_filtered, other=float("-inf"))
    is_all = is_filtered & (bound == float("-inf"))  # beside masked ones
    num_kept = tl.where(is_all & is_limited & (num_kept > count), count, num_kept)
    is_below = tl.max(_weights(bound[:, None], maxima, temperature), 1) < min_p * (1.0 - MARGIN)
    is_certain &= is_whole | is_limited | (top_p < 1.0) | is_below | is_all
    weights = tl.where(is_token, _weights(scores, maxima, temperature), 0.0)
    weights, is_exact = _filtered(
        scores, weights, is_token, maxima, tl.sum(mass, 1), is_random, num_kept, top_p, min_p, VOCAB
    )
    is_certain &= is_exact
    totals = tl.where(is_whole, tl.sum(mass, 1), tl.sum(weights, 1))
    place, is_exact = _inverse(weights, tl.where(is_whole, before, 0.0), totals, share, _WIDTH)
    found_ids = tl.load(candidate_ids + rows * _WIDTH + place, mask=is_filtered, other=0)
    return tl.where(is_whole, part * _WIDTH + place, found_ids), is_certain & is_exact


@triton.jit
def _likeliest(
    part_maxima, part_ids, part_flags, rows, is_row, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Maxima of rows, their lowest ids, and whether a value is not finite."""
    parts = tl.arange(0, PADDED)[None, :]
    by_part, is_part = rows[:, None] * PARTS + parts, is_row[:, None] & (parts < PARTS)
    maxima_of_parts = _row_maxima(part_maxima, rows, is_row, PARTS, PADDED)
    maxima = tl.max(maxima_of_parts, 1)
    ids = tl.load(part_ids + by_part, mask=is_part, other=VOCAB)
    ids = tl.min(tl.where(maxima_of_parts == maxima[:, None], ids, VOCAB), 1)
    return maxima, ids, tl.max(tl.load(part_flags + by_part, mask=is_part, other=0), 1) > 0


@triton.jit(do_not_specialize=["num_rows"])
def decide_kernel(
    logits, stride, reals, top_k, part_maxima, part_ids, part_flags, row_flags, masses, candidates,
    candidate_ids, counts, bounds, tokens, num_rows, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):
    """Tokens of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    maxima, chosen, is_bad = _likeliest(
        part_maxima, part_ids, part_flags, rows, is_row, VOCAB, PARTS, PADDED
    )
    is_settled = maxima > float("-inf")
    if reals is not None:
        temperature = tl.load(reals + rows, mask=is_row, other=0.0)
        is_random = temperature > 0.0
        if tl.max(is_random.to(tl.int32), 0) > 0:
            temperature = tl.where(is_random, temperature, 1.0)
            top_p = tl.load(reals + num_rows + rows, mask=is_row, other=1.0)
            min_p = tl.load(reals + 2 * num_rows + rows, mask=is_row, other=0.0)
            share = tl.load(reals + 3 * num_rows + rows, mask=is_row, other=0.5)
            num_kept = tl.load(top_k + rows, mask=is_row, other=VOCAB)
            if PARTS == 1:
                drawn, is_certain = _drawn_narrow(
                    logits, stride, rows, is_row, maxima, is_random, temperature, top_p, min_p, share,
                    num_kept, VOCAB, COLUMNS,
                )
            else:
                drawn, is_certain = _drawn_wide(
                    logits, stride, rows, is_row, maxima, is_random, temperature, top_p, min_p, share,
                    num_kept, masses, candidates, candidate_ids, counts, bounds, VOCAB, PARTS, PADDED,
                )
            chosen = tl.where(is_random, drawn, chosen)
            is_settled &= ~is_random | is_certain
    chosen = tl.where(is_settled, chosen, _OPEN)
    if row_flags is not None:
        is_bad |= tl.load(row_flags + rows, mask=is_row, other=0) != 0
    chosen = tl.where(is_bad, _NOT_FINITE, chosen)
    tl.store(tokens + rows, chosen.to(tl.int64), mask=is_row)
# fmt: on


def choose(
    logits: Tensor,
    scores: Tensor,
    reals: Tensor | None,
    top_k: Tensor | None,
    row_flags: Tensor | None = None,
) -> Tensor:
    """Tokens int64 [n], or OPEN, or NOT_FINITE for `logits` [n, vocab_size] that are not.

    Args:
        scores: float32 [n, vocab_size], the logits with edits, or the logits themselves.
        reals: float64 [4, n]: temperature (0: the likeliest token), top_p, min_p and uniform number; None if
            all temperatures are 0.
        top_k: int64 [n], vocab_size for all tokens.
        row_flags: int32 [n], not 0 for rows that are not finite whatever their logits are.
    """
    num_rows, vocab_size = scores.shape
    num_parts = triton.cdiv(vocab_size, NUM_CANDIDATES)
    columns = padded(vocab_size) if num_parts == 1 else NUM_CANDIDATES
    constants = {"VOCAB": vocab_size, "PARTS": num_parts}
    is_wide = reals is not None and num_parts > 1
    maxima, ids, flags, sums = _parts(logits, scores, {**constants, "COLUMNS": columns}, has_sums=is_wide)
    constants["PADDED"] = padded(num_parts)
    whole: Sequence[Tensor | None] = [None] * 5
    if is_wide:
        assert reals is not None and sums is not None, "rows with parameters"
        whole = _wide_rows(scores, reals, top_k, maxima, sums, constants)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    rows = max(1, _INTERPRETED_ELEMENTS // columns) if IS_INTERPRETED else 1
    constants |= {"COLUMNS": columns, "ROWS": rows}
    given = (scores, scores.stride(0), reals, top_k, maxima, ids, flags, row_flags)
    start = Launch(decide_kernel, (triton.cdiv(num_rows, rows),), constants, max(4, min(16, columns // 256)))
    start(*given, *whole, tokens, num_rows)
    return tokens


def _parts(
    logits: Tensor, scores: Tensor, constants: Mapping[str, int], *, has_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of each part of each row: maximum and its id of `scores`, flags of `logits`, and sums of `scores`."""
    shape = len(scores), constants["PARTS"]
    maxima = scores.new_empty(shape)
    ids, flags = (torch.empty_like(maxima, dtype=torch.int32) for _ in range(2))
    sums = scores.new_empty((*shape, 3)) if has_sums else None
    start = Launch(parts_kernel, shape, constants)
    if scores is logits:
        start(scores, scores.stride(0), maxima, ids, flags, sums)
    else:
        start(scores, scores.stride(0), maxima, ids, None, sums)
        start(logits, logits.stride(0), None, None, flags, None)
    return maxima, ids, flags, sums


def _wide_rows(
    scores: Tensor,
    reals: Tensor,
    top_k: Tensor | None,
    maxima: Tensor,
    sums: Tensor,
    constants: Mapping[str, int],
) -> list[Tensor]:
    """Masses of parts, and candidates with their ids, numbers and bounds, of rows that need them."""
    num_rows = len(scores)
    masses = torch.empty_like(maxima, dtype=torch.float64)
    part_counts = torch.empty_like(maxima, dtype=torch.int32)
    given, of_parts, vocab_size = (
        (scores, scores.stride(0), reals, top_k),
        tuple(maxima.shape),
        constants["VOCAB"],
    )
    searched = {**constants, "DEVIATIONS": _deviations(vocab_size)}
    Launch(masses_kernel, of_parts, searched, 8)(*given, maxima, sums, masses, part_counts, num_rows)
    candidates = scores.new_empty(num_rows, NUM_CANDIDATES)
    ids = torch.empty_like(candidates, dtype=torch.int32)
    counts, bounds, keys = ids.new_empty(num_rows), scores.new_empty(num_rows), ids.new_empty(num_rows)
    Launch(select_kernel, (num_rows,), searched)(
        *(*given, maxima, sums, part_counts, counts, bounds, keys, num_rows)
    )
    moved = {"VOCAB": vocab_size, "PARTS": constants["PARTS"]}
    Launch(move_kernel, of_parts, moved, 16)(*given, part_counts, keys, candidates, ids, num_rows)
    return [masses, candidates, ids, counts, bounds]


def _deviations(vocab_size: int) -> float:
    """Standard deviations above the mean that three quarters of NUM_CANDIDATES of normal values exceed."""
    return NormalDist().inv_cdf(1.0 - 0.75 * NUM_CANDIDATES / vocab_size)
