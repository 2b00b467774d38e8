"""Text work on one thread beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class TextThread:
    """Runs functions in order, and hands over everything that waits at once.

    A hand-over wakes the thread and then the event loop, which costs more than the text of one token. So the
    work of all streams that received tokens from one step travels together.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._waiting: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []
        self._is_busy = False

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return the future result of `work`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append((future, work))
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._hand_over, loop)
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._executor.submit(self._run_batch, loop, batch)

    def _run_batch(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Future[Any], Callable[[], Any]]]
    ) -> None:
        results = [(future, *_outcome(work)) for future, work in batch]
        loop.call_soon_threadsafe(self._deliver, loop, results)

    def _deliver(
        self,
        loop: asyncio.AbstractEventLoop,
        results: list[tuple[asyncio.Future[Any], Any, Exception | None]],
    ) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._hand_over(loop)
        for future, result, error in results:
            if future.done():  # its reader was cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
