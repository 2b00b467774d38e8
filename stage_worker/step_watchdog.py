"""Notices a step that never ends, once nobody waits for it any more."""

import asyncio
from collections.abc import Callable
from typing import Any


class StepWatchdog:
    """A step that still computes `timeout_s` after the coordinator has given it up is hung.

    How long a step may take is for the coordinator to say, which knows what each computes. Belongs to the
    event loop.
    """

    def __init__(self, timeout_s: float, on_hung: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hung = on_hung
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, all_ended: "asyncio.Future[Any]") -> None:
        """`all_ended` is done as soon as the steps before it have ended. Time counts from the first call that
        is not answered yet.
        """
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._report)
        all_ended.add_done_callback(self._ended)

    def close(self) -> None:
        """Reports nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ended(self, _: "asyncio.Future[Any]") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        self._on_hung(f"a step still computes {self._timeout_s:g} s after it was given up (--step-timeout)")
