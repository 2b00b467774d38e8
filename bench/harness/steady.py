"""Steps per second of a pipeline under constant load."""

from __future__ import annotations

import time

from bench.harness.cluster import BenchCluster
from bench.harness.running import running_streams
from bench.harness.step_log import SteadyRate, steady_rate
from bench.harness.streams import Window

PROMPT_TOKENS = 16
ENDLESS = 8000
"""Tokens: more than any window needs."""


async def measure_steady(
    cluster: BenchCluster, *, num_streams: int, settle_s: float, window_s: float
) -> tuple[SteadyRate, Window]:
    """Measure the rate in a window that begins `settle_s` after the last stream's second token.

    This excludes filling and draining of the pipeline; no stream ends before.
    """
    async with running_streams(
        cluster, num_streams, prompt_tokens=PROMPT_TOKENS, max_tokens=ENDLESS
    ) as running:
        await running.until(lambda streams: all(len(stream.arrivals_s) >= 2 for stream in streams))
        await running.go_on_for(settle_s)
        begin_s = time.monotonic()
        await running.go_on_for(window_s)
        window = Window(begin_s, time.monotonic())
    return steady_rate(cluster.steps(), window.begin_s, window.end_s), window
