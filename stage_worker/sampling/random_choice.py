"""Seeded random sampling with top-k, top-p, min-p and typical-p.

There is no generator state, so results do not depend on the batch. Seed, choice and position are hashed in
order by SplitMix64's finaliser, a bijection of 64-bit words in which every input bit affects every output
bit (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014; Stafford's variant 13).

Sampling inverts the cumulative distribution, over ascending token ids and in float64, at one uniform
number per row. Each row is computed independently of the others.

A token's weight is proportional to its probability: 1 for the most likely token, 0 if dropped. The filters
are equivalent to transformers' TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper and
TypicalLogitsWarper; among equals at the edge of top_p, the lowest ids stay. At least one token always
stays.

Most filters keep few tokens, so they are applied to the NUM_CANDIDATES most likely ones first. The outcome
is used if the whole row provably gives the same; otherwise the row is filtered at full width. This
depends on the row alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling.logits_processors import Place
from wire.sampling import StepSampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_12 = (np.uint64(bits) for bits in (30, 27, 31, 12))


def uniforms(
    seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One float64 in (0, 1) per row of the arrays [n]; 52.5 bits, so that rounding gives neither end."""
    words = _mixed(seeds + _GAMMA)
    words = _mixed((words ^ choices) + _GAMMA)
    words = _mixed((words ^ positions) + _GAMMA)
    return ((words >> _SHIFT_12).astype(np.float64) + 0.5) * 2.0**-52


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> _SHIFT_30)) * _MULTIPLIER_1
    words = (words ^ (words >> _SHIFT_27)) * _MULTIPLIER_2
    return words ^ (words >> _SHIFT_31)


_SORTED_UP_TO = 1024
_NUM_BINS = 1 << 14


@dataclass(frozen=True, slots=True)
class Edge:
    """Where the cumulative mass of n rows reaches its target; all [n, 1].

    `key` is the lowest key whose cumulative mass reaches the target, or the highest key; `mass_below` the
    mass of lower keys; `num_equal` the number of tokens with this key.
    """

    key: Tensor
    mass_below: Tensor
    num_equal: Tensor


def cumulative_cutoff(keys: Tensor, masses: Tensor, targets: Tensor, *, lowest: Tensor, span: Tensor) -> Edge:
    """Find the edges of rows of `keys` [n, m] with `masses` float64 [n, m] at `targets` float64 [n, 1] above
    0.

    Exact up to the rounding of float64 sums. Wide rows are not sorted: masses are added in bins of equal
    width, and only the keys of the target's bin are sorted. The bins cover `span` [n, 1] from `lowest` [n,
    1], a lower bound of the keys; most of the mass should be there, and keys above are in the last bin.
    """
    if keys.shape[-1] <= _SORTED_UP_TO:
        return _reach_sorted(keys, masses, targets)
    columns = (lowest, _NUM_BINS / span, targets)
    edges = [_reach_wide(*row) for row in zip(keys, masses, *columns, strict=True)]
    return Edge(*(torch.cat(column) for column in zip(*edges, strict=True)))


def _reach_sorted(keys: Tensor, masses: Tensor, targets: Tensor) -> Edge:
    keys, order = torch.sort(keys, dim=-1, stable=True)
    cumulative = masses.gather(-1, order).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, targets).clamp_(max=keys.shape[-1] - 1)
    key = keys.gather(-1, index)
    first = torch.searchsorted(keys, key)
    below = torch.where(first > 0, cumulative.gather(-1, (first - 1).clamp_(min=0)), 0.0)
    return Edge(key, below, torch.searchsorted(keys, key, right=True) - first)


def _reach_wide(
    keys: Tensor, masses: Tensor, lowest: Tensor, scale: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Edge fields, each [1, 1], of one row: keys [m] and masses [m], the others [1]."""
    # Monotone in every rounding: a lower key never lies in a higher bin.
    offsets = (keys - lowest.to(keys.dtype)).mul_(scale.clamp(max=1e30))
    bins = offsets.clamp_(max=_NUM_BINS - 1).to(torch.int32)
    cumulative = torch.bincount(bins, weights=masses, minlength=_NUM_BINS).cumsum(dim=0)
    # By rounding, the target can exceed the whole mass: then take the last bin with mass.
    reached = int(torch.searchsorted(cumulative, torch.minimum(target, cumulative[-1:])))
    below = cumulative[reached - 1] if reached else torch.zeros_like(cumulative[0])
    inside = torch.nonzero(bins == reached)[:, 0]
    edge = _reach_sorted(keys[inside][None], masses[inside][None], (target - below)[None])
    return edge.key, edge.mass_below + below, edge.num_equal


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample one row; `position` is the absolute position of the sampled token."""

    sampling: StepSampling
    choice: int
    position: int

    @property
    def is_random(self) -> bool:
        return self.sampling.temperature > 0.0


def argmax_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima [n] of `scores` [n, vocab_size], with their lowest ids [n]; maxima of blocks are faster."""
    width = _block_width(scores.shape[-1])
    blocks = scores.view(len(scores), -1, width)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    rows = torch.arange(len(scores), device=scores.device)
    return values, block * width + blocks[rows, block].argmax(dim=-1)


def row_sums(weights: Tensor) -> Tensor:
    """Sums [n, 1] of `weights` [n, m], added in the same order for one row and for many.

    torch splits the sum of a single long row over its threads, but not the sums of several short ones.
    """
    blocks = weights.view(len(weights), -1, _block_width(weights.shape[-1]))
    return blocks.sum(dim=-1).sum(dim=-1, keepdim=True)


def uniform_samples(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """Uniform number of each row, [n]."""
    seeds, choices, positions = (
        np.array(column, dtype=np.uint64)
        for column in zip(*((draw.sampling.seed, draw.choice, draw.position) for draw in draws), strict=True)
    )
    return uniforms(seeds, choices, positions)


def is_any(flags: Tensor) -> bool:
    """Whether a flag is set. On a device always true: looking would wait for it."""
    return flags.device.type != "cpu" or bool(flags.any())


def inverse_cdf_sample(weights: Tensor, at: Tensor) -> Tensor:
    """First columns [n, 1] whose cumulative weight (float64 [n, m]) exceeds `at` [n, 1] times the total.

    Any column for weights that are not finite.
    """
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, at * totals, right=True)
    last = torch.searchsorted(cumulative, totals, right=False)
    return torch.minimum(index, last).clamp_(max=weights.shape[-1] - 1)


def _block_width(size: int) -> int:
    """The largest power of two up to 256 that divides `size`."""
    return min(size & -size, 256)


_SMALLEST_LOG_WEIGHT = -700.0
"""A weight of exp(-700) is never sampled, since uniform numbers are at least 2**-53.

Smaller numbers, which are subnormal in float64, are ten times as expensive to compute.
"""
_LOG_SPAN = 40.0
"""Tokens further below the maximal log weight have negligible mass."""


@dataclass(frozen=True, slots=True)
class FilterColumns:
    """Parameters of n rows, float64 [n, 1] each; `top_k` is int64, with vocab_size for all tokens.

    `share` is the row's uniform number.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    share: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of n rows that filters have kept, in ascending order of ids.

    `scores` float32 [n, m] are logits after penalties and masks, `maxima` [n, 1] the maxima of whole rows,
    `weights` float64 [n, m].
    """

    scores: Tensor
    maxima: Tensor
    columns: FilterColumns
    weights: Tensor

    @classmethod
    def all_of(cls, scores: Tensor, maxima: Tensor, columns: FilterColumns) -> "KeptTokens":
        """Keep all tokens, with weights exp((score - maximum) / temperature)."""
        return cls(scores, maxima, columns, _log_weights(scores, maxima, columns.temperature).exp_())

    @property
    def totals(self) -> Tensor:
        """Remaining weight [n, 1]."""
        return row_sums(self.weights)

    def keep(self, kept: Tensor) -> None:
        """Drop tokens outside of `kept` (bool [n, m]); several times faster than masked_fill_."""
        self.weights.mul_(kept)


def keep_top_p(tokens: KeptTokens, totals: Tensor) -> None:
    """Keep the smallest set of the most likely tokens that reaches top_p of `totals` [n, 1]."""
    top_p = tokens.columns.top_p
    is_used = top_p < 1.0
    if not is_any(is_used):
        return
    span = _LOG_SPAN * tokens.columns.temperature
    keys, targets = -tokens.scores, top_p * totals
    edge = cumulative_cutoff(keys, tokens.weights, targets, lowest=-tokens.maxima, span=span)
    tokens.keep(keys <= torch.where(is_used, edge.key, math.inf))
    weight = _log_weights(-edge.key, tokens.maxima, tokens.columns.temperature).exp_()
    is_surplus = is_used & (edge.mass_below + (edge.num_equal - 1) * weight >= targets)
    if is_any(is_surplus):
        at_edge = keys == edge.key
        equals_before = at_edge.cumsum(dim=-1) - 1
        tokens.keep(~(at_edge & is_surplus & (edge.mass_below + equals_before * weight >= targets)))


def keep_min_p(tokens: KeptTokens) -> None:
    """Drop tokens less than min_p times as likely as the most likely token."""
    min_p = tokens.columns.min_p
    if is_any(min_p > 0.0):
        tokens.keep(tokens.weights >= min_p)


def keep_typical(tokens: KeptTokens) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, until their probability reaches typical_p.

    Equals of the last token are included. Source: Meister et al., 2022, arXiv:2202.00666.
    """
    typical_p = tokens.columns.typical_p
    is_used = typical_p < 1.0
    if not is_any(is_used):
        return
    log_weights = _log_weights(tokens.scores, tokens.maxima, tokens.columns.temperature)
    # Surprise is log(total) - log weight; the total is omitted from both surprise and entropy.
    totals = tokens.totals
    mean = row_sums(tokens.weights * log_weights) / totals
    distance = log_weights.sub_(mean).abs_()
    lowest, span = torch.zeros_like(mean), torch.full_like(mean, _LOG_SPAN)
    edge = cumulative_cutoff(distance, tokens.weights, typical_p * totals, lowest=lowest, span=span)
    tokens.keep(distance <= torch.where(is_used, edge.key, math.inf))


def _log_weights(scores: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """(score - maximum) / temperature, float64 [n, m]; finite also for masked tokens."""
    return scores.double().sub_(maxima).div_(temperature).clamp_(min=_SMALLEST_LOG_WEIGHT)


PARAMETERS = frozenset(row.name for row in fields(StepSampling) if row.compare)
_OF_EVERY_WAY = frozenset(
    (
        *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("allowed_token_ids", "bad_words", "min_tokens", "min_tokens_hold_back", "grammar"),
        *("logprobs", "prompt_logprobs"),
    )
)
"""Change the logits before a row is sampled, or are computed from them afterwards."""


class KnownParameters:
    """Parameters that one way of sampling applies.

    A parameter that is added to `StepSampling` is unknown to each way until the way names it.
    """

    def __init__(self, *names: str) -> None:
        known = _OF_EVERY_WAY.union(names)
        assert known <= PARAMETERS, f"no parameters: {known - PARAMETERS}"
        unknown = sorted(PARAMETERS - known)
        self._values = attrgetter(*unknown) if unknown else _nothing
        self._without_effect = self._values(StepSampling())

    def suffice_for(self, sampling: StepSampling) -> bool:
        """Whether the other parameters of `sampling` have no effect."""
        return bool(self._values(sampling) == self._without_effect)


def _nothing(sampling: StepSampling) -> None:
    """All parameters are known."""


NUM_CANDIDATES = 256
_UNFILTERED = KnownParameters("temperature", "seed", "top_k")
_OF_CANDIDATES = KnownParameters("temperature", "seed", "top_k", "top_p", "min_p", "typical_p")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of scores float32 [n, vocab_size] with their maxima [n, 1] and sampling parameters."""

    scores: Tensor
    maxima: Tensor
    columns: FilterColumns

    @property
    def tokens(self) -> KeptTokens:
        return KeptTokens.all_of(self.scores, self.maxima, self.columns)


@dataclass(frozen=True, slots=True)
class _DrawnRows:
    """Rows int64 [n] of a batch on the host, with `reals` float64 [5, n] and `top_k` int64 [n].

    `reals` are in the order of FilterColumns.
    """

    rows: NDArray[np.int64]
    reals: NDArray[np.float64]
    top_k: NDArray[np.int64]

    @classmethod
    def of(cls, draws: Mapping[int, Draw], vocab_size: int) -> "_DrawnRows":
        rows = [draw.sampling for draw in draws.values()]
        reals = [[row.temperature, row.top_p, row.min_p, row.typical_p] for row in rows]
        columns = [*np.array(reals, np.float64).T, uniform_samples(list(draws.values()))]
        top_k = [min(row.top_k or vocab_size, vocab_size) for row in rows]
        return cls(np.array(list(draws), np.int64), np.stack(columns), np.array(top_k, np.int64))

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.rows, self.reals, self.top_k

    def batch(self, scores: Tensor, maxima: Tensor, place: Place) -> _Batch:
        """These rows of all `scores` and `maxima` [m]."""
        if len(self.rows) < len(scores):
            index = place(self.rows)
            scores, maxima = scores.index_select(0, index), maxima.index_select(0, index)
        temperature, top_p, min_p, typical_p, share = place(self.reals)[:, :, None].unbind()
        top_k = place(self.top_k)[:, None]
        columns = FilterColumns(temperature, top_p, min_p, typical_p, share, top_k)
        return _Batch(scores, maxima[:, None], columns)


class RandomRows:
    """The random rows of a batch, with their parameters on the host until the device has `arrays`."""

    def __init__(self, draws: Mapping[int, Draw], vocab_size: int) -> None:
        """`draws` by row, with temperatures above 0."""
        self._plain, self._few, self._many = (
            _DrawnRows.of(part, vocab_size) if part else None for part in _by_width(draws, vocab_size)
        )

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        for part in (self._plain, self._few, self._many):
            if part is not None:
                yield from part.arrays

    def sample(self, scores: Tensor, maxima: Tensor, tokens: Tensor, place: Place) -> Tensor:
        """Write their tokens into `tokens` [n], and return which are final, bool [n].

        `sample_at_full_width` samples the others.

        `scores` are float32 [n, vocab_size] with finite maxima [n]. On a device, nothing waits for it.
        """
        is_exact = torch.ones_like(tokens, dtype=torch.bool)
        if self._few is not None:
            chosen, is_done = _choose_among_candidates(self._few.batch(scores, maxima, place))
            tokens.index_copy_(0, place(self._few.rows), chosen)
            is_exact.index_copy_(0, place(self._few.rows), is_done)
        if self._plain is not None:
            chosen = _choose_unfiltered(self._plain.batch(scores, maxima, place))
            tokens.index_copy_(0, place(self._plain.rows), chosen)
        if self._many is not None:
            is_exact.index_fill_(0, place(self._many.rows), False)
        return is_exact


def choose_random(scores: Tensor, maxima: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [n] from `scores` float32 [n, vocab_size] with finite row maxima [n] and temperatures above
    0.
    """
    tokens = torch.empty(len(draws), dtype=torch.int64, device=scores.device)
    rows = RandomRows(dict(enumerate(draws)), scores.shape[-1])
    is_exact = rows.sample(scores, maxima, tokens, copies_to(scores.device))
    for row, is_done in enumerate(is_exact.tolist()):
        if not is_done:
            tokens[row] = sample_at_full_width(draws[row], scores[row : row + 1], maxima[row : row + 1])
    return tokens


def sample_at_full_width(draw: Draw, scores: Tensor, maxima: Tensor) -> int:
    """The token of a row of `scores` [1, vocab_size] with its finite maximum [1]; waits for a device.

    This is the definition of the shortcuts.
    """
    drawn = _DrawnRows.of({0: draw}, scores.shape[-1])
    return int(_choose_at_full_width(drawn.batch(scores, maxima, copies_to(scores.device))))


def copies_to(device: torch.device) -> Place:
    return lambda array: torch.from_numpy(array).to(device)


def _by_width(
    draws: Mapping[int, Draw], vocab_size: int
) -> tuple[dict[int, Draw], dict[int, Draw], dict[int, Draw]]:
    """Partition rows: without filters, probably decidable by few candidates, and others.

    Only `sample_at_full_width`, for the others, must apply every parameter.
    """
    plain: dict[int, Draw] = {}
    few: dict[int, Draw] = {}
    many: dict[int, Draw] = {}
    for row, draw in draws.items():
        sampling = draw.sampling
        is_limited = _is_limited(sampling, vocab_size)
        if not is_limited and _UNFILTERED.suffice_for(sampling):
            plain[row] = draw
        elif (is_limited and sampling.top_k >= NUM_CANDIDATES) or not _OF_CANDIDATES.suffice_for(sampling):
            many[row] = draw
        elif is_limited or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            few[row] = draw
        else:
            many[row] = draw
    return plain, few, many


def _is_limited(sampling: StepSampling, vocab_size: int) -> bool:
    """Whether top_k drops tokens."""
    return 0 < sampling.top_k < vocab_size


def _choose_unfiltered(batch: _Batch) -> Tensor:
    return inverse_cdf_sample(batch.tokens.weights, batch.columns.share)[:, 0]


def _choose_among_candidates(batch: _Batch) -> tuple[Tensor, Tensor]:
    """Token ids [n], and whether the whole row provably gives the same one [n].

    Tokens outside of the candidates are at most as likely as the last candidate. So the result is exact if
    there are no other tokens, if top_k ends above the last candidate, if the candidates above the last
    reach top_p, or if the last one is below min_p.
    """
    columns, vocab_size = batch.columns, batch.scores.shape[-1]
    num_candidates = min(NUM_CANDIDATES, vocab_size)
    likeliest, ids = torch.topk(batch.scores, num_candidates)
    last = likeliest[:, -1:]
    kth = likeliest.gather(-1, columns.top_k.clamp(max=num_candidates) - 1)
    ids, order = ids.sort(dim=-1)
    tokens = KeptTokens.all_of(likeliest.gather(-1, order), batch.maxima, columns)
    last_weights = tokens.weights.amin(dim=-1, keepdim=True)
    is_limited = columns.top_k < vocab_size
    tokens.keep(tokens.scores >= torch.where(is_limited, kth, -math.inf))
    totals = _totals(batch, tokens)
    above_last = row_sums(tokens.weights * (tokens.scores > last))
    reaches_top_p = (columns.top_p < 1.0) & (above_last >= columns.top_p * totals)
    is_exact = torch.where(is_limited, kth > last, reaches_top_p | (last_weights < columns.min_p))
    is_exact |= torch.isneginf(last) | (num_candidates == vocab_size)
    _filter(tokens, totals)
    return ids.gather(-1, inverse_cdf_sample(tokens.weights, columns.share))[:, 0], is_exact[:, 0]


def _totals(batch: _Batch, tokens: KeptTokens) -> Tensor:
    """Weight [n, 1] of the tokens within top_k, the base of top_p; `tokens` are the candidates."""
    totals, columns = tokens.totals, batch.columns
    is_whole = (columns.top_p < 1.0) & (columns.top_k == batch.scores.shape[-1])
    return torch.where(is_whole, batch.tokens.totals, totals) if is_any(is_whole) else totals


def _choose_at_full_width(batch: _Batch) -> Tensor:
    """Sample the token id [1] of one row."""
    tokens, vocab_size, top_k = batch.tokens, batch.scores.shape[-1], int(batch.columns.top_k)
    if top_k < vocab_size:
        tokens.keep(tokens.scores >= tokens.scores.kthvalue(vocab_size + 1 - top_k, keepdim=True).values)
    _filter(tokens, tokens.totals)
    return inverse_cdf_sample(tokens.weights, batch.columns.share)[:, 0]


def _filter(tokens: KeptTokens, totals: Tensor) -> None:
    """Apply the filters after top_k, in place."""
    keep_top_p(tokens, totals)
    keep_min_p(tokens)
    keep_typical(tokens)
