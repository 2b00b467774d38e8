"""Progress of a fetch, which its thread writes and others read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wire.sizes import format_size

WINDOW_S = 5.0
"""Time over which the rate is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """Bytes of a fetch so far. `rate` is in bytes per second."""

    done_bytes: int
    total_bytes: int
    rate: float

    @property
    def left_s(self) -> float | None:
        """Time left at this rate, in seconds; None without a rate."""
        left = self.total_bytes - self.done_bytes
        if not left:
            return 0.0
        return left / self.rate if self.rate > 0 else None


class FetchProgress:
    """Counts wanted bytes as they are written. `snapshot` may be called by any thread."""

    def __init__(self) -> None:
        self._total_bytes = self._done_bytes = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=256)
        self._state = FetchState(done_bytes=0, total_bytes=0, rate=0.0)

    def expect(self, num_bytes: int, *, now_s: float) -> None:
        """Add bytes to fetch: all at the beginning, damaged ones later."""
        self._total_bytes += num_bytes
        self.update(self._done_bytes, now_s=now_s)

    def update(self, done_bytes: int, *, now_s: float) -> None:
        """Set the number of bytes fetched so far."""
        self._done_bytes = done_bytes
        self._marks.append((now_s, done_bytes))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        since_s, before = self._marks[0]
        rate = (done_bytes - before) / (now_s - since_s) if now_s > since_s else 0.0
        self._state = FetchState(done_bytes=done_bytes, total_bytes=self._total_bytes, rate=rate)

    def snapshot(self) -> FetchState:
        return self._state


def progress_text(state: FetchState) -> str:
    """For example "1.2 GiB of 17.5 GiB (6 %), 112.0 MiB/s, 149 s left"."""
    share = state.done_bytes / state.total_bytes if state.total_bytes else 1.0
    text = f"{format_size(state.done_bytes)} of {format_size(state.total_bytes)} ({share:.0%})"
    if state.left_s is None:
        return f"{text}, no bytes at present"
    return f"{text}, {format_size(round(state.rate))}/s, {state.left_s:.0f} s left"
