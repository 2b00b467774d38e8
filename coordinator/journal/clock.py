"""Time of a journal, which no change of the host's clock moves.

It starts as wall-clock time and then follows the time since boot, in one process and across restarts under
one boot. Only across boots, and on another host, the wall clock tells how much time has passed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

from coordinator.journal.records import time_in
from wire.payload_memory import host_id

MAX_DRIFT_S = 1.0
"""Change of the wall clock against the time since boot after which a new anchor is due."""


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClocks:
    """Clocks of a host in seconds, and an id of its boot, empty if the host has none."""

    boot_id: Callable[[], str] = host_id
    uptime_s: Callable[[], float] = _uptime_s
    wall_s: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """Readings of all clocks at one moment; `at` is the journal's time."""

    at: float
    boot_id: str
    uptime_s: float
    wall_s: float

    def encode(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def decode(cls, text: object) -> "ClockAnchor":
        """Reverse of `encode`. Raises ValueError or TypeError."""
        if not isinstance(text, str):
            raise TypeError(f"{text!r:.100} where clocks are expected")
        at, boot_id, uptime_s, wall_s = json.loads(text)
        return cls(time_in(at), str(boot_id), time_in(uptime_s), time_in(wall_s))


class JournalClock:
    """Continues from the `anchor` of a former process; without one, starts at the wall clock."""

    def __init__(self, host: HostClocks, anchor: ClockAnchor | None) -> None:
        self._host = host
        at = host.wall_s() if anchor is None else anchor.at + self._elapsed_s(anchor)
        self.anchor = ClockAnchor(at, host.boot_id(), host.uptime_s(), host.wall_s())

    def now_at(self) -> float:
        return self.anchor.at + self._host.uptime_s() - self.anchor.uptime_s

    def to_journal(self, time_s: float, *, now_s: float) -> float:
        """Convert `time_s` from the clock of `now_s`."""
        return self.now_at() + time_s - now_s

    def moved_anchor(self) -> ClockAnchor | None:
        """A new anchor if the wall clock was changed, so that it is right after the next boot, else None."""
        now_at, wall_s = self.now_at(), self._host.wall_s()
        if abs(wall_s - self.anchor.wall_s - (now_at - self.anchor.at)) <= MAX_DRIFT_S:
            return None
        return ClockAnchor(now_at, self.anchor.boot_id, self._host.uptime_s(), wall_s)

    def _elapsed_s(self, anchor: ClockAnchor) -> float:
        if is_same_boot(anchor, self._host.boot_id()):
            return self._host.uptime_s() - anchor.uptime_s
        return max(0.0, self._host.wall_s() - anchor.wall_s)


def is_same_boot(anchor: ClockAnchor | None, boot_id: str) -> bool:
    """Whether the host has not restarted since; False if either has no id."""
    return anchor is not None and anchor.boot_id == boot_id != ""
