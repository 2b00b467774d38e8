"""Text work on one thread beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")
Work = Callable[[], Any]
_Outcome = tuple["TextJob", Any, Exception | None]


class TextJob(Protocol):
    """Something with work for the thread, now and then."""

    def begin(self) -> Work | None:
        """Return what is to be done now, if anything; called on the event loop."""

    def end(self, result: Any, error: Exception | None) -> None:
        """Take the result of that work; called on the event loop."""


class TextThread:
    """Runs work in order, and hands over everything that waits at once.

    A hand-over wakes the thread and then the event loop, which costs more than the text of one token. So the
    work of all streams that received tokens from one step travels together.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._waiting: dict[TextJob, None] = {}
        self._is_busy = False

    def add(self, job: TextJob) -> None:
        """Begin `job` soon; no effect while it waits for that."""
        self._waiting[job] = None
        if not self._is_busy:
            self._is_busy = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._hand_over, loop)

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return the future result of `work`."""
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self.add(_SingleWork(future, work))
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, {}
        batch = [(job, work) for job in waiting if (work := job.begin()) is not None]
        if batch:
            self._executor.submit(self._run_batch, loop, batch)
        else:
            self._is_busy = False

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[TextJob, Work]]) -> None:
        outcomes = [(job, *_outcome(work)) for job, work in batch]
        loop.call_soon_threadsafe(self._deliver, loop, outcomes)

    def _deliver(self, loop: asyncio.AbstractEventLoop, outcomes: list[_Outcome]) -> None:
        if self._waiting:
            self._hand_over(loop)
        else:
            self._is_busy = False
        for job, result, error in outcomes:
            job.end(result, error)


class _SingleWork:
    """Work whose result a future has."""

    def __init__(self, future: asyncio.Future[Any], work: Work) -> None:
        self._future, self._work = future, work

    def begin(self) -> Work:
        return self._work

    def end(self, result: Any, error: Exception | None) -> None:
        if self._future.done():  # its reader was cancelled
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)


def _outcome(work: Work) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
