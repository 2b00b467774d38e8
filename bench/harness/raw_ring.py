"""A ring of raw grpc.aio streams: its laps and rates bound a pipeline of stages from below."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from bench.harness.peer import Peer
from bench.harness.ring_message import Lap, Place
from bench.harness.ring_node import Next, serve


class RawRing:
    """A ring of this process and one peer per stage."""

    def __init__(self, num_stages: int, *, pause_s: float = 0.0) -> None:
        """Each node holds each message for `pause_s`, which laps do not include."""
        self._num_stages = num_stages
        self._pause_s = pause_s
        self._exit = AsyncExitStack()
        self._returned: asyncio.Queue[bytes] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            server, address = await serve(self._returned.put)
            stack.push_async_callback(server.stop, 0)
            for stage in reversed(range(self._num_stages)):
                peer = Peer(
                    "bench.harness.ring_node", address, _place(stage, self._num_stages), str(self._pause_s)
                )
                await stack.enter_async_context(peer)
                address = (await peer.ask({}))["address"]
            self._first = Next(address)
            stack.push_async_callback(self._first.close)
            await self._first.open()
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(exception_type, exception, traceback)

    async def lap(self, lap: Lap, *, num_laps: int = 200) -> float:
        """Median seconds from writing to FIRST until the result arrives, one message in flight."""
        message, laps_s = lap.message(), []
        for _ in range(num_laps if lap.hidden_bytes < 1 << 19 else num_laps // 5):
            started_s = time.monotonic()
            await self._first.write(message)
            await self._returned.get()
            laps_s.append(time.monotonic() - started_s)
        return statistics.median(laps_s) - self._num_stages * self._pause_s

    async def rate(self, lap: Lap, *, settle_s: float, window_s: float) -> float:
        """Messages per second, as many in flight as nodes, in a window that begins after `settle_s`."""
        message, returned_s = lap.message(), []
        for _ in range(self._num_stages):
            await self._first.write(message)
        begin_s = time.monotonic() + settle_s
        while time.monotonic() < begin_s + window_s:
            await self._returned.get()
            returned_s.append(time.monotonic())
            await self._first.write(message)
        for _ in range(self._num_stages):
            await self._returned.get()
        within_s = [moment_s for moment_s in returned_s if moment_s >= begin_s]
        return (len(within_s) - 1) / (within_s[-1] - within_s[0])


def _place(stage: int, num_stages: int) -> Place:
    if stage == 0:
        return Place.FIRST
    return Place.LAST if stage == num_stages - 1 else Place.MIDDLE
