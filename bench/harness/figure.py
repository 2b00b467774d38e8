"""One figure: what was measured beside its own bound, and whether the ratio reaches the target. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Better(StrEnum):
    """Which way the ratio of a figure should go."""

    HIGHER = "higher"
    LOWER = "lower"


class Verdict(StrEnum):
    """IMPOSSIBLE: the ratio is on the far side of what the bound allows, so the measurement is wrong."""

    REACHED = "reached"
    MISSED = "missed"
    NO_TARGET = "no target"
    IMPOSSIBLE = "impossible"


class NotMeasured(Exception):
    """A figure could not be measured; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`measured` and `bound` are in `unit`; `ratio` is measured : bound.

    `ratios` are those of the single rounds in which both were measured, one after the other; `ratio` is their
    median where there are any. `limit` is the ratio that no true measurement passes, with what the clock
    allows. `noise` is the relative change of the ratio between two runs that means nothing. `how` is one
    sentence; `details` are further numbers, by name with the unit in it.
    """

    name: str
    measured: float
    bound: float
    unit: str
    how: str
    better: Better = Better.HIGHER
    target: float | None = None
    limit: float | None = None
    ratios: tuple[float, ...] = ()
    noise: float = 0.10
    details: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.measured > 0 and self.bound > 0):
            raise NotMeasured(f"{self.name}: measured {self.measured:g}, bound {self.bound:g} {self.unit}")

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else self.measured / self.bound

    @property
    def spread(self) -> float | None:
        """Largest less smallest ratio of the rounds, relative to the median; None for less than two."""
        if len(self.ratios) < 2:
            return None
        return (max(self.ratios) - min(self.ratios)) / self.ratio

    @property
    def verdict(self) -> Verdict:
        if self.limit is not None and _is_beyond(self.ratio, self.limit, self.better):
            return Verdict.IMPOSSIBLE
        if self.target is None:
            return Verdict.NO_TARGET
        is_missed = _is_beyond(self.target, self.ratio, self.better)
        return Verdict.MISSED if is_missed else Verdict.REACHED


def _is_beyond(value: float, mark: float, better: Better) -> bool:
    """`value` is better than `mark`."""
    return value > mark if better is Better.HIGHER else value < mark


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured, and the bound that was measured right before or after it."""

    measured: float
    bound: float


def against_best(measured: Sequence[float], peers: Sequence[float]) -> list[Round]:
    """Rounds against the best that a peer did in any of them.

    For peers with several threads: these wait for each other at every operation, so that a moment in which
    somebody else has a core costs them many times what it costs us.
    """
    return [Round(each, max(peers)) for each in measured]


def of_rounds(name: str, rounds: Sequence[Round], **rest: object) -> Figure:
    """The figure of several rounds: medians, and the ratio of each round. Raises NotMeasured for none."""
    if not rounds:
        raise NotMeasured(f"{name}: no round came to its end")
    return Figure(
        name=name,
        measured=statistics.median(each.measured for each in rounds),
        bound=statistics.median(each.bound for each in rounds),
        ratios=tuple(each.measured / each.bound for each in rounds),
        **rest,  # type: ignore[arg-type]
    )
