"""Percentiles. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; `share` is in [0, 1]. Raises ValueError without values."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"share {share:g} of {len(values)} values")
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)
