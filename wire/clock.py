"""Clocks of several hosts: how far apart they are, and what time it is on the coordinator's.

The offset is measured as NTP does (RFC 5905, section 8): a heartbeat and its answer carry four times; the
exchange that took the least time on the way says most, and at most half of that time can be wrong.
"""

import time
from collections import deque
from dataclasses import dataclass

KEPT_EXCHANGES = 32
SET_US = 10_000
"""A host's clock that moves by so much against its monotonic clock was set."""


def wall_clock_us() -> int:
    """Microseconds since 1970 by this host's clock."""
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Exchange:
    """A heartbeat and its answer: sent and back by our clock, received and answered by the other, in
    microseconds.
    """

    sent_us: int
    received_us: int
    answered_us: int
    back_us: int

    @property
    def on_the_way_us(self) -> int:
        """How long both messages travelled together."""
        return (self.back_us - self.sent_us) - (self.answered_us - self.received_us)

    @property
    def offset_us(self) -> int:
        """What to add to our clock, if both messages took equally long."""
        return (self.received_us - self.sent_us + self.answered_us - self.back_us) // 2


class ClusterClock:
    """The coordinator's clock as this process knows it: its own clock, and an offset.

    An offset that is below its uncertainty is not applied: on one host it would only add noise.
    """

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=KEPT_EXCHANGES)
        self._offset_us = 0
        self._uncertainty_us: int | None = None
        self._monotonic_at_us = 0
        self.refresh()

    @property
    def offset_us(self) -> int:
        """What is added to this host's clock."""
        return self._offset_us

    @property
    def uncertainty_us(self) -> int | None:
        """By how much the offset may be off; None before the first exchange."""
        return self._uncertainty_us

    def refresh(self) -> None:
        """Follows this host's clock, which may have been set; to be called now and then."""
        before, self._monotonic_at_us = self._monotonic_at_us, wall_clock_us() - time.monotonic_ns() // 1000
        if abs(self._monotonic_at_us - before) > SET_US:
            self._exchanges.clear()

    def at_us(self, monotonic_s: float) -> int:
        """The coordinator's clock, in microseconds since 1970, at a moment of `time.monotonic`."""
        return round(monotonic_s * 1e6) + self._monotonic_at_us + self._offset_us

    def note(self, exchange: Exchange) -> None:
        """Takes another exchange. One that took less than no time is none: a clock was set meanwhile."""
        if exchange.on_the_way_us < 0:
            self._exchanges.clear()
            return
        self._exchanges.append(exchange)
        best = min(self._exchanges, key=lambda each: each.on_the_way_us)
        self._uncertainty_us = max(1, best.on_the_way_us // 2)
        self._offset_us = best.offset_us if abs(best.offset_us) > self._uncertainty_us else 0
