"""Requests in threads end together, also those that no thread has begun."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from weights.errors import RequestAborted, SourceChanged
from weights.parallel import run_requests


class Server:
    """Requests that wait until they are aborted, and count."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.waiting = threading.Event()
        self.num_begun = 0

    def wait(self, ending: threading.Event) -> None:
        self.num_begun += 1
        self.waiting.set()
        assert self.aborted.wait(20)
        raise RequestAborted


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights-test")]


def test_results_are_in_order() -> None:
    def request(number: int, ending: threading.Event) -> int:
        time.sleep(0.01 * (5 - number))
        return number

    calls = [functools.partial(request, number) for number in range(5)]
    assert run_requests(calls, num_threads=3, name="weights-test", abort=lambda: None) == [0, 1, 2, 3, 4]


def test_a_failure_ends_requests_that_wait_and_those_in_the_queue() -> None:
    server = Server()

    def fail(ending: threading.Event) -> None:
        assert server.waiting.wait(20)
        raise SourceChanged("other bytes")

    begin_s = time.monotonic()
    with pytest.raises(SourceChanged, match="other bytes"):
        run_requests(
            [*[server.wait] * 2, fail, *[server.wait] * 9],
            num_threads=3,
            name="weights-test",
            abort=server.aborted.set,
        )
    assert time.monotonic() - begin_s < 10.0 and server.num_begun < 11
    assert not threads()


def test_an_exception_of_the_check_ends_all_requests() -> None:
    server = Server()
    ended: list[bool] = []

    def end(ending: threading.Event) -> None:
        ended.append(ending.wait(20))

    def check() -> None:
        if server.waiting.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_requests(
            [end, *[server.wait] * 9],
            num_threads=3,
            name="weights-test",
            abort=server.aborted.set,
            check=check,
        )
    assert ended == [True] and not threads()
