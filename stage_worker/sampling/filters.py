"""top_k, top_p, min_p and typical_p: which tokens a row keeps, each of what the one before has left.

A token's weight is proportional to its probability, 1 for the most likely token and 0 for what is dropped.
The filters mean what transformers' TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper and
TypicalLogitsWarper mean; where equals straddle the edge of top_p, those with the lowest ids stay. No filter
drops the last token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.sampling.draws import Draw, row_sums
from stage_worker.sampling.reach import reach

_SMALLEST_LOG_WEIGHT = -700.0
"""A weight of exp(-700) is never drawn, as no share of the whole is below 2**-53; smaller numbers, which
float64 has not with full precision, cost ten times as much to compute.
"""
_LOG_SPAN = 40.0
"""Tokens whose log weights are further from the most likely one's have next to no mass."""


@dataclass(frozen=True, slots=True)
class FilterColumns:
    """The parameters of n rows: float64 [n, 1] each, `top_k` int64 and vocab_size where it is all tokens."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw], *, vocab_size: int, device: torch.device) -> "FilterColumns":
        rows = [draw.sampling for draw in draws]
        reals = [[each.temperature, each.top_p, each.min_p, each.typical_p] for each in rows]
        temperature, top_p, min_p, typical_p = torch.tensor(reals, dtype=torch.float64, device=device).T
        limits = [min(each.top_k or vocab_size, vocab_size) for each in rows]
        top_k = torch.tensor(limits, dtype=torch.int64, device=device)
        return cls(*(column[:, None] for column in (temperature, top_k, top_p, min_p, typical_p)))


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of n rows and what is left of them: `scores` float32 [n, m] are logits after penalties and
    masks, in ascending order of their token ids; `maxima` [n, 1] those of the whole rows; `weights` float64
    [n, m].
    """

    scores: Tensor
    maxima: Tensor
    columns: FilterColumns
    weights: Tensor

    @classmethod
    def all_of(cls, scores: Tensor, maxima: Tensor, columns: FilterColumns) -> "KeptTokens":
        """Weights are exp((score - maximum) / temperature)."""
        return cls(scores, maxima, columns, _log_weights(scores, maxima, columns.temperature).exp_())

    @property
    def totals(self) -> Tensor:
        """The weight [n, 1] of all that is left."""
        return row_sums(self.weights)

    def keep(self, kept: Tensor) -> None:
        """Drops what is not in `kept` (bool [n, m]). Several times faster than masked_fill_."""
        self.weights.mul_(kept)


def keep_top_p(tokens: KeptTokens, totals: Tensor) -> None:
    """Drops what is not in the smallest set of the likeliest tokens that reaches top_p of `totals` [n, 1]."""
    top_p = tokens.columns.top_p
    is_used = top_p < 1.0
    if not bool(is_used.any()):
        return
    span = _LOG_SPAN * tokens.columns.temperature
    keys, targets = -tokens.scores, top_p * totals
    edge = reach(keys, tokens.weights, targets, lowest=-tokens.maxima, span=span)
    tokens.keep(keys <= torch.where(is_used, edge.key, math.inf))
    weight = _log_weights(-edge.key, tokens.maxima, tokens.columns.temperature).exp_()
    is_surplus = is_used & (edge.mass_below + (edge.num_equal - 1) * weight >= targets)
    if bool(is_surplus.any()):
        at_edge = keys == edge.key
        equals_before = at_edge.cumsum(dim=-1) - 1
        tokens.keep(~(at_edge & is_surplus & (edge.mass_below + equals_before * weight >= targets)))


def keep_min_p(tokens: KeptTokens) -> None:
    """Drops what is less than min_p times as likely as the most likely token."""
    min_p = tokens.columns.min_p
    if bool((min_p > 0.0).any()):
        tokens.keep(tokens.weights >= min_p)


def keep_typical(tokens: KeptTokens) -> None:
    """Drops what is not in the smallest set of the tokens whose surprise is nearest to the entropy, equals of
    the last one included, that reaches typical_p (Meister et al., 2022, arXiv:2202.00666).
    """
    typical_p = tokens.columns.typical_p
    is_used = typical_p < 1.0
    if not bool(is_used.any()):
        return
    log_weights = _log_weights(tokens.scores, tokens.maxima, tokens.columns.temperature)
    # Surprise is log(total) - log weight: the total is left out of it and of the entropy.
    totals = tokens.totals
    mean = row_sums(tokens.weights * log_weights) / totals
    distance = log_weights.sub_(mean).abs_()
    lowest, span = torch.zeros_like(mean), torch.full_like(mean, _LOG_SPAN)
    edge = reach(distance, tokens.weights, typical_p * totals, lowest=lowest, span=span)
    tokens.keep(distance <= torch.where(is_used, edge.key, math.inf))


def _log_weights(scores: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """(score - maximum) / temperature, float64 [n, m]; finite also for masked tokens."""
    return scores.double().sub_(maxima).div_(temperature).clamp_(min=_SMALLEST_LOG_WEIGHT)
