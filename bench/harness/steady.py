"""Steps per second of a pipeline that always has enough to do."""

from __future__ import annotations

import asyncio
import time

from bench.harness.cluster import BenchCluster
from bench.harness.step_log import SteadyRate, steady_rate
from bench.harness.streams import Stream, Window

PROMPT_TOKENS = 16
ENDLESS = 8000
"""Tokens: more than any window is long."""

POLL_S = 0.05


async def measure_steady(
    cluster: BenchCluster, *, num_streams: int, settle_s: float, window_s: float
) -> tuple[SteadyRate, Window]:
    """The rate in a window that begins `settle_s` after the last stream's second token, so that neither the
    filling of the pipeline nor its emptying is in it. No stream ends before.
    """
    streams = [Stream(0.0) for _ in range(num_streams)]
    calls = [asyncio.create_task(_run(cluster, stream)) for stream in streams]
    try:
        window = await cluster.processes.while_running(_window(streams, settle_s, window_s))
        failed = [call for call in calls if call.done()]
        if failed:
            raise RuntimeError(f"{len(failed)} of {num_streams} streams ended: {failed[0].exception()!r}")
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return steady_rate(cluster.steps(), window.begin_s, window.end_s), window


async def _run(cluster: BenchCluster, stream: Stream) -> None:
    await cluster.generate(PROMPT_TOKENS, ENDLESS, into=stream)


async def _window(streams: list[Stream], settle_s: float, window_s: float) -> Window:
    while not all(len(stream.arrivals_s) >= 2 for stream in streams):
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(settle_s)
    begin_s = time.monotonic()
    await asyncio.sleep(window_s)
    return Window(begin_s, time.monotonic())
