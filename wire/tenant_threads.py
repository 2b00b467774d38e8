"""Threads for slow work of requests, which tenants use in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


class TenantThreads:
    """Runs work on threads. Each tenant has a queue, and tenants with waiting work take turns.

    `per_tenant` below the number of threads leaves a thread to the others, however long one's work takes.
    For one event loop.
    """

    def __init__(self, num_threads: int, *, per_tenant: int, name: str) -> None:
        """`per_tenant` is the most that runs for one tenant at a time."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_idle, self._per_tenant = num_threads, per_tenant
        self._num_running = Counter[str]()
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        """Turns of tenants with waiting work."""
        self._last_turns: dict[str, int] = {}
        """Numbers of the last turns of tenants with work; arrival counts as one."""
        self._num_turns = 0

    async def run(self, tenant: str, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Run `function` when it is the tenant's turn. Cancellation does not interrupt what runs already."""
        await self._turn(tenant)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, function, *arguments)
        running.add_done_callback(partial(self._end, tenant))
        return await asyncio.shield(running)

    def close(self) -> None:
        """End the threads once they are idle, and cancel what waits."""
        queues, self._queues = self._queues, {}
        for turn in (turn for queue in queues.values() for turn in queue):
            turn.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        """Wait for a thread, and take it."""
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        self._last_turns.setdefault(tenant, self._num_turns)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant)
            elif tenant in self._queues:
                self._take(tenant, turn)
            self._forget_idle(tenant)
            raise

    def _give_turns(self) -> None:
        while self._num_idle and (tenant := self._next_tenant()) is not None:
            turn = self._queues[tenant][0]
            self._take(tenant, turn)
            self._num_turns += 1
            self._last_turns[tenant] = self._num_turns + 1  # behind those who come before the next turn
            self._num_idle -= 1
            self._num_running[tenant] += 1
            turn.set_result(None)

    def _next_tenant(self) -> str | None:
        """The tenant whose last turn is the longest ago."""
        able = [tenant for tenant in self._queues if self._num_running[tenant] < self._per_tenant]
        return min(able, key=self._last_turns.__getitem__, default=None)

    def _take(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues[tenant]
        queue.remove(turn)
        if not queue:
            del self._queues[tenant]

    def _end(self, tenant: str, running: asyncio.Future[object]) -> None:
        if not running.cancelled():
            running.exception()  # retrieved here, too: nobody waits for work whose caller was cancelled
        self._release(tenant)

    def _release(self, tenant: str) -> None:
        self._num_idle += 1
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        self._forget_idle(tenant)
        self._give_turns()

    def _forget_idle(self, tenant: str) -> None:
        if tenant not in self._queues and not self._num_running[tenant]:
            self._last_turns.pop(tenant, None)
