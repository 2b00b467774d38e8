"""When an accounting is checked while it serves, and what the last check found."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.errors import IntegrityBroken

CHECK_INTERVAL_STEPS = 256
"""Fewest steps from one check to the next."""
MAX_INTERVAL_COST_S = 0.001
"""Longest that checks take per CHECK_INTERVAL_STEPS steps, on average."""
MAX_PAUSE_S = 0.05
"""A check that takes longer waits until nothing is computed. A block takes about a microsecond."""
IDLE_POLLS = 20
"""While nothing is computed, a check is repeated after this many polls of `is_due_when_idle`."""


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Number of checks so far, and time (microseconds since 1970) and problem of the last one.

    `problem` is empty where nothing was wrong.
    """

    num_checks: int = 0
    checked_at_us: int = 0
    problem: str = ""


class IntegrityMonitor:
    """Spreads checks over steps so that their cost is bounded, and keeps the last result."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` measures what a check takes, `wall_clock` tells when it was; both in seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_steps = 0
        self._num_seen = 0
        self._num_idle_polls = 0
        self._interval: float = CHECK_INTERVAL_STEPS
        self.report = IntegrityReport()

    def restart(self) -> None:
        """The accounting starts over, empty; the last result stays."""
        self._num_steps = self._num_seen = self._num_idle_polls = 0
        self._interval = CHECK_INTERVAL_STEPS

    def count_step(self) -> bool:
        """Counts a step; True when a check is due."""
        self._num_steps += 1
        return self._num_steps >= self._interval

    def is_due_when_idle(self) -> bool:
        """To be polled regularly: True when steps have come since the last check and pause now, and from time
        to time while none come.
        """
        has_paused, self._num_seen = self._num_steps == self._num_seen, self._num_steps
        self._num_idle_polls = self._num_idle_polls + 1 if has_paused else 0
        return has_paused and (self._num_steps > 0 or self._num_idle_polls >= IDLE_POLLS)

    def run(self, check: Callable[[], None]) -> str:
        """Runs `check`, which raises IntegrityBroken. Returns the problem, empty if there is none."""
        began_s, problem = self._clock(), ""
        try:
            check()
        except IntegrityBroken as error:
            problem = str(error)
        took_s = self._clock() - began_s
        share = took_s / MAX_INTERVAL_COST_S
        self._interval = CHECK_INTERVAL_STEPS * max(1.0, share) if took_s <= MAX_PAUSE_S else math.inf
        self._num_steps = self._num_seen = self._num_idle_polls = 0
        num_checks = self.report.num_checks + 1
        self.report = IntegrityReport(num_checks, round(self._wall_clock() * 1e6), problem)
        return problem
