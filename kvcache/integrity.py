"""Integrity checks of the accounting, and their schedule.

The checks run while the cluster serves, so they use fast operations: comprehensions, sets, dicts of ints.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcache.blocks import Block, FullBlock, PartialBlock
from kvcache.errors import IntegrityBroken


def check_pages(
    num_blocks: int, *, unused: int, freed: Sequence[int], active: Sequence[int], inactive: Sequence[int]
) -> None:
    """Raise IntegrityBroken unless each page but the last `unused` of `num_blocks` is in exactly one list."""
    num_used = num_blocks - unused
    pages = {*freed, *active, *inactive}
    count = len(freed) + len(active) + len(inactive)
    is_range = not pages or (min(pages), max(pages)) == (0, num_used - 1)
    if not (unused >= 0 and count == len(pages) == num_used and is_range):
        raise IntegrityBroken(
            f"{len(freed) + unused} free + {len(active)} active + {len(inactive)} inactive pages are not "
            f"0..{num_blocks - 1}, each once"
        )


def check_owners(full: Mapping[int, int], partial: Mapping[int, int], owned: Iterable[Block] | None) -> None:
    """Raise IntegrityBroken unless each refcount equals the number of times `owned` contains the block.

    Refcounts are by sequence hash or id; if `owned` is None, they must only be positive.
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
            f"{len(wrong)} blocks have a wrong refcount, for example {block}: "
            f"refcount {refcount}, {num_owners} owners"
        )


def _differing(refcounts: Mapping[int, int], owners: Mapping[int, int]) -> list[int]:
    if refcounts == dict(owners):
        return []
    return [key for key in refcounts.keys() | owners.keys() if refcounts.get(key, 0) != owners.get(key, 0)]


CHECK_INTERVAL_STEPS = 256
"""Minimum number of steps between two checks."""
MAX_INTERVAL_COST_S = 0.001
"""Maximum average time for checks per CHECK_INTERVAL_STEPS steps."""
MAX_PAUSE_S = 0.05
"""A check that takes longer runs only while idle. It takes about a microsecond per block ever used."""
IDLE_POLLS = 20
"""While idle, checks repeat after this many polls of `is_due_when_idle`."""


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Number of checks, and time (microseconds since 1970) and problem (or "") of the last one."""

    num_checks: int = 0
    checked_at_us: int = 0
    problem: str = ""


class IntegrityMonitor:
    """Schedules checks with bounded cost and keeps the last result."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` measures the duration of a check, `wall_clock` its time of day; both in seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_steps = 0
        self._num_seen = 0
        self._num_idle_polls = 0
        self._interval: float = CHECK_INTERVAL_STEPS
        self.report = IntegrityReport()

    def restart(self) -> None:
        self._num_steps = self._num_seen = self._num_idle_polls = 0
        self._interval = CHECK_INTERVAL_STEPS

    def count_step(self) -> bool:
        """Count a step; return whether a check is due."""
        self._num_steps += 1
        return self._num_steps >= self._interval

    def is_due_when_idle(self) -> bool:
        """Poll regularly: true once after steps have paused, then periodically while idle."""
        has_paused, self._num_seen = self._num_steps == self._num_seen, self._num_steps
        self._num_idle_polls = self._num_idle_polls + 1 if has_paused else 0
        return has_paused and (self._num_steps > 0 or self._num_idle_polls >= IDLE_POLLS)

    def run(self, check: Callable[[], None]) -> str:
        """Run `check`, which raises IntegrityBroken; return the problem, empty if there is none."""
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
