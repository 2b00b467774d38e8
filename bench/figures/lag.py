"""How late the coordinator's event loop is with many text streams, and whether 2,000 streams complete."""

from __future__ import annotations

import time

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, NotMeasured
from bench.harness.group import Setting
from bench.harness.mock_cluster import text_cluster
from bench.harness.running import running_streams
from bench.harness.spread import percentile

NUM_STAGES, STAGE_MS = 4, 20
NUM_STREAMS = 64
PROMPT_WORDS = 16
MOST_NEW_TOKENS = 1800
"""Longer than the window; the built-in model has 2,048 positions."""
SETTLE_S = 2.0
MEDIAN_MS, P99_MS = 1.0, 5.0
NUM_MANY, MANY_TOKENS = 2000, 16


async def measure(setting: Setting) -> list[Figure]:
    """Lag in steady decode of 64 text streams, then 2,000 streams at once."""
    window_s = 2.0 if setting.is_quick else 20.0
    num_many = 100 if setting.is_quick else NUM_MANY
    arguments = ("--queue-size", str(NUM_MANY))
    spec = f"step={STAGE_MS}ms"
    async with text_cluster(NUM_STAGES, spec, coordinator_arguments=arguments, probes_loop=True) as cluster:
        lags_ms = await _lags_ms(cluster, window_s)
        setting.say(f"{len(lags_ms)} timers, median {percentile(lags_ms, 0.5):.2f} ms late")
        many_s, num_complete = await _many(cluster, num_many)
    return [
        _lag("median", percentile(lags_ms, 0.5), MEDIAN_MS, lags_ms),
        _lag("p99", percentile(lags_ms, 0.99), P99_MS, lags_ms),
        Figure(
            name=f"lag, {num_many:,} text streams at once that complete : all",
            measured=max(0.5, num_complete),
            bound=num_many,
            unit="streams",
            target=1.0,
            limit=1.0,
            noise=0.0,
            how=f"requests of {PROMPT_WORDS} words and {MANY_TOKENS} new tokens, sent at once by one client",
            details={"took_s": many_s, "tokens_per_s": num_complete * MANY_TOKENS / many_s},
        ),
    ]


async def _lags_ms(cluster: BenchCluster, window_s: float) -> list[float]:
    async with running_streams(
        cluster, NUM_STREAMS, prompt_tokens=PROMPT_WORDS, max_tokens=MOST_NEW_TOKENS
    ) as running:
        await running.until(lambda streams: all(len(stream.arrivals_s) >= 2 for stream in streams))
        await running.go_on_for(SETTLE_S)
        begin_s = time.monotonic()
        await running.go_on_for(window_s)
        lags = cluster.lags(begin_s, time.monotonic())
    if not lags:
        raise NotMeasured("the coordinator logged no lag of its event loop")
    return [lag.lag_s * 1e3 for lag in lags]


async def _many(cluster: BenchCluster, num_streams: int) -> tuple[float, int]:
    """Seconds until all streams ended, and how many have all of their tokens."""
    begin_s = time.monotonic()
    streams = await cluster.generate_all(num_streams, PROMPT_WORDS, MANY_TOKENS)
    complete = [stream for stream in streams if len(stream.arrivals_s) == MANY_TOKENS]
    return time.monotonic() - begin_s, len(complete)


def _lag(name: str, measured_ms: float, limit_ms: float, lags_ms: list[float]) -> Figure:
    return Figure(
        name=f"lag, {name} of the event loop with {NUM_STREAMS} text streams : {limit_ms:g} ms",
        measured=max(measured_ms, 1e-3),
        bound=limit_ms,
        unit="ms",
        better=Better.LOWER,
        target=1.0,
        noise=0.25,
        how="lateness of a timer that is due every 5 ms, while 64 text streams decode on mock stages : limit",
        details={"max_ms": max(lags_ms), "p90_ms": percentile(lags_ms, 0.9), "timers": len(lags_ms)},
    )
