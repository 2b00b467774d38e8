"""A plugin of pytest: what a test waits for that does not end.

After `faulthandler_timeout` pytest prints the stacks of all threads and ends the process, which fails the
test. The stack of an event loop does not show what its tasks wait for: this prints their stacks before.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Call `print_tasks` shortly before the end, also for fixtures."""
    stderr = os.dup(item.config.stash[fault_handler_stderr_fd_key])

    def print_tasks(number: int, frame: FrameType | None) -> None:
        with os.fdopen(os.dup(stderr), "w") as output:
            output.write(f"\n{item.nodeid} has not ended\n")
            for task in asyncio.all_tasks() if asyncio._get_running_loop() else ():
                output.writelines((f"{task.get_name()}:\n", *_stack(task.get_coro())))

    signal.signal(signal.SIGALRM, print_tasks)
    signal.setitimer(signal.ITIMER_REAL, 0.9 * float(item.config.getini("faulthandler_timeout")))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(stderr)


def _stack(awaited: Any) -> Iterator[str]:
    """From the coroutine of a task to what it awaits; the stack of a task has the first one only."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}\n"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
