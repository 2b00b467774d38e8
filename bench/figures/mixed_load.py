"""Time between tokens of running streams, with and without arrivals of long prompts."""

from __future__ import annotations

import asyncio
import time

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.real_cluster import PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.running import RunningStreams, running_streams
from bench.harness.spread import percentile

NUM_STREAMS = 8
MOST_NEW_TOKENS = 3800
LONG_PROMPT_TOKENS = 1024
ARRIVALS_EVERY = 3.0
"""Interval of arrivals in times of one long prompt on the idle cluster: about a quarter of the prefill
capacity.
"""
MOST_P99_OF_P50 = 2.5
MOST_P50_OF_QUIET = 1.5


async def measure(setting: Setting) -> list[Figure]:
    """Eight streams decode all the time: first alone, then while prompts of 1,024 tokens arrive."""
    async with real_cluster(setting) as cluster:
        await warm_up(cluster)
        await cluster.generate(LONG_PROMPT_TOKENS, 1)
        interval_s = ARRIVALS_EVERY * (await cluster.generate(LONG_PROMPT_TOKENS, 1)).first_token_s
        setting.say(f"one prompt of {LONG_PROMPT_TOKENS} tokens every {interval_s:.2f} s")
        async with running_streams(
            cluster, NUM_STREAMS, prompt_tokens=PROMPT_TOKENS, max_tokens=MOST_NEW_TOKENS
        ) as running:
            phases = await _phases(cluster, running, interval_s, setting.rounds(8, 3))
    return _figures(*phases, interval_s=interval_s)


def _figures(
    quiet: list[float], busy: list[float], first_tokens: list[float], *, interval_s: float
) -> list[Figure]:
    quiet_p50, busy_p50, busy_p99 = (
        percentile(quiet, 0.5) * 1e3,
        percentile(busy, 0.5) * 1e3,
        percentile(busy, 0.99) * 1e3,
    )
    details = {
        "quiet_p50_ms": quiet_p50,
        "quiet_p99_ms": percentile(quiet, 0.99) * 1e3,
        "busy_max_ms": max(busy) * 1e3,
        "arrivals": float(len(first_tokens)),
        "arrivals_interval_ms": interval_s * 1e3,
        "arrivals_ttft_p50_ms": percentile(first_tokens, 0.5) * 1e3,
    }
    return [
        Figure(
            name="inter-token latency with arrivals, p99 : p50",
            measured=busy_p99,
            bound=busy_p50,
            unit="ms",
            better=Better.LOWER,
            target=MOST_P99_OF_P50,
            noise=0.2,
            how="gaps of 8 decoding streams while 1,024-token prompts use a quarter of the prefill capacity",
            details=details,
        ),
        Figure(
            name="inter-token latency, p50 with arrivals : without",
            measured=busy_p50,
            bound=quiet_p50,
            unit="ms",
            better=Better.LOWER,
            target=MOST_P50_OF_QUIET,
            noise=0.2,
            how="the same streams, before the first arrival",
        ),
    ]


async def _phases(
    cluster: BenchCluster, running: RunningStreams, interval_s: float, num_arrivals: int
) -> tuple[list[float], list[float], list[float]]:
    """Gaps without arrivals, gaps with arrivals, and the arrivals' times to their first tokens."""
    await running.until(lambda streams: all(len(stream.arrivals_s) > 8 for stream in streams))
    quiet_s = time.monotonic()
    await running.go_on_for(max(3.0, 4 * interval_s))
    busy_s = time.monotonic()
    arrivals = []
    for _ in range(num_arrivals):
        arrivals.append(asyncio.create_task(cluster.generate(LONG_PROMPT_TOKENS, 4)))
        await running.go_on_for(interval_s)
    end_s = time.monotonic()
    ended = await asyncio.gather(*arrivals)
    quiet = [gap for stream in running.streams for gap in stream.gaps_s(quiet_s, busy_s)]
    busy = [gap for stream in running.streams for gap in stream.gaps_s(busy_s, end_s)]
    return quiet, busy, [stream.first_token_s for stream in ended]
