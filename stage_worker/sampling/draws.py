"""Chooses tokens from logits on LAST.

The filters apply in this order, each to what the one before has left, as transformers' logits warpers do:

1. temperature: logits / temperature (0 is greedy: the most likely token, the lowest id among equals);
2. top_k: tokens at least as likely as the k-th most likely one (equals of the k-th stay);
3. top_p: the smallest set of the most likely tokens whose renormalised probability reaches top_p.

A token is drawn by inverting the cumulative distribution in float64 at one uniform number per row. Every row
is computed by itself along the vocabulary, so its token does not depend on what else is in the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_worker.randomness import uniforms
from wire.steps import StepSampling

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose the token of one row: `position` is the absolute position of the token that is drawn."""

    sampling: StepSampling
    choice: int
    position: int


def check_sampling(sampling: StepSampling) -> None:
    """Raises ValueError, with the range, for parameters that no token can be drawn with."""
    if not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature} is not in [0, {MAX_TEMPERATURE:g}]")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p {sampling.top_p} is not in (0, 1]")
    if sampling.top_k < 0:
        raise ValueError(f"top_k {sampling.top_k} is negative")


def non_finite_rows(logits: Tensor) -> list[int]:
    """Rows of `logits` [n, vocab_size] with a NaN or an infinity in them.

    The sum of a row is finite only if all of it is, which costs one pass; a sum that overflows is looked at
    again.
    """
    suspects = torch.nonzero(~torch.isfinite(logits.sum(dim=-1))).flatten().tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of `logits` (float32 [n, vocab_size], all finite), with valid parameters each."""
    tokens = torch.argmax(logits, dim=-1)
    plain = [row for row, draw in enumerate(draws) if _is_random(draw) and not _is_filtered(draw)]
    filtered = [row for row, draw in enumerate(draws) if _is_random(draw) and _is_filtered(draw)]
    if plain:
        chosen = [draws[row] for row in plain]
        tokens[plain] = _drawn(_scaled(logits[plain], chosen).softmax(dim=-1), chosen)
    if filtered:
        tokens[filtered] = _drawn_filtered(logits[filtered], [draws[row] for row in filtered])
    return tokens.tolist()


def _is_random(draw: Draw) -> bool:
    return draw.sampling.temperature > 0.0


def _is_filtered(draw: Draw) -> bool:
    return draw.sampling.top_k > 0 or draw.sampling.top_p < 1.0


def _drawn_filtered(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Tokens [n] from the distributions that top_k and top_p leave; sorted, equals by ascending id."""
    vocab_size = logits.shape[-1]
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    limits = [min(draw.sampling.top_k or vocab_size, vocab_size) for draw in draws]
    kth = values.gather(-1, _column(limits, values, dtype=torch.int64) - 1)
    scores = _scaled(values, draws).masked_fill_(values < kth, -math.inf)
    probabilities = scores.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = _column([draw.sampling.top_p for draw in draws], values)
    # A difference of sums is off by a rounding; the most likely token and top_p = 1 must not suffer.
    dropped = (before >= top_p) & (top_p < 1.0)
    dropped[:, 0] = False
    return ids.gather(-1, _drawn(probabilities.masked_fill_(dropped, 0.0), draws)[:, None])[:, 0]


def _scaled(logits: Tensor, draws: list[Draw]) -> Tensor:
    temperatures = _column([draw.sampling.temperature for draw in draws], logits)
    return (logits.double() - logits.max(dim=-1, keepdim=True).values.double()) / temperatures


def _drawn(probabilities: Tensor, draws: list[Draw]) -> Tensor:
    """Column indices [n]: where a row's cumulative sum first passes its uniform share of the total."""
    seeds, choices, positions = (
        np.array(column, dtype=np.uint64)
        for column in zip(*((draw.sampling.seed, draw.choice, draw.position) for draw in draws), strict=True)
    )
    shares = torch.from_numpy(uniforms(seeds, choices, positions)).to(probabilities.device)
    cumulative = probabilities.cumsum(dim=-1)
    totals = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, shares[:, None] * totals, right=True)
    last = torch.searchsorted(cumulative, totals, right=False)
    return torch.minimum(index, last)[:, 0]


def _column(values: Sequence[float], like: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
