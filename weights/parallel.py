"""Runs small requests of a source in threads, and ends them all when one fails or the caller is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
    ending = threading.Event()
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        futures = [pool.submit(request, ending) for request in requests]
        try:
            _wait(futures, check)
        finally:
            ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while running := [future for future in futures if not future.done()]:
                abort()
                wait(running, CHECK_S)
    return [future.result() for future in futures]


def _wait(futures: Sequence[Future[Any]], check: Callable[[], None]) -> None:
    left = set(futures)
    while left:
        done, left = wait(left, CHECK_S, FIRST_COMPLETED)
        for future in futures:
            if future in done:
                future.result()
        check()
