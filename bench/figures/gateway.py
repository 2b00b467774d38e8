"""CPU time of coordinator and gateways per token of a chat; `/health` beside hostile bodies."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, NotMeasured
from bench.harness.gateways import (
    EventClient,
    Gateway,
    cpu_s,
    running_gateways,
    running_hostile_client,
    running_streams_of,
)
from bench.harness.group import Setting
from bench.harness.mock_cluster import text_cluster
from bench.harness.spread import percentile
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.transport import PLAIN

NUM_STREAMS, NUM_GATEWAYS = 256, 2
MAX_TOKENS = 1900
"""Longer than a window; the built-in model has 2,048 positions."""
STAGE_MS = 20
COORDINATOR_US, COORDINATOR_RATIO = 15.0, 0.3
GATEWAY_US, GATEWAY_RATIO = 25.0, 0.5
TOKENS_PER_S = 20_000
START_TIMEOUT_S = 120.0
HEALTH_MS, HEALTH_PAUSE_S, HEALTH_BODY = 50.0, 0.005, b'{"status":"ok"}'
NUM_HOSTILE = 4
CHAT = "/v1/chat/completions"
PROMPT = "once upon a time there was a small bird"
CHAT_BODY = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """A window: its tokens, and processor time per token in microseconds."""

    tokens_per_s: float
    events_per_token: float
    coordinator_us: float
    gateway_us: float = 0.0
    others_us: float = 0.0


async def measure(setting: Setting) -> list[Figure]:
    """Measure chats through gateways and Generate in turns, then `/health`, on one cluster."""
    num_rounds, window_s = (1, 2.0) if setting.is_quick else (3, 5.0)
    arguments = ("--max-step-sequences", str(NUM_STREAMS), "--queue-size", str(2 * NUM_STREAMS))
    served: list[Costs] = []
    generated: list[Costs] = []
    async with text_cluster(1, f"step={STAGE_MS}ms", coordinator_arguments=arguments) as cluster:
        for _ in range(num_rounds):
            served.append(await _served(cluster, window_s))
            setting.say(f"gateways: {served[-1]}")
            generated.append(await _generated(cluster, window_s))
            setting.say(f"Generate: {generated[-1]}")
        health = await _health(cluster, window_s)
    return [
        _figure("coordinator", served, generated, COORDINATOR_RATIO, COORDINATOR_US),
        _figure("gateway", served, generated, GATEWAY_RATIO, GATEWAY_US),
        _cores(served),
        health,
    ]


def _figure(
    process: str, served: Sequence[Costs], generated: Sequence[Costs], target: float, limit_us: float
) -> Figure:
    measured = [one.gateway_us if process == "gateway" else one.coordinator_us for one in served]
    bounds = [one.coordinator_us for one in generated]
    return Figure(
        name=f"{NUM_STREAMS} chats through {NUM_GATEWAYS} gateways, {process} : Generate, CPU time per token",
        measured=statistics.median(measured),
        bound=statistics.median(bounds),
        unit="us",
        better=Better.LOWER,
        target=target,
        ratios=tuple(one / bound for one, bound in zip(measured, bounds, strict=True)),
        noise=0.15,
        how=(
            f"processor time of the {process} per token : the coordinator's for one message per token; "
            f"also wanted: {limit_us:g} us"
        ),
        details={
            "limit_us": limit_us,
            "events_per_token": statistics.median(one.events_per_token for one in served),
        },
    )


def _cores(served: Sequence[Costs]) -> Figure:
    """Whether the machine has the processor time of the wanted rate."""
    used = [one.coordinator_us + one.gateway_us for one in served]
    return Figure(
        name=f"cores that {TOKENS_PER_S:,} tokens/s take at coordinator and gateways : cores",
        measured=statistics.median(used) * TOKENS_PER_S / 1e6,
        bound=psutil.cpu_count() or 1,
        unit="cores",
        better=Better.LOWER,
        target=1.0,
        noise=0.15,
        how="processor time per token of both; clients and workers share the machine and take the rest",
        details={
            "tokens_per_s": statistics.median(one.tokens_per_s for one in served),
            "others_us_per_token": statistics.median(one.others_us for one in served),
        },
    )


async def _served(cluster: BenchCluster, window_s: float) -> Costs:
    """Costs of chats that a light client reads through gateways."""
    address = cluster.processes.address
    async with (
        running_gateways(address, NUM_GATEWAYS) as gateways,
        running_streams_of(gateways, NUM_STREAMS, CHAT, CHAT_BODY) as client,
    ):
        async with asyncio.timeout(START_TIMEOUT_S):
            while (await client.count()).started < NUM_STREAMS:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
        costs = await _costs_of_gateways(cluster, gateways, client, window_s)
    await _wait_idle(cluster)
    return costs


async def _costs_of_gateways(
    cluster: BenchCluster, gateways: Sequence[Gateway], client: EventClient, window_s: float
) -> Costs:
    coordinator = cluster.processes.coordinator.pid
    others = [client.pid, *(worker.pid for worker in cluster.processes.workers)]
    groups = [[coordinator], [gateway.process.pid for gateway in gateways], others]
    begin_s, before, first = time.monotonic(), await client.count(), _cpu(groups)
    await asyncio.sleep(window_s)
    end_s, after, last = time.monotonic(), await client.count(), _cpu(groups)
    if after.bad:
        raise NotMeasured(f"{after.bad} responses were not streams")
    tokens = _tokens(cluster, begin_s, end_s)
    used = [(end - begin) * 1e6 / tokens for begin, end in zip(first, last, strict=True)]
    return Costs(tokens / (end_s - begin_s), (after.events - before.events) / tokens, *used)


def _cpu(groups: Sequence[Sequence[int]]) -> list[float]:
    return [sum(map(cpu_s, pids)) for pids in groups]


def _tokens(cluster: BenchCluster, begin_s: float, end_s: float) -> int:
    """Tokens of the steps whose results came in the window."""
    steps = [step for step in cluster.steps() if begin_s <= step.result_s < end_s]
    return max(1, sum(step.num_decodes for step in steps))


async def _generated(cluster: BenchCluster, window_s: float) -> Costs:
    """Costs of as many calls of Generate, without text."""
    counts = [0] * NUM_STREAMS
    async with PLAIN.channel(cluster.processes.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        tasks = [asyncio.create_task(_read(stub, number, counts)) for number in range(NUM_STREAMS)]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not all(counts):
                    await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
                    for task in tasks:
                        if task.done():
                            task.result()
                await asyncio.sleep(1.0)
            pid = cluster.processes.coordinator.pid
            begin_s, used_s, tokens = time.monotonic(), cpu_s(pid), sum(counts)
            await asyncio.sleep(window_s)
            tokens, used_s, took_s = sum(counts) - tokens, cpu_s(pid) - used_s, time.monotonic() - begin_s
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await _wait_idle(cluster)
    return Costs(tokens / took_s, 1.0, used_s * 1e6 / tokens)


async def _read(stub: Any, number: int, counts: list[int]) -> None:
    request = inference_pb2.GenerateRequest(
        text=PROMPT, max_tokens=MAX_TOKENS, output=inference_pb2.OUTPUT_TOKENS_ONLY
    )
    request.sampling.ignore_eos = True
    request.sampling.temperature = 1.0
    async for response in stub.Generate(request):
        counts[number] += len(response.token_ids)


async def _health(cluster: BenchCluster, window_s: float) -> Figure:
    """Times of `/health` while other connections send hostile bodies."""
    async with (
        running_gateways(cluster.processes.address, 1) as gateways,
        running_hostile_client(gateways[0], NUM_HOSTILE) as statuses,
    ):
        async with asyncio.timeout(START_TIMEOUT_S):
            while not statuses:
                await asyncio.sleep(0.1)
        times_ms = await _health_times_ms(gateways[0].address, window_s)
        if refused := [status for status in statuses if not 400 <= status < 500]:
            raise NotMeasured(f"hostile bodies were answered with {sorted(set(refused))}")
        num_hostile = len(statuses)
    return Figure(
        name=f"/health p99 while {NUM_HOSTILE} clients send hostile bodies : {HEALTH_MS:g} ms",
        measured=percentile(times_ms, 0.99),
        bound=HEALTH_MS,
        unit="ms",
        better=Better.LOWER,
        target=1.0,
        noise=0.3,
        how="one request after the other on one connection; bodies of 2 MB, deep JSON, 10,000 stops, ...",
        details={
            "median_ms": statistics.median(times_ms),
            "max_ms": max(times_ms),
            "requests": len(times_ms),
            "hostile_bodies": num_hostile,
        },
    )


async def _health_times_ms(address: str, window_s: float) -> list[float]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    times_ms, end_s = [], time.monotonic() + window_s
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise NotMeasured(f"/health answered {head[:40]!r}")
        await reader.readexactly(len(HEALTH_BODY))
        times_ms.append((time.monotonic() - begin_s) * 1e3)
        await asyncio.sleep(HEALTH_PAUSE_S)
    writer.close()
    return times_ms


async def _wait_idle(cluster: BenchCluster) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while (await cluster.status()).requests.decode:
            await asyncio.sleep(0.1)
