"""How far one has to go, from the lowest key upwards, to collect a given mass."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SORTED_UP_TO = 1024
_NUM_BINS = 1 << 14


@dataclass(frozen=True, slots=True)
class Edge:
    """Where the mass is reached in each of n rows; all [n, 1].

    `key` is the lowest key with which the mass of all keys up to it reaches the target, the highest where the
    whole mass does not; `mass_below` that of the keys below it; `num_equal` how many tokens have this key.
    """

    key: Tensor
    mass_below: Tensor
    num_equal: Tensor


def reach(keys: Tensor, masses: Tensor, targets: Tensor, *, lowest: Tensor, span: Tensor) -> Edge:
    """The edges of rows of `keys` [n, m] with `masses` float64 [n, m] at `targets` float64 [n, 1] above 0.

    Exact, but for the rounding of float64 sums. A wide row is not sorted: its masses are added up in bins of
    equal width, and only the keys of the bin in which the target is reached are sorted. `lowest` [n, 1] is a
    lower bound of the keys, and most of what has mass lies within `span` [n, 1] of it: the bins are laid
    there, and what lies above is in the last one.
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
    """One row: keys [m] and masses [m], the others [1]; the three of an Edge, each [1, 1]."""
    # Monotone in every rounding: a lower key never lies in a higher bin.
    offsets = (keys - lowest.to(keys.dtype)).mul_(scale.clamp(max=1e30))
    bins = offsets.clamp_(max=_NUM_BINS - 1).to(torch.int32)
    cumulative = torch.bincount(bins, weights=masses, minlength=_NUM_BINS).cumsum(dim=0)
    # By rounding, the target can be above the whole mass: then the last bin with mass in it.
    reached = int(torch.searchsorted(cumulative, torch.minimum(target, cumulative[-1:])))
    below = cumulative[reached - 1] if reached else torch.zeros_like(cumulative[0])
    inside = torch.nonzero(bins == reached)[:, 0]
    edge = _reach_sorted(keys[inside][None], masses[inside][None], (target - below)[None])
    return edge.key, edge.mass_below + below, edge.num_equal
