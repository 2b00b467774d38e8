"""One summary of several test runs, in pytest's form: `python -m tests.summary FILE`.

Each run appends its results to the file that STAGELINE_TEST_RESULTS names.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
NUM_SLOWEST = 30
CRASHED = "crashed while running"
"""As xdist tells it."""
NUM_LINES = 30
"""Of the reason of a failure: its last lines."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`outcome`: "failed" or "error", which is outside of the test itself. `is_final`: passing another time
    would disprove nothing, since the process crashed or the examples are drawn.
    """

    outcome: str
    test: str
    reason: str
    is_final: bool

    @classmethod
    def of_report(cls, outcome: str, report: Any) -> Failure:
        reason = _reason(report)
        is_final = "hypothesis" in getattr(report, "keywords", ()) or CRASHED in reason
        return cls(outcome, report.nodeid, reason, is_final)

    def lines(self, outcome: str | None = None) -> list[str]:
        reason = (f"    {line}" for line in self.reason.splitlines()[-NUM_LINES:])
        return [f"{outcome or self.outcome.upper()} {self.test}", *reason]


@dataclass(slots=True)
class Results:
    """What one run found; several add up.

    `is_parallel`: tests ran beside each other. `cured`: tests that failed in a parallel run and passed alone.
    """

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    durations: list[tuple[float, str]] = field(default_factory=list)
    """The slowest tests: seconds and name."""
    is_parallel: bool = False
    cured: list[Failure] = field(default_factory=list)

    @classmethod
    def of_reports(
        cls, reports: dict[str, list[Any]], seconds: float, *, is_parallel: bool, exit_status: int
    ) -> Results:
        """The results of a run, from the `stats` of pytest's terminal reporter and its status of exit."""
        failures = [
            Failure.of_report(outcome, report)
            for outcome in ("failed", "error")
            for report in reports.get(outcome, [])
        ]
        if exit_status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            reason = f"ended with status {exit_status}, {pytest.ExitCode(exit_status).name}"
            failures.append(Failure("error", "pytest", reason, is_final=True))
        durations: Counter[str] = Counter()
        for report in (report for listed in reports.values() for report in listed):
            if hasattr(report, "duration"):
                durations[f"{report.when:8} {report.nodeid}"] += report.duration
        slowest = [(round(taken, 2), name) for name, taken in durations.most_common(NUM_SLOWEST)]
        counts = Counter({outcome: len(reports[outcome]) for outcome in OUTCOMES if outcome in reports})
        return cls(seconds, counts, failures, slowest, is_parallel)

    @classmethod
    def read(cls, file: Path) -> list[Results]:
        """One for each run, in their order."""
        return [cls._of_json(json.loads(line)) for line in file.read_text().splitlines()]

    @classmethod
    def _of_json(cls, run: dict[str, Any]) -> Results:
        parsed: dict[str, Any] = {
            name: [Failure(**failure) for failure in run.pop(name)] for name in ("failures", "cured")
        }
        return cls(counts=Counter(run.pop("counts")), **parsed, **run)

    @classmethod
    def sum(cls, runs: Iterable[Results]) -> Results:
        total = cls()
        for run in runs:
            total.seconds += run.seconds
            total.counts.update(run.counts)
            total.failures += run.failures
            total.cured += run.cured
            total.durations = sorted(total.durations + run.durations, reverse=True)[:NUM_SLOWEST]
        return total

    def append_to(self, file: Path) -> None:
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        values |= {name: [asdict(failure) for failure in values[name]] for name in ("failures", "cured")}
        with file.open("a") as output:
            output.write(f"{json.dumps(values)}\n")

    def lines(self) -> list[str]:
        counts = ", ".join(f"{self.counts[name]} {name}" for name in OUTCOMES if self.counts[name])
        elapsed = f"{self.seconds:.2f}s ({timedelta(seconds=int(self.seconds))})"
        return [
            f"slowest {NUM_SLOWEST} durations of all tiers",
            *(f"{seconds:.2f}s {name}" for seconds, name in self.durations),
            *(line for failure in self.cured for line in failure.lines("FAILED BESIDE OTHERS, PASSED ALONE")),
            *(line for failure in self.failures for line in failure.lines()),
            f"{counts or 'no tests ran'} in {elapsed}",
        ]


def _reason(report: Any) -> str:
    """The error without its traceback: what pytest marks with an E, or all there is."""
    text = str(report.longreprtext)
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return "\n".join(marked or text.splitlines()[-NUM_LINES:])


def main(file: Path) -> int:
    total = Results.sum(Results.read(file))
    print("\n".join(total.lines()))
    return 1 if total.failures or not total.counts else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
