"""Runs small requests of a source in threads, and ends them all when one fails or the caller is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")

CHECK_S = 0.2
"""Time between two looks at cancellation, and between two aborts of what still runs."""


def no_check() -> None:
    """The `check` of requests that are not cancelled."""


def run_requests(
    requests: Iterable[Callable[[threading.Event], T]],
    *,
    num_threads: int,
    name: str,
    abort: Callable[[], None],
    check: Callable[[], None] = no_check,
) -> list[T]:
    """Results in the order of `requests`; raises what the first of them raises that fails.

    A request gets an event that is set when it must end. `abort` ends the requests that wait for a server.
    `check` is called several times a second by this thread; its exceptions end all requests.
    """
    running = _Running()
    futures: list[Future[T]] = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            futures.extend(pool.submit(running.run, request) for request in requests)
            _wait(futures, check)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            running.end(abort)
    return [future.result() for future in futures]


class _Running:
    """Requests that run, whoever knows of their futures: Ctrl-C may come while one is submitted."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._number = 0

    def run(self, request: Callable[[threading.Event], T]) -> T:
        """The result of `request`. Raises CancelledError after the end."""
        with self._changed:
            if self._ending.is_set():
                raise CancelledError
            self._number += 1
        try:
            return request(self._ending)
        finally:
            with self._changed:
                self._number -= 1
                self._changed.notify_all()

    def end(self, abort: Callable[[], None]) -> None:
        """Begin no further request, and abort what runs until all have ended."""
        with self._changed:
            self._ending.set()
        while self._number:
            abort()
            with self._changed:
                if self._number:
                    self._changed.wait(CHECK_S)


def _wait(futures: Sequence[Future[Any]], check: Callable[[], None]) -> None:
    left = set(futures)
    while left:
        done, left = wait(left, CHECK_S, FIRST_COMPLETED)
        for future in futures:
            if future in done:
                future.result()
        check()
