"""Streams that run during a measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bench.harness.cluster import BenchCluster
from bench.harness.figure import NotMeasured
from bench.harness.streams import Stream

_POLL_S = 0.02


class RunningStreams:
    """Running requests, and the arrivals of their tokens."""

    def __init__(
        self, cluster: BenchCluster, calls: list[asyncio.Task[Stream]], streams: list[Stream]
    ) -> None:
        self._cluster, self._calls = cluster, calls
        self.streams = streams

    async def until(self, holds: Callable[[list[Stream]], bool]) -> None:
        """Wait until `holds`. Raises NotMeasured if a stream ends before, ClusterFailed with the cluster."""

        async def poll() -> None:
            while not holds(self.streams):
                self._check()
                await asyncio.sleep(_POLL_S)

        await self._cluster.processes.while_running(poll())

    async def go_on_for(self, seconds: float) -> None:
        """Wait for `duration_s`. Raises as `until` does."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        await self.until(lambda streams: loop.time() >= end_s)

    def _check(self) -> None:
        for call in self._calls:
            if call.done():
                raise NotMeasured(f"a stream ended during the measurement: {call.exception()!r}")


@asynccontextmanager
async def running_streams(
    cluster: BenchCluster, num_streams: int, *, prompt_tokens: int, max_tokens: int
) -> AsyncIterator[RunningStreams]:
    """Run concurrent requests and cancel them at the end; `max_tokens` exceeds the measurement."""
    streams = [Stream(0.0) for _ in range(num_streams)]
    calls = [
        asyncio.create_task(cluster.generate(prompt_tokens, max_tokens, into=stream)) for stream in streams
    ]
    try:
        yield RunningStreams(cluster, calls, streams)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
