"""One figure: a measurement beside its bound, and whether their ratio meets the target. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Better(StrEnum):
    """Direction of a better ratio."""

    HIGHER = "higher"
    LOWER = "lower"


class Verdict(StrEnum):
    """IMPOSSIBLE: the ratio exceeds what the bound allows, so the measurement is wrong."""

    REACHED = "reached"
    MISSED = "missed"
    NO_TARGET = "no target"
    IMPOSSIBLE = "impossible"


class NotMeasured(Exception):
    """A figure could not be measured; the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Result `measured` and `bound` in `unit`; `ratio` is measured : bound.

    `ratios` has one entry per round; `ratio` is their median, if any. `limit` is the ratio that no correct
    measurement exceeds, clock error included. `noise` is the relative change of the ratio between two runs
    that is not significant. `how` is one sentence; `details` has further numbers, with the unit in their
    names.
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
        """Largest minus smallest ratio of the rounds, relative to the median; None for fewer than two."""
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
    """Whether `value` is better than `mark`."""
    return value > mark if better is Better.HIGHER else value < mark


@dataclass(frozen=True, slots=True)
class Round:
    """A measurement, and its bound measured right before or after it."""

    measured: float
    bound: float


def against_best(measured: Sequence[float], peers: Sequence[float]) -> list[Round]:
    """Compare each round with the best round of a peer.

    For peers with several threads, which wait for each other at every operation: another process on a core
    slows them down far more than Stageline.
    """
    return [Round(rate, max(peers)) for rate in measured]


def of_rounds(name: str, rounds: Sequence[Round], **rest: object) -> Figure:
    """Median figure of several rounds, with the ratio of each. Raises NotMeasured without rounds."""
    if not rounds:
        raise NotMeasured(f"{name}: no round completed")
    return Figure(
        name=name,
        measured=statistics.median(round_.measured for round_ in rounds),
        bound=statistics.median(round_.bound for round_ in rounds),
        ratios=tuple(round_.measured / round_.bound for round_ in rounds),
        **rest,  # type: ignore[arg-type]
    )
