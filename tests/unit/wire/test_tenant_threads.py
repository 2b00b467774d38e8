"""Threads that tenants use in turn: whoever has much to do holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from wire.tenant_threads import TenantThreads

DEADLINE_S = 20.0


class Gates:
    """Work that runs until it is let go, and the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._are_open = False
        self._lock = threading.Lock()

    def work(self, name: str) -> str:
        with self._lock:
            self.begun.append(name)
            gate = self._gates.setdefault(name, threading.Event())
            if self._are_open:
                gate.set()
        assert gate.wait(DEADLINE_S)
        return name

    def open(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._gates.setdefault(name, threading.Event()).set()

    def open_all(self) -> None:
        """Those of later work, too."""
        with self._lock:
            self._are_open = True
            for gate in self._gates.values():
                gate.set()

    async def until_begun(self, count: int) -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.begun) < count:
                await asyncio.sleep(0.001)
        return self.begun


@asynccontextmanager
async def threads(number: int, *, per_tenant: int) -> AsyncIterator[TenantThreads]:
    made = TenantThreads(number, per_tenant=per_tenant, name="test")
    try:
        yield made
    finally:
        made.close()


@contextmanager
def opened(gates: Gates, *names: str) -> Iterator[None]:
    try:
        yield
    finally:
        gates.open(*names)


def begin(pool: TenantThreads, gates: Gates, *names: str) -> list[asyncio.Task[str]]:
    """Begin work whose tenant is the first letter of its name."""
    return [asyncio.create_task(pool.run(name[0], gates.work, name)) for name in names]


async def test_one_tenant_never_takes_the_last_thread() -> None:
    gates, flood = Gates(), [f"a{number}" for number in range(20)]
    async with threads(3, per_tenant=2) as pool:
        with opened(gates, *flood, "b0"):
            tasks = begin(pool, gates, *flood)
            await gates.until_begun(2)
            [other] = begin(pool, gates, "b0")
            gates.open("b0")
            assert await asyncio.wait_for(other, DEADLINE_S) == "b0"
            assert gates.begun == ["a0", "a1", "b0"]
        assert await asyncio.gather(*tasks) == flood


async def test_tenants_take_turns_in_the_order_in_which_they_came() -> None:
    gates = Gates()
    names = ("a0", "a1", "a2", "b0", "b1", "c0")
    async with threads(1, per_tenant=1) as pool:
        with opened(gates, *names):
            tasks = begin(pool, gates, *names)
            for count, name in enumerate(("a0", "b0", "c0", "a1", "b1", "a2"), 1):
                assert (await gates.until_begun(count))[-1] == name
                gates.open(name)
            await asyncio.gather(*tasks)


async def test_a_queue_has_its_turns_among_more_tenants_than_threads() -> None:
    """All others come back with one piece of work at a time."""
    gates, flood, others, num_threads = Gates(), [f"q{number}" for number in range(20)], "abcdefgh", 4
    async with threads(num_threads, per_tenant=1) as pool:
        queued, is_over = begin(pool, gates, *flood), asyncio.Event()

        async def come_back(tenant: str) -> None:
            number = 0
            while not is_over.is_set():
                await pool.run(tenant, gates.work, f"{tenant}{number}")
                number += 1

        back = [asyncio.create_task(come_back(tenant)) for tenant in others]
        num_opened, most = 0, len(flood) * (len(others) + num_threads)
        while not set(flood) <= set(gates.begun) and num_opened < most:
            begun = list(await gates.until_begun(num_opened + num_threads))
            gates.open(*begun[num_opened:])
            num_opened = len(begun)
        num_begun = len(set(flood) & set(gates.begun))
        is_over.set()
        gates.open_all()
        await asyncio.gather(*back, *queued)
    assert num_begun == len(flood)


async def test_a_thread_is_taken_until_the_work_of_a_cancelled_caller_ends() -> None:
    gates = Gates()
    async with threads(1, per_tenant=1) as pool:
        with opened(gates, "a0", "b0"):
            [first] = begin(pool, gates, "a0")
            await gates.until_begun(1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            [second] = begin(pool, gates, "b0")
            await asyncio.sleep(0)
            assert gates.begun == ["a0"]
            gates.open("a0", "b0")
            assert await asyncio.wait_for(second, DEADLINE_S) == "b0"


async def test_a_caller_that_is_cancelled_while_it_waits_leaves_no_turn_behind() -> None:
    gates = Gates()
    async with threads(1, per_tenant=1) as pool:
        with opened(gates, "a0", "b0"):
            tasks = begin(pool, gates, "a0", "a1", "b0")
            await gates.until_begun(1)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            gates.open("a0", "b0")
            assert await asyncio.wait_for(tasks[2], DEADLINE_S) == "b0"
            assert gates.begun == ["a0", "b0"]
        await tasks[0]
        for left in (pool._queues, pool._num_running, pool._last_turns):
            assert not left


async def test_a_tenant_whose_only_work_is_cancelled_while_it_waits_is_forgotten() -> None:
    gates = Gates()
    async with threads(1, per_tenant=1) as pool:
        with opened(gates, "a0"):
            tasks = begin(pool, gates, "a0", "b0")
            await gates.until_begun(1)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            assert list(pool._last_turns) == ["a"]
        await tasks[0]


async def test_an_error_is_the_callers_and_frees_the_thread() -> None:
    async with threads(1, per_tenant=1) as pool:
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run("a", int, "x")
        assert await pool.run("a", int, "7") == 7


async def test_work_that_waits_is_cancelled_when_the_threads_close() -> None:
    gates = Gates()
    async with threads(1, per_tenant=1) as pool:
        with opened(gates, "a0"):
            tasks = begin(pool, gates, "a0", "b0")
            await gates.until_begun(1)
            pool.close()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
        assert await tasks[0] == "a0"
