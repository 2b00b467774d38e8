"""Random arrivals at 70 % of the measured capacity: latencies, and the share of requests in their limits."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster
from bench.harness.spread import percentile
from bench.harness.streams import Stream

NUM_CLIENTS = 32
CLIENT_REQUESTS = 5
"""Requests that each client of the closed loop sends; the first ones are not counted."""
NUM_ARRIVALS = 500
OF_CAPACITY = 0.7
SEED = 15
MOST_OF_LONE_TTFT = 4.0
ITL_TARGET_S = 0.1
"""Default of --itl-target; the coordinator allows more where three steps without prompts take longer."""
GOODPUT = 0.95

HOW = "500 Poisson arrivals at 70 % of the requests/s of a closed loop of 32, 128 tokens in and 64 out"


async def measure(setting: Setting) -> list[Figure]:
    """A lone request, the capacity, then arrivals."""
    num_arrivals = 20 if setting.is_quick else NUM_ARRIVALS
    num_clients = 4 if setting.is_quick else NUM_CLIENTS
    async with real_cluster(setting) as cluster:
        await cluster.generate_all(num_clients, PROMPT_TOKENS, 8)
        lone = [await cluster.generate(PROMPT_TOKENS, NEW_TOKENS) for _ in range(setting.rounds(7, 2))]
        capacity = await _capacity(cluster, num_clients)
        setting.say(f"closed loop of {num_clients}: {capacity:.2f} requests/s")
        times_s = arrival_times_s(num_arrivals, OF_CAPACITY * capacity, SEED)
        streams = await cluster.processes.while_running(_arrive(cluster, times_s))
    return _figures(lone, streams, capacity=capacity, rate=len(times_s) / times_s[-1])


def arrival_times_s(num_arrivals: int, rate: float, seed: int) -> list[float]:
    """Seconds of Poisson arrivals with a mean of `rate` per second, each time the same for a seed."""
    generator = random.Random(seed)
    times_s, now_s = [], 0.0
    for _ in range(num_arrivals):
        now_s += generator.expovariate(rate)
        times_s.append(now_s)
    return times_s


async def _capacity(cluster: BenchCluster, num_clients: int) -> float:
    """Requests per second of clients that send one request after another, from the end of the first ones."""

    async def client() -> list[float]:
        ends_s = []
        for _ in range(CLIENT_REQUESTS):
            await cluster.generate(PROMPT_TOKENS, NEW_TOKENS)
            ends_s.append(time.monotonic())
        return ends_s

    async def run() -> list[list[float]]:
        return await asyncio.gather(*(client() for _ in range(num_clients)))

    ends_s = sorted(end_s for ends in await cluster.processes.while_running(run()) for end_s in ends)
    counted_s = ends_s[num_clients - 1 : -num_clients]
    return (len(counted_s) - 1) / (counted_s[-1] - counted_s[0])


async def _arrive(cluster: BenchCluster, times_s: Sequence[float]) -> list[Stream]:
    """Send a request at each time, and wait for all ends."""
    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        calls = []
        for time_s in times_s:
            await asyncio.sleep(max(0.0, begin_s + time_s - time.monotonic()))
            calls.append(group.create_task(cluster.generate(PROMPT_TOKENS, NEW_TOKENS)))
    return [call.result() for call in calls]


def _gaps_s(stream: Stream) -> list[float]:
    return [after - before for before, after in pairwise(stream.arrivals_s)]


def is_good(stream: Stream, lone_first_token_s: float) -> bool:
    """Whether the first token came within four times a lone request's, and 99 % of the others in time."""
    return (
        stream.first_token_s <= MOST_OF_LONE_TTFT * lone_first_token_s
        and percentile(_gaps_s(stream), 0.99) <= ITL_TARGET_S
    )


def _figures(lone: list[Stream], streams: list[Stream], *, capacity: float, rate: float) -> list[Figure]:
    lone_ttft_s = statistics.median(stream.first_token_s for stream in lone)
    lone_gap_s = statistics.median(gap for stream in lone for gap in _gaps_s(stream))
    first_s = [stream.first_token_s for stream in streams]
    gaps_s = [gap for stream in streams for gap in _gaps_s(stream)]
    num_good = sum(is_good(stream, lone_ttft_s) for stream in streams)
    goodput = Figure(
        name="arrivals, requests within 4 lone TTFT and 100 ms ITL p99 : all",
        measured=max(num_good, 0.5),
        bound=len(streams),
        unit="requests",
        target=GOODPUT,
        limit=1.0,
        noise=0.05,
        how=HOW,
        details={
            "capacity_requests_per_s": capacity,
            "rate_requests_per_s": rate,
            "late_ttft": sum(first > MOST_OF_LONE_TTFT * lone_ttft_s for first in first_s),
            "late_itl": sum(percentile(_gaps_s(stream), 0.99) > ITL_TARGET_S for stream in streams),
        },
    )
    return [
        goodput,
        _latency("TTFT p50 : a lone request's", percentile(first_s, 0.5), lone_ttft_s),
        _latency("TTFT p99 : a lone request's", percentile(first_s, 0.99), lone_ttft_s),
        _latency("ITL p50 : a lone request's", percentile(gaps_s, 0.5), lone_gap_s),
        _latency("ITL p99 : 100 ms", percentile(gaps_s, 0.99), ITL_TARGET_S),
    ]


def _latency(name: str, measured_s: float, bound_s: float) -> Figure:
    return Figure(
        name=f"arrivals, {name}",
        measured=measured_s * 1e3,
        bound=bound_s * 1e3,
        unit="ms",
        better=Better.LOWER,
        noise=0.25,
        how=HOW,
    )
