"""Copies of every value of a self-check's reference: exact, and rounded in two ways to measure sensitivity.

A tensor [NUM_COPIES, ...] has the exact value first. `ROUNDED` is rounded to the run dtype after every
operation, and its difference from the exact copy is typical of a correct stage. `CONTRARY` is rounded at
other values, and takes another route wherever rounding decides (see `routed`): a bound of the difference.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from wire.reference import Roundings

NUM_COPIES = 3
EXACT, ROUNDED, CONTRARY = range(NUM_COPIES)

_F32_GRID = 32
"""Rounding of float32, in units of its last place.

Stages sum in other orders, which moves a product of some hundred terms by a few units, and one of 10,000
terms by about 30.
"""
_SHIFT = 0.75
"""Factor under which the contrary copy is rounded, so that it rounds at other values."""
_UNDECIDED = 2.0
"""Rounding may move two ranks towards each other, each by as much as it moved any."""


def round_copies(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the copies of `x` [NUM_COPIES, ...] but the exact one to `dtype`, in place."""
    x[ROUNDED] = _nearest(x[ROUNDED], dtype)
    x[CONTRARY] = _nearest(x[CONTRARY] * _SHIFT, dtype) / _SHIFT
    return x


def _nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.float32:
        return x.to(dtype).float()
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + _F32_GRID // 2) & -_F32_GRID).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def routed(ranks: Tensor, count: int) -> Tensor:
    """Whether each of `ranks` [NUM_COPIES, ..., m] is among the `count` highest of its copy.

    Where rounding decides, a stage may take another route than every copy: it rounds other sums. The
    contrary copy takes the next best in the place of its last one if it agrees with the exact copy and the
    gap is within `_UNDECIDED` times the largest difference of a rank between them.
    """
    is_routed = is_among(ranks, count)
    if count >= ranks.shape[-1]:
        return is_routed
    exact, rounded = ranks[EXACT], ranks[ROUNDED]
    is_finite = exact.isfinite() & rounded.isfinite()
    moved = torch.where(is_finite, (rounded - exact).abs(), 0.0).amax(dim=-1)
    best, order = exact.sort(dim=-1, descending=True, stable=True)
    gap = best[..., count - 1] - best[..., count]
    agrees = (is_routed[EXACT] == is_routed[CONTRARY]).all(dim=-1)
    is_undecided = ((gap <= _UNDECIDED * moved) & (moved > 0) & agrees)[..., None]
    last, following = order[..., count - 1, None], order[..., count, None]
    is_routed[CONTRARY].scatter_(-1, last, is_routed[CONTRARY].gather(-1, last) & ~is_undecided)
    is_routed[CONTRARY].scatter_(-1, following, is_routed[CONTRARY].gather(-1, following) | is_undecided)
    return is_routed


def is_among(ranks: Tensor, count: int) -> Tensor:
    """Whether each of `ranks` [..., n] is one of the `count` highest; of equal ones, the first are."""
    places = ranks.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return places < count


def relative_changes(hidden: Tensor) -> Tensor:
    """Change of each token's hidden state by rounding, [NUM_COPIES - 1, n] float64, relative to its norm."""
    exact, rounded = hidden[EXACT].double(), hidden[ROUNDED:].double()
    norms = exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    changes: Tensor = (rounded - exact).norm(dim=-1) / norms
    return changes


def roundings_of(changes: Tensor) -> Roundings:
    """The roundings of n tokens by the `changes` [NUM_COPIES - 1, n] of both rounded copies."""
    typical, highest = changes[ROUNDED - 1].float(), changes.amax(dim=0).float()
    return Roundings(*(array("f", x.numpy().tobytes()) for x in (typical, highest)))
