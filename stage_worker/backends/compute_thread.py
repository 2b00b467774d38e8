"""The compute thread, and the watchdog for hung steps."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

log = logging.getLogger(__name__)


class StepWatchdog:
    """Reports a step that still computes `timeout_s` after the coordinator has given it up."""

    def __init__(self, timeout_s: float, on_hung: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hung = on_hung
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, all_ended: "asyncio.Future[Any]") -> None:
        """Watch a future for all current steps; the timeout counts from the oldest unfinished.

        An error of the future is reported at once.
        """
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._report)
        all_ended.add_done_callback(self._ended)

    def close(self) -> None:
        """Stop reporting."""
        if self._timer is not None:
            self._timer.cancel()

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not future.cancelled() and (error := future.exception()) is not None:
            self._on_hung(str(error))

    def _report(self) -> None:
        self._on_hung(f"a step still computes {self._timeout_s:g} s after it was given up (--step-timeout)")


P = ParamSpec("P")
T = TypeVar("T")


class FutureResult(Generic[T]):
    """A future of an event loop that another thread settles."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    def set(self, result: T) -> None:
        self._settle(self.future.set_result, result)

    def set_error(self, error: BaseException) -> None:
        self._settle(self.future.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(self._settle_now, settle, value)
        except RuntimeError:
            log.debug("the event loop ended before a computation did")

    def _settle_now(self, settle: Callable[[Any], None], value: Any) -> None:
        if not self.future.cancelled():
            settle(value)


@dataclass(slots=True)
class _Job(Generic[T]):
    work: Callable[[], T]
    result: FutureResult[T]

    def run(self) -> None:
        if self.result.future.cancelled():
            return
        try:
            found = self.work()
        except BaseException as error:
            self.result.set_error(error)
            # The error's frames reference this job: with its result they would reference the error, and keep
            # what they hold (memory of a hop, a model) until a garbage collection.
            del self.result
        else:
            self.result.set(found)


class ComputeThread:
    """Owner of a stage's model, pages, pool and sequences; a daemon, so that a process can exit in a load."""

    def __init__(self, *, on_start: Callable[[], None] = lambda: None, name: str = "stage-compute") -> None:
        """`on_start` runs first on the thread."""
        self._on_start = on_start
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Run `function` after everything submitted before; cancellation before its start skips it."""
        result: FutureResult[T] = FutureResult(asyncio.get_running_loop())
        self._jobs.put(_Job(partial(function, *args, **kwargs), result).run)
        return result.future

    def post(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Like `submit`, for a function that raises nothing."""
        self._jobs.put(partial(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.submit(function, *args, **kwargs)

    def join(self, *, timeout_s: float) -> bool:
        """Wait, on another thread, until everything submitted before has run; False after `timeout_s`."""
        has_run = threading.Event()
        self.post(has_run.set)
        return has_run.wait(timeout_s)

    def stop(self, *, timeout_s: float) -> bool:
        """Stop the thread after its current job; returns False if it is still busy after `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._on_start()
        while (job := self._jobs.get()) is not None:
            job()
            # The next job may be minutes away; release what this one references (a model) now.
            del job
