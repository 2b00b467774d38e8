"""Durations of recoveries, printed at the end of a test run. Figures are never asserted on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median

FIGURE = "recovery"
"""Name of the property of a test's report that holds one figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A duration in seconds under the named disturbance."""

    name: str
    seconds: float


@dataclass(slots=True)
class Figures:
    """All figures of a run."""

    all: list[Figure] = field(default_factory=list)

    def record(self, name: str, seconds: float) -> None:
        self.all.append(Figure(name, round(seconds, 3)))

    def lines(self) -> list[str]:
        """One line per name: count, median and maximum."""
        by_name: dict[str, list[float]] = {}
        for figure in self.all:
            by_name.setdefault(figure.name, []).append(figure.seconds)
        width = max(map(len, by_name), default=0)
        return [
            f"{name:{width}}  {len(times):3} times  median {median(times):6.2f} s  worst {max(times):6.2f} s"
            for name, times in by_name.items()
        ]

    def json_lines(self) -> str:
        """One JSON object per figure."""
        return "".join(f"{json.dumps(asdict(figure))}\n" for figure in self.all)
