"""One summary of several test runs, in pytest's form: `python -m tests.summary FILE`.

Each run appends its results to the file that STAGELINE_TEST_RESULTS names.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

OUTCOMES = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
NUM_SLOWEST = 30


@dataclass(slots=True)
class Results:
    """What one run found; several add up."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    durations: list[tuple[float, str]] = field(default_factory=list)
    """The slowest tests: seconds and name."""

    @classmethod
    def of_reports(cls, reports: dict[str, list[Any]], seconds: float) -> Results:
        """The results of a run, from the `stats` of pytest's terminal reporter."""
        failures = [
            f"{outcome.upper()} {report.nodeid}"
            for outcome in ("failed", "error")
            for report in reports.get(outcome, [])
        ]
        durations: Counter[str] = Counter()
        for report in (report for listed in reports.values() for report in listed):
            if hasattr(report, "duration"):
                durations[f"{report.when:8} {report.nodeid}"] += report.duration
        slowest = [(round(taken, 2), name) for name, taken in durations.most_common(NUM_SLOWEST)]
        counts = Counter({outcome: len(reports[outcome]) for outcome in OUTCOMES if outcome in reports})
        return cls(seconds, counts, failures, slowest)

    def add(self, other: Results) -> None:
        self.seconds += other.seconds
        self.counts.update(other.counts)
        self.failures += other.failures
        self.durations = sorted(self.durations + other.durations, reverse=True)[:NUM_SLOWEST]

    def append_to(self, file: Path) -> None:
        with file.open("a") as output:
            output.write(f"{json.dumps({part.name: getattr(self, part.name) for part in fields(self)})}\n")

    def lines(self) -> list[str]:
        counts = ", ".join(f"{self.counts[name]} {name}" for name in OUTCOMES if self.counts[name])
        elapsed = f"{self.seconds:.2f}s ({timedelta(seconds=int(self.seconds))})"
        return [
            f"slowest {NUM_SLOWEST} durations of all tiers",
            *(f"{seconds:.2f}s {name}" for seconds, name in self.durations),
            *self.failures,
            f"{counts or 'no tests ran'} in {elapsed}",
        ]


def main(file: Path) -> int:
    total = Results()
    for line in file.read_text().splitlines():
        run = json.loads(line)
        total.add(Results(run["seconds"], Counter(run["counts"]), run["failures"], run["durations"]))
    print("\n".join(total.lines()))
    return 1 if total.failures or not total.counts else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
