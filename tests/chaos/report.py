"""Report of a chaos run, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Seen:
    """One disturbance: the longest time without a token from its beginning on, and whether there was a new
    epoch.
    """

    name: str
    pause_s: float
    has_new_epoch: bool


@dataclass(slots=True)
class Report:
    """All of one run. It went well when there are no `problems`."""

    seed: int
    seconds: float
    seen: list[Seen] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_finished: int = 0
    num_tokens: int = 0
    ended_with: Mapping[str, int] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The table, one line per kind of disturbance, and the outcomes of requests."""
        names = sorted({seen.name for seen in self.seen})
        width = max(map(len, [*names, "all"]))
        rows = [self._row(name, width, [s for s in self.seen if s.name == name]) for name in names]
        errors = ", ".join(f"{count} ended with {name}" for name, count in sorted(self.ended_with.items()))
        return [
            f"seed {self.seed}, {self.seconds:.0f} s",
            f"{'':{width}}  times  new epochs  median pause  worst pause",
            *rows,
            self._row("all", width, self.seen),
            f"requests: {self.num_finished} finished with {self.num_tokens} tokens"
            + (f", {errors}" if errors else ""),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            "failed" if self.problems else "passed",
        ]

    @staticmethod
    def _row(name: str, width: int, seen: list[Seen]) -> str:
        pauses_s = [fault.pause_s for fault in seen] or [0.0]
        num_epochs = sum(fault.has_new_epoch for fault in seen)
        return (
            f"{name:{width}}  {len(seen):5}  {num_epochs:10}  {median(pauses_s):10.2f} s  "
            f"{max(pauses_s):9.2f} s"
        )
