"""Clock offset between a process and the coordinator, measured from heartbeats.

As in NTP (RFC 5905, section 8), a heartbeat and its response carry four timestamps. The exchange with the
shortest round trip gives the best estimate; its error is at most half of that round trip.
"""

import time
from collections import deque
from dataclasses import dataclass

KEPT_EXCHANGES = 32
SET_US = 10_000
"""A wall clock that moves by more than this against the monotonic clock was set."""


def wall_clock_us() -> int:
    """Return this host's wall clock in microseconds since 1970."""
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Exchange:
    """Timestamps of a heartbeat and its response, in microseconds.

    `sent_us` and `back_us` are read from this host's clock, `received_us` and `answered_us` from the peer's.
    """

    sent_us: int
    received_us: int
    answered_us: int
    back_us: int

    @property
    def round_trip_us(self) -> int:
        """Network time of both messages together."""
        return (self.back_us - self.sent_us) - (self.answered_us - self.received_us)

    @property
    def offset_us(self) -> int:
        """Peer clock minus this clock, if both messages took equally long."""
        return (self.received_us - self.sent_us + self.answered_us - self.back_us) // 2


class ClusterClock:
    """The coordinator's clock as seen by this process: the local clock plus an offset.

    An offset below its uncertainty is not applied: on one host it would only add noise.
    """

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=KEPT_EXCHANGES)
        self._offset_us = 0
        self._uncertainty_us: int | None = None
        self._monotonic_at_us = 0
        self.refresh()

    @property
    def offset_us(self) -> int:
        return self._offset_us

    @property
    def uncertainty_us(self) -> int | None:
        """Maximum error of the offset; None before the first exchange."""
        return self._uncertainty_us

    def refresh(self) -> None:
        """Re-read this host's wall clock, which may have been set. Call periodically."""
        before, self._monotonic_at_us = self._monotonic_at_us, wall_clock_us() - time.monotonic_ns() // 1000
        if abs(self._monotonic_at_us - before) > SET_US:
            self._exchanges.clear()

    def at_us(self, monotonic_s: float) -> int:
        """Convert a `time.monotonic` time to the coordinator's clock, in microseconds since 1970."""
        return round(monotonic_s * 1e6) + self._monotonic_at_us + self._offset_us

    def note(self, exchange: Exchange) -> None:
        """Update the offset; a negative round trip (a clock was set) discards earlier exchanges."""
        if exchange.round_trip_us < 0:
            self._exchanges.clear()
            return
        self._exchanges.append(exchange)
        best = min(self._exchanges, key=lambda candidate: candidate.round_trip_us)
        self._uncertainty_us = max(1, best.round_trip_us // 2)
        self._offset_us = best.offset_us if abs(best.offset_us) > self._uncertainty_us else 0
