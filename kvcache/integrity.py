"""Integrity checks of the accounting and when they run.

They run while a cluster serves, so they use what is fast in Python: comprehensions, sets and dicts of ints.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcache.blocks import Block, FullBlock, PartialBlock
from kvcache.errors import IntegrityBroken


def check_pages(
    num_blocks: int, *, free: Sequence[int], active: Sequence[int], inactive: Sequence[int]
) -> None:
    """Raises IntegrityBroken unless every page 0..num_blocks-1 is in exactly one of the three."""
    pages = {*free, *active, *inactive}
    count = len(free) + len(active) + len(inactive)
    is_range = not pages or (min(pages), max(pages)) == (0, num_blocks - 1)
    if not (count == len(pages) == num_blocks and is_range):
        raise IntegrityBroken(
            f"{len(free)} free + {len(active)} active + {len(inactive)} inactive pages do not make up "
            f"0..{num_blocks - 1}, each once"
        )


def check_owners(full: Mapping[int, int], partial: Mapping[int, int], owned: Iterable[Block] | None) -> None:
    """Raises IntegrityBroken unless each refcount is the number of times that `owned` names the block.

    `full` are refcounts by sequence hash, `partial` by id. With None for `owned`, refcounts need only be
    positive.
    """
    if min(full.values(), default=1) < 1 or min(partial.values(), default=1) < 1:
        raise IntegrityBroken("an active block has no owner")
    if owned is None:
        return
    blocks = list(owned)
    full_owners = Counter([block.sequence_hash for block in blocks if isinstance(block, FullBlock)])
    partial_owners = Counter([block.id for block in blocks if isinstance(block, PartialBlock)])
    wrong: list[tuple[Block, int, int]] = [
        (FullBlock(key), full.get(key, 0), full_owners[key]) for key in _differing(full, full_owners)
    ]
    wrong += [
        (PartialBlock(key), partial.get(key, 0), partial_owners[key])
        for key in _differing(partial, partial_owners)
    ]
    if wrong:
        block, refcount, num_owners = min(wrong, key=repr)
        raise IntegrityBroken(
            f"{len(wrong)} blocks have a refcount unlike their owners, such as {block}: "
            f"refcount {refcount}, {num_owners} owners"
        )


def _differing(refcounts: Mapping[int, int], owners: Mapping[int, int]) -> list[int]:
    if refcounts == dict(owners):
        return []
    return [key for key in refcounts.keys() | owners.keys() if refcounts.get(key, 0) != owners.get(key, 0)]


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
