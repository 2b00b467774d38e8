"""One token from what the filters leave of a row: the most likely one, or one drawn.

A token is drawn by inverting the cumulative distribution, over ascending token ids and in float64, at one
uniform number per row. Every row is computed by itself, so its token does not depend on what else is in the
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_worker.sampling.randomness import uniforms
from wire.steps import StepSampling


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose the token of one row: `position` is the absolute position of the token that is drawn."""

    sampling: StepSampling
    choice: int
    position: int

    @property
    def is_random(self) -> bool:
        return self.sampling.temperature > 0.0


def first_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value [n] of each row of `scores` [n, vocab_size], and the lowest id [n] that has it.

    Maxima of blocks first: torch finds a maximum much faster than its index.
    """
    width = _block_width(scores.shape[-1])
    blocks = scores.view(len(scores), -1, width)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    rows = torch.arange(len(scores), device=scores.device)
    return values, block * width + blocks[rows, block].argmax(dim=-1)


def row_sums(weights: Tensor) -> Tensor:
    """Sums [n, 1] of `weights` [n, m], added up in the same order for one row and for many.

    torch splits the sum of a single long row over its threads, but not the sums of several short ones.
    """
    blocks = weights.view(len(weights), -1, _block_width(weights.shape[-1]))
    return blocks.sum(dim=-1).sum(dim=-1, keepdim=True)


def shares(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """The uniform number of each row, float64 [n, 1]."""
    seeds, choices, positions = (
        np.array(column, dtype=np.uint64)
        for column in zip(*((draw.sampling.seed, draw.choice, draw.position) for draw in draws), strict=True)
    )
    return torch.from_numpy(uniforms(seeds, choices, positions)).to(device)[:, None]


def drawn(weights: Tensor, at: Tensor) -> Tensor:
    """Column indices [n, 1]: where the cumulative sum of a row of `weights` (float64 [n, m]) first passes its
    share `at` [n, 1] of the total. A column of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, at * totals, right=True)
    last = torch.searchsorted(cumulative, totals, right=False)
    return torch.minimum(index, last)


def _block_width(size: int) -> int:
    """The largest power of two up to 256 that divides `size`."""
    return min(size & -size, 256)
