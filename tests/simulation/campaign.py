"""Many schedules, on several processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

from tests.simulation.observed import Transition
from tests.simulation.planted import BUGS, STATE_BUGS
from tests.simulation.schedule import Verdict, draw, run, with_states

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
    states: Counter[str] = field(default_factory=Counter)
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
        self.states += verdict.states
        if verdict.problems:
            self.failed.append(verdict)

    @property
    def per_minute(self) -> float:
        """Schedules."""
        return 60 * self.num_schedules / self.elapsed_s if self.elapsed_s else 0.0


def examine(
    seed: int, number: int, bug: str | None = None, *, has_states: bool = False, is_tracing: bool = False
) -> Verdict:
    """One schedule, of the product as it is or with a planted bug; `has_states`: see `with_states`."""
    schedule = with_states(seed, number) if has_states or bug in STATE_BUGS else draw(seed, number)
    with nullcontext() if bug is None else BUGS[bug]():
        return run(schedule, is_tracing=is_tracing)


def campaign(
    seed: int,
    *,
    num_schedules: int | None = None,
    seconds: float | None = None,
    num_processes: int | None = None,
    bug: str | None = None,
    has_states: bool = False,
) -> Tally:
    """Run schedules 0, 1, 2, ... of a seed up to a number or time; with a planted bug until it is caught."""
    tally = Tally(seed)
    began_s = time.monotonic()
    examine_one = partial(examine, bug=bug, has_states=has_states)
    for verdict in _verdicts(examine_one, seed, num_schedules, num_processes or os.cpu_count() or 1):
        tally.add(verdict)
        tally.elapsed_s = time.monotonic() - began_s
        if (bug and verdict.problems) or (seconds is not None and tally.elapsed_s >= seconds):
            break
    return tally


def _verdicts(
    examine_one: Callable[[int, int], Verdict], seed: int, most: int | None, num_processes: int
) -> Iterator[Verdict]:
    numbers = islice(count(), most)
    if num_processes == 1:
        yield from (examine_one(seed, number) for number in numbers)
        return
    # Spawned, because the one that asks may have threads.
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
    pending = set[Future[list[Verdict]]]()
    try:
        for chunk in iter(lambda: list(islice(numbers, CHUNK)), []):
            pending.add(pool.submit(_examine_all, examine_one, seed, chunk))
            if len(pending) > 2 * num_processes:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (verdict for future in done for verdict in future.result())
        yield from (verdict for future in pending for verdict in future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _examine_all(examine_one: Callable[[int, int], Verdict], seed: int, numbers: list[int]) -> list[Verdict]:
    return [examine_one(seed, number) for number in numbers]
