"""How far one has to go, from the lowest key upwards, to collect a given mass."""

import torch
from torch import Tensor

_SORTED_UP_TO = 1024
_NUM_BINS = 4096


def reach(keys: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
    """The lowest key [n, 1] of each row of `keys` [n, m] with which the mass of all keys up to it reaches the
    target: masses float64 [n, m], targets float64 [n, 1]. The highest key where the whole mass does not.

    Exact, but for the rounding of float64 sums. A wide row is not sorted: its masses are added up in bins of
    equal width, and only the keys of the bin in which the target is reached are sorted.
    """
    if keys.shape[-1] <= _SORTED_UP_TO:
        return _reach_sorted(keys, masses, targets)
    rows = [_reach_wide(*row) for row in zip(keys, masses, targets, strict=True)]
    return torch.stack(rows)


def _reach_sorted(keys: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
    keys, order = torch.sort(keys, dim=-1, stable=True)
    cumulative = masses.gather(-1, order).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, targets).clamp_(max=keys.shape[-1] - 1)
    return keys.gather(-1, index)


def _reach_wide(keys: Tensor, masses: Tensor, target: Tensor) -> Tensor:
    """One row: keys [m], masses [m], target [1]; the key [1]."""
    in_play = masses > 0.0
    lowest = keys.min()
    highest = keys.masked_fill(~in_play, -torch.inf).max()
    if not bool(lowest < highest):
        return highest[None]
    scale = _NUM_BINS / (highest.double() - lowest.double())
    # Monotone in every rounding: a lower key never lies in a higher bin.
    bins = (keys.double() - lowest).mul_(scale).clamp_(max=_NUM_BINS - 1).to(torch.int32)
    cumulative = torch.bincount(bins, weights=masses, minlength=_NUM_BINS).cumsum(dim=0)
    reached = int(torch.searchsorted(cumulative, target).clamp_(max=_NUM_BINS - 1))
    before = cumulative[reached - 1] if reached else 0.0
    inside = torch.nonzero((bins == reached) & in_play)[:, 0]
    return _reach_sorted(keys[inside][None], masses[inside][None], (target - before)[None])[0]
