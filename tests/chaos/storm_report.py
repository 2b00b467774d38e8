"""Report of a storm: requests, pauses and the phases within pauses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.recovery_log import Phase, Span, num_recoveries, parts_of
from tests.chaos.storm_cluster import Restart
from tests.chaos.storm_load import Ended, Outcome

MEDIAN_LIMIT_S = 1.5
P95_LIMIT_S = 5.0
NUM_WORST = 5


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value not exceeded by at least `share` of all; 0 without any."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


@dataclass(slots=True)
class StormReport:
    """All of one storm. `faults` are (when, name); all times are on the clock of the event loop."""

    seed: int
    seconds: float
    load_averages: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ended: list[Ended] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def num(self, outcome: Outcome) -> int:
        return sum(request.outcome is outcome for request in self.ended)

    @property
    def struck(self) -> list[Ended]:
        """Requests with at least one fault between their first and their last token."""
        moments = [at_s for at_s, _ in self.faults]
        return [
            request
            for request in self.ended
            if request.arrived_s
            and any(request.arrived_s[0] <= at_s <= request.arrived_s[-1] for at_s in moments)
        ]

    @property
    def is_right(self) -> bool:
        """0 failed, 0 wrong, 0 leaked."""
        return not (self.num(Outcome.FAILED) or self.num(Outcome.WRONG) or self.leaks or self.errors)

    @property
    def is_fast(self) -> bool:
        """Whether the pauses of the struck requests are within the limits."""
        pauses_s = [request.pause_s for request in self.struck]
        return percentile(pauses_s, 0.5) <= MEDIAN_LIMIT_S and percentile(pauses_s, 0.95) <= P95_LIMIT_S

    def lines(self) -> list[str]:
        """The tables, then the verdicts."""
        struck = self.struck
        return [
            f"seed {self.seed}, {self.seconds:.0f} s, load average {self.load_averages[0]:.1f}",
            *self._fault_lines(),
            *self._start_lines(),
            "",
            f"{'':26}{'count':>7}{'median':>9}{'p95':>9}{'worst':>9}",
            _row("pause, struck requests", [request.pause_s for request in struck]),
            _row("pause, all requests", [request.pause_s for request in self.ended]),
            _row("first token, all requests", [x for request in self.ended if (x := request.first_token_s)]),
            "",
            *self._phase_lines(struck),
            *self._worst_lines(struck),
            *(
                f"PROBLEM: {request.outcome.value}: request {request.number}: {request.problem}"
                for request in self.ended
                if request.outcome is not Outcome.DONE
            ),
            *(f"PROBLEM: {problem}" for problem in (*self.leaks, *self.errors)),
            *self._verdict_lines(struck),
        ]

    def _fault_lines(self) -> list[str]:
        counts = Counter(name for _, name in self.faults)
        num_kills = sum(count for name, count in counts.items() if name.startswith("kill"))
        rows = [f"  {count:4}  {name}" for name, count in sorted(counts.items())]
        return [f"faults: {len(self.faults)}, of them {num_kills} kill -9", *rows]

    def _start_lines(self) -> list[str]:
        starts = [
            (
                "worker starts",
                [x.listening_s - x.started_s for x in self.restarts if x.name != "coordinator"],
            ),
            (
                "coordinator starts",
                [x.listening_s - x.started_s for x in self.restarts if x.name == "coordinator"],
            ),
        ]
        return [
            f"{name}: {len(times)}, median {percentile(times, 0.5):.2f} s, worst {max(times):.2f} s"
            for name, times in starts
            if times
        ]

    def _phase_lines(self, struck: Sequence[Ended]) -> list[str]:
        """Of the longest pause of each struck request, the mean time in each phase: of all, and of those
        beyond the 95th percentile.
        """
        limit_s = percentile([request.pause_s for request in struck], 0.95)
        worst = [request for request in struck if request.pause_s >= limit_s]
        all_parts, worst_parts = self._mean_parts(struck), self._mean_parts(worst)
        rows = [
            f"{phase.value:30}{all_parts.get(phase, 0.0):7.2f} s{worst_parts.get(phase, 0.0):12.2f} s"
            for phase in Phase
            if phase in all_parts or phase in worst_parts
        ]
        num_epochs, num_of_worst = self._mean_epochs(struck), self._mean_epochs(worst)
        return [
            f"{'mean of the pause':30}{'all':>9}{'worst 5 %':>14}",
            *rows,
            f"{'epochs that began within it':30}{num_epochs:7.2f}{num_of_worst:14.2f}",
        ]

    def _mean_parts(self, requests: Sequence[Ended]) -> dict[Phase, float]:
        sums: dict[Phase, float] = {}
        for request in requests:
            for phase, seconds in parts_of(*request.longest_gap, self.spans).items():
                sums[phase] = sums.get(phase, 0.0) + seconds / len(requests)
        return sums

    def _mean_epochs(self, requests: Sequence[Ended]) -> float:
        total = sum(num_recoveries(*request.longest_gap, self.spans) for request in requests)
        return total / len(requests) if requests else 0.0

    def _worst_lines(self, struck: Sequence[Ended]) -> list[str]:
        lines = []
        for request in sorted(struck, key=lambda request: -request.pause_s)[:NUM_WORST]:
            begin_s, end_s = request.longest_gap
            parts = ", ".join(
                f"{phase.value} {seconds:.1f}"
                for phase, seconds in sorted(
                    parts_of(begin_s, end_s, self.spans).items(), key=lambda x: -x[1]
                )
                if seconds >= 0.05
            )
            faults = ", ".join(name for at_s, name in self.faults if begin_s - 1 <= at_s <= end_s)
            lines.append(f"worst: {request.pause_s:.1f} s ({parts}) with {faults}")
        return lines

    def _verdict_lines(self, struck: Sequence[Ended]) -> list[str]:
        pauses_s = [request.pause_s for request in struck]
        median_s, p95_s = percentile(pauses_s, 0.5), percentile(pauses_s, 0.95)
        return [
            f"requests: {self.num(Outcome.DONE)} done, {self.num(Outcome.FAILED)} failed, "
            f"{self.num(Outcome.WRONG)} wrong, {len(self.leaks)} leaked",
            f"pause: median {median_s:.2f} s (limit {MEDIAN_LIMIT_S:g} s), "
            f"p95 {p95_s:.2f} s (limit {P95_LIMIT_S:g} s): {'within' if self.is_fast else 'MISSED'}",
            "passed" if self.is_right and self.is_fast else "failed",
        ]


def _row(name: str, values: Sequence[float]) -> str:
    figures = (percentile(values, 0.5), percentile(values, 0.95), max(values, default=0.0))
    return f"{name:26}{len(values):7}" + "".join(f"{value:7.2f} s" for value in figures)
