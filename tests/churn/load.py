"""Requests of all kinds at a constant rate, independent of earlier requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from stageline import Client, StagelineError
from tests.churn.requests import KINDS, Kind, Target

STUCK_S = 60.0
OWN_CONNECTION_SHARE = 0.05
"""Requests that come over a connection of their own."""


class Churn:
    """`problems` has an entry for every request with an unexpected end."""

    def __init__(self, address: str, dashboard_url: str, *, rate: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._address = address
        self._dashboard_url = dashboard_url
        self._interval_s = 1 / rate
        self._generator = random.Random(seed)
        self._live: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Sends for this time, then waits for requests in flight."""
        loop = asyncio.get_running_loop()
        next_s, end_s = loop.time(), loop.time() + seconds
        async with Client(self._address) as client:
            while next_s < end_s:
                self._begin(client)
                next_s += self._interval_s
                # After a stall, overdue requests are sent at twice the rate and not all at once.
                await asyncio.sleep(max(next_s - loop.time(), self._interval_s / 2))
            await self._all_ended()

    async def _all_ended(self) -> None:
        if self._live:
            await asyncio.wait(self._live)

    def _begin(self, client: Client) -> None:
        [kind] = self._generator.choices(KINDS, [kind.weight for kind in KINDS])
        generator = random.Random(self._generator.random())
        self.counts[kind.name] += 1
        task = asyncio.create_task(self._run(kind, client, generator))
        self._live.add(task)
        task.add_done_callback(self._live.discard)

    async def _run(self, kind: Kind, client: Client, generator: random.Random) -> None:
        try:
            async with asyncio.timeout(STUCK_S):
                if generator.random() < OWN_CONNECTION_SHARE:
                    async with Client(self._address) as own:
                        await kind.run(Target(own, self._dashboard_url), generator)
                else:
                    await kind.run(Target(client, self._dashboard_url), generator)
        except (AssertionError, StagelineError, TimeoutError) as error:
            self.problems.append(f"{kind.name}: {type(error).__name__}: {error}")
