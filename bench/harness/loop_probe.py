"""Lag of an event loop: how late it runs the callback of a timer that the kernel makes due every 5 ms.

The timer is a timerfd, because event loops round their own timers to milliseconds. Linux only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

FILE_VARIABLE = "STAGELINE_TEST_BENCH_LAG"
INTERVAL_S = 0.005
_KEPT = 100
"""Samples per write."""


@dataclass(frozen=True, slots=True)
class LoopLag:
    """A timer that was due at `due_s` of the machine's monotonic clock, and ran `lag_s` later."""

    due_s: float
    lag_s: float


def read_lags(file: Path) -> list[LoopLag]:
    """Read a file that may still grow; empty for a missing file."""
    if not file.exists():
        return []
    complete, _, _ = file.read_text().rpartition("\n")
    pairs = (line.split() for line in complete.splitlines())
    return [LoopLag(float(due_s), float(lag_s)) for due_s, lag_s in pairs]


class LoopProbe:
    """Appends the lags of the running event loop to a file."""

    def __init__(self, file: str) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._next_due_s = time.monotonic() + INTERVAL_S
        self._timer = _periodic_timer(self._next_due_s, INTERVAL_S)
        self._lines: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer, self._take)

    def close(self) -> None:
        """Stop. A process that ends need not call it."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)
        os.close(self._file)

    def _take(self) -> None:
        """A late callback stands for all timers that were due before it."""
        now_s = time.monotonic()
        (num_due,) = struct.unpack("Q", os.read(self._timer, 8))
        for _ in range(num_due):
            self._lines.append(f"{self._next_due_s:.6f} {max(0.0, now_s - self._next_due_s):.6f}\n")
            self._next_due_s += INTERVAL_S
        if len(self._lines) >= _KEPT:
            os.write(self._file, "".join(self._lines).encode())
            self._lines.clear()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


_ABSOLUTE = 1


def _periodic_timer(first_s: float, interval_s: float) -> int:
    """File descriptor of a timer on the monotonic clock. Source: timerfd_create(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    spec = _TimerSpec(_time_spec(interval_s), _time_spec(first_s))
    if timer < 0 or libc.timerfd_settime(timer, _ABSOLUTE, ctypes.byref(spec), None) < 0:
        raise OSError(ctypes.get_errno(), "no periodic timer")
    return timer


def _time_spec(time_s: float) -> _TimeSpec:
    seconds = int(time_s)
    return _TimeSpec(seconds, int((time_s - seconds) * 1e9))
