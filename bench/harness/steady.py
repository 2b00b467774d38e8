"""Steps per second of a pipeline that always has enough to do."""

from __future__ import annotations

import time

from bench.harness.cluster import BenchCluster
from bench.harness.running import running_streams
from bench.harness.step_log import SteadyRate, steady_rate
from bench.harness.streams import Window

PROMPT_TOKENS = 16
ENDLESS = 8000
"""Tokens: more than any window is long."""


async def measure_steady(
    cluster: BenchCluster, *, num_streams: int, settle_s: float, window_s: float
) -> tuple[SteadyRate, Window]:
    """The rate in a window that begins `settle_s` after the last stream's second token, so that neither the
    filling of the pipeline nor its emptying is in it. No stream ends before.
    """
    async with running_streams(
        cluster, num_streams, prompt_tokens=PROMPT_TOKENS, max_tokens=ENDLESS
    ) as running:
        await running.until(lambda streams: all(len(each.arrivals_s) >= 2 for each in streams))
        await running.go_on_for(settle_s)
        begin_s = time.monotonic()
        await running.go_on_for(window_s)
        window = Window(begin_s, time.monotonic())
    return steady_rate(cluster.steps(), window.begin_s, window.end_s), window
