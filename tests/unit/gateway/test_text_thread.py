"""Tenants take turns on the text thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from gateway.text_thread import TURN_S, TextThread

DEADLINE_S = 60


@pytest.fixture
def thread() -> Iterator[TextThread]:
    made = TextThread()
    yield made
    made.close()


async def test_work_of_one_tenant_keeps_its_order(thread: TextThread) -> None:
    done: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(thread.of("a").run(partial(done.append, number)) for number in range(100)))
    assert done == list(range(100))


async def test_tenants_take_turns_within_what_is_handed_over(thread: TextThread) -> None:
    done: list[str] = []
    works = [
        thread.of(name[0]).run(partial(done.append, name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*works)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_tenant_waits_for_one_slow_work_of_another_and_not_for_all(thread: TextThread) -> None:
    began, release, done = threading.Event(), threading.Event(), list[str]()

    def slow(name: str) -> None:
        began.set()
        assert release.wait(DEADLINE_S)
        threading.Event().wait(2 * TURN_S)
        done.append(name)

    async with asyncio.timeout(DEADLINE_S):
        flood = [thread.of("flood").run(partial(slow, f"flood{number}")) for number in range(20)]
        await asyncio.to_thread(began.wait, DEADLINE_S)
        quiet = thread.of("quiet").run(partial(done.append, "quiet"))
        release.set()
        await quiet
        assert done.index("quiet") <= 2
        await asyncio.gather(*flood)
    assert len(done) == 21


async def test_an_error_is_that_of_its_work(thread: TextThread) -> None:
    failed, good = thread.of("a").run(partial(int, "x")), thread.of("a").run(partial(int, "1"))
    async with asyncio.timeout(DEADLINE_S):
        assert await good == 1
        with pytest.raises(ValueError, match="invalid literal"):
            await failed
