"""Simulated time: when a step would have been computed, and waiting for just that moment."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable


class DeadlineClock:
    """One step at a time: a step begins when it is there and the one before has ended. Pure.

    What counts is when steps should have ended, never when somebody woke up, so no lateness adds up.
    """

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def serve(self, arrived_s: float, work_s: float) -> tuple[float, float]:
        """From when to when a step that came at `arrived_s` is computed."""
        started_s = max(arrived_s, self._free_at_s)
        self._free_at_s = started_s + work_s
        return started_s, self._free_at_s


EARLY_S = 150e-6
"""How much before the moment to wake up: an idle machine takes so long, and what is left is waited out."""


class Alarm:
    """Calls back at a moment on the clock of `time.monotonic`, to a few us where the system has timerfd.

    Timers of event loops are rounded to milliseconds, which those of a mock stage must not be.
    """

    def __init__(self) -> None:
        """Belongs to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[], None] | None = None
        self._moment_s = 0.0
        self._timer = _TimerFd() if sys.platform == "linux" else None
        if self._timer is not None:
            self._loop.add_reader(self._timer.fd, self._ring)

    def set(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Calls back once, at once if the moment has passed. Forgets what was set before."""
        self._callback, self._moment_s = callback, moment_s
        remaining_s = moment_s - time.monotonic()
        if remaining_s <= EARLY_S:
            self._go_off(callback)
        elif self._timer is not None:
            self._timer.set(moment_s - EARLY_S)
        else:
            self._loop.call_later(remaining_s, self._go_off, callback)

    def close(self) -> None:
        """Nobody is called any more; harmless twice."""
        self._callback = None
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fd)
            self._timer.close()
            self._timer = None

    def _ring(self) -> None:
        if self._timer is not None and self._timer.has_gone_off() and self._callback is not None:
            self._go_off(self._callback)

    def _go_off(self, callback: Callable[[], None]) -> None:
        if callback is not self._callback:
            return
        self._callback = None
        while time.monotonic() < self._moment_s:
            pass
        callback()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _TimerFd:
    """Linux timerfd, which Python has from 3.13 on. Source: timerfd_create(2)."""

    _NONBLOCK = os.O_NONBLOCK
    _CLOEXEC = os.O_CLOEXEC
    _ABSOLUTE = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, self._NONBLOCK | self._CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, moment_s: float) -> None:
        seconds = int(moment_s)
        value = _TimeSpec(seconds, int((moment_s - seconds) * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        if self._libc.timerfd_settime(self.fd, self._ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def has_gone_off(self) -> bool:
        """Since it was set; says so once."""
        try:
            return len(os.read(self.fd, 8)) == 8
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)
