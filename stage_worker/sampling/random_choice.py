"""Draws tokens for rows with a temperature, looking at as little of the vocabulary as gives the exact answer.

Most filters leave few tokens. So they are applied to the NUM_CANDIDATES likeliest ones only, and the outcome
is taken where it is proven to be that of the whole row; other rows are filtered at full width. Which way a
row goes, and with it its token, depends on that row alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.sampling.draws import Draw, drawn, row_sums, shares
from stage_worker.sampling.filters import FilterColumns, KeptTokens, keep_min_p, keep_top_p, keep_typical
from wire.steps import StepSampling

NUM_CANDIDATES = 256


def choose_random(scores: Tensor, maxima: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [n] for `scores` float32 [n, vocab_size], each row with its largest value in `maxima` [n]
    finite and a temperature above 0.
    """
    vocab_size, device = scores.shape[-1], scores.device
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    plain, few, many = _by_width([draw.sampling for draw in draws], vocab_size)
    batch = _Batch(scores, maxima[:, None], list(draws))
    if few:
        chosen, is_exact = _choose_among_candidates(batch.part(few))
        tokens[few] = chosen
        many += [row for row, is_done in zip(few, is_exact.tolist(), strict=True) if not is_done]
    if plain:
        tokens[plain] = _choose_unfiltered(batch.part(plain))
    for row in many:
        tokens[row] = _choose_at_full_width(batch.part([row]))
    return tokens


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of scores float32 [n, vocab_size] with their maxima [n, 1] and how to draw from them."""

    scores: Tensor
    maxima: Tensor
    draws: list[Draw]

    def part(self, rows: list[int]) -> "_Batch":
        if len(rows) == len(self.draws):
            return self
        return _Batch(self.scores[rows], self.maxima[rows], [self.draws[row] for row in rows])

    @property
    def columns(self) -> FilterColumns:
        return FilterColumns.of(self.draws, vocab_size=self.scores.shape[-1], device=self.scores.device)

    @property
    def tokens(self) -> KeptTokens:
        """All of them."""
        return KeptTokens.all_of(self.scores, self.maxima, self.columns)

    @property
    def shares(self) -> Tensor:
        return shares(self.draws, self.scores.device)


def _by_width(samplings: list[StepSampling], vocab_size: int) -> tuple[list[int], list[int], list[int]]:
    """Rows without filters, rows of which few candidates may do, and the others."""
    plain: list[int] = []
    few: list[int] = []
    many: list[int] = []
    for row, sampling in enumerate(samplings):
        is_limited = _is_limited(sampling, vocab_size)
        if is_limited and sampling.top_k >= NUM_CANDIDATES:
            many.append(row)
        elif is_limited or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            few.append(row)
        else:
            (many if sampling.typical_p < 1.0 else plain).append(row)
    return plain, few, many


def _is_limited(sampling: StepSampling, vocab_size: int) -> bool:
    """top_k drops something."""
    return 0 < sampling.top_k < vocab_size


def _choose_unfiltered(batch: _Batch) -> Tensor:
    return drawn(batch.tokens.weights, batch.shares)[:, 0]


def _choose_among_candidates(batch: _Batch) -> tuple[Tensor, Tensor]:
    """Token ids [n], and for which of them that is what the whole row would have given [n].

    Tokens that are not among the candidates are at most as likely as the last of them. So the whole row would
    have given the same where it can have no others, where top_k ends above the last candidate, and where the
    candidates above the last one reach top_p or the last one is below min_p.
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
    return ids.gather(-1, drawn(tokens.weights, batch.shares))[:, 0], is_exact[:, 0]


def _totals(batch: _Batch, tokens: KeptTokens) -> Tensor:
    """The weight [n, 1] of all that top_k leaves, which top_p is a share of; `tokens` are the candidates."""
    totals = tokens.totals
    samplings, vocab_size = [draw.sampling for draw in batch.draws], batch.scores.shape[-1]
    rows = [i for i, s in enumerate(samplings) if s.top_p < 1.0 and not _is_limited(s, vocab_size)]
    if rows:
        totals[rows] = batch.part(rows).tokens.totals
    return totals


def _choose_at_full_width(batch: _Batch) -> Tensor:
    """The token id [1] of one row."""
    tokens, vocab_size, top_k = batch.tokens, batch.scores.shape[-1], batch.draws[0].sampling.top_k
    if 0 < top_k < vocab_size:
        tokens.keep(tokens.scores >= tokens.scores.kthvalue(vocab_size + 1 - top_k, keepdim=True).values)
    _filter(tokens, tokens.totals)
    return drawn(tokens.weights, batch.shares)[:, 0]


def _filter(tokens: KeptTokens, totals: Tensor) -> None:
    """What comes after top_k, in place."""
    keep_top_p(tokens, totals)
    keep_min_p(tokens)
    keep_typical(tokens)
