"""Many schedules, on several processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice

from tests.simulation.observed import Transition
from tests.simulation.planted import BUGS
from tests.simulation.schedule import Verdict, draw, run

CHUNK = 8
"""Schedules that a process is given at once."""


@dataclass(slots=True)
class Tally:
    """What has come of all of them."""

    seed: int
    num_schedules: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    num_events: int = 0
    num_faults: int = 0
    least_events: int = 1_000_000
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    transitions: Counter[Transition] = field(default_factory=Counter)
    failed: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.num_schedules += 1
        self.cpu_s += verdict.cpu_s
        self.num_events += verdict.num_events
        self.num_faults += sum(verdict.faults.values())
        self.least_events = min(self.least_events, verdict.num_events)
        self.ends += verdict.ends
        self.faults += verdict.faults
        self.transitions += verdict.transitions
        if verdict.problems:
            self.failed.append(verdict)

    @property
    def per_minute(self) -> float:
        """Schedules."""
        return 60 * self.num_schedules / self.elapsed_s if self.elapsed_s else 0.0


def examine(seed: int, number: int, bug: str | None = None) -> Verdict:
    """One schedule, of the product as it is or with a planted bug."""
    schedule = draw(seed, number)
    if bug is None:
        return run(schedule)
    with BUGS[bug]():
        return run(schedule)


def campaign(
    seed: int,
    *,
    num_schedules: int | None = None,
    seconds: float | None = None,
    num_processes: int | None = None,
    bug: str | None = None,
) -> Tally:
    """Run schedules 0, 1, 2, ... of a seed up to a number or time; with a planted bug until it is caught."""
    tally = Tally(seed)
    began_s = time.monotonic()
    for verdict in _verdicts(seed, num_schedules, num_processes or os.cpu_count() or 1, bug):
        tally.add(verdict)
        tally.elapsed_s = time.monotonic() - began_s
        if (bug and verdict.problems) or (seconds is not None and tally.elapsed_s >= seconds):
            break
    return tally


def _verdicts(seed: int, most: int | None, num_processes: int, bug: str | None) -> Iterator[Verdict]:
    tasks = ((seed, number, bug) for number in islice(count(), most))
    if num_processes == 1:
        yield from (examine(*task) for task in tasks)
        return
    # Spawned, because the one that asks may have threads.
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
    pending = set[Future[list[Verdict]]]()
    try:
        for chunk in iter(lambda: list(islice(tasks, CHUNK)), []):
            pending.add(pool.submit(_examine_all, chunk))
            if len(pending) > 2 * num_processes:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (verdict for future in done for verdict in future.result())
        yield from (verdict for future in pending for verdict in future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _examine_all(chunk: list[tuple[int, int, str | None]]) -> list[Verdict]:
    return [examine(*task) for task in chunk]
