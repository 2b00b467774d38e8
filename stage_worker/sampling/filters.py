"""top_k, top_p, min_p and typical_p: which tokens a row keeps, each of what the one before has left.

`scores` float32 [n, m] are logits after penalties and masks, in ascending order of their token ids; `weights`
float64 [n, m] are proportional to probabilities, 1 for the most likely token and 0 for what is dropped
already. They mean what transformers' TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper and
TypicalLogitsWarper mean; where equals straddle the edge of top_p, those with the lowest ids stay. No filter
drops the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.sampling.draws import Draw, row_sums
from stage_worker.sampling.reach import reach


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


def weights_of(scores: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """exp((score - maximum) / temperature), float64 [n, m]; `maxima` [n, 1] are those of the whole rows."""
    return scores.double().sub_(maxima).div_(temperature).exp_()


def keep_top_p(scores: Tensor, weights: Tensor, totals: Tensor, top_p: Tensor) -> None:
    """Drops, in place, what is not in the smallest set of the likeliest tokens that reaches top_p of
    `totals`.
    """
    if bool((top_p == 1.0).all()):
        return
    targets = top_p * totals
    edge = -reach(-scores, weights, targets)
    at_edge = scores == edge
    above = row_sums(weights.masked_fill(scores <= edge, 0.0))
    weight_at_edge = weights.masked_fill(~at_edge, 0.0).amax(dim=-1, keepdim=True)
    equals_before = at_edge.cumsum(dim=-1) - 1
    surplus = at_edge & (above + equals_before * weight_at_edge >= targets)
    weights.masked_fill_(((scores < edge) | surplus) & (top_p < 1.0), 0.0)


def keep_min_p(weights: Tensor, min_p: Tensor) -> None:
    """Drops, in place, what is less than min_p times as likely as the most likely token."""
    weights.masked_fill_(weights < min_p, 0.0)


def keep_typical(weights: Tensor, typical_p: Tensor) -> None:
    """Drops, in place, what is not in the smallest set of the tokens whose surprise is nearest to the
    entropy, equals of the last one included, that reaches typical_p (Meister et al., 2022, arXiv:2202.00666).
    """
    if bool((typical_p == 1.0).all()):
        return
    totals = row_sums(weights)
    surprise = (totals / weights).log_()
    is_kept = weights > 0.0
    entropy = row_sums(torch.where(is_kept, surprise * weights, 0.0)) / totals
    distance = (surprise - entropy).abs_()
    edge = reach(distance, weights, typical_p * totals)
    weights.masked_fill_((distance > edge) & (typical_p < 1.0), 0.0)
