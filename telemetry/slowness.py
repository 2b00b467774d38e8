"""When a stage is called slow: one measure for what is going on and for what was traced. Pure."""

from collections.abc import Sequence
from statistics import median

STANDS_OUT = 1.3
"""A stage that takes so many times as long as the median of the others holds them up."""


def times_the_others(own_s: float, others_s: Sequence[float]) -> float | None:
    """How many times as long as the median of the others a stage takes for a step; None where there are no
    others, or they take no time.
    """
    middle_s = median(others_s) if others_s else 0.0
    return own_s / middle_s if middle_s > 0 else None


def stands_out(ratio: float | None) -> bool:
    """Whether a stage is slow that takes `ratio` times as long as the median of the others."""
    return ratio is not None and ratio >= STANDS_OUT
