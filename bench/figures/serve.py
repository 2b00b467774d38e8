"""CPU time of the coordinator per token: 256 streams through two Serve streams, and through Generate."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from gateway.upstream.contract import Tokens
from gateway.upstream.link import CoordinatorLink
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.transport import PLAIN

NUM_STREAMS, NUM_GATEWAYS = 256, 2
PROMPT_TOKENS, MAX_TOKENS = 16, 8000
NUM_STAGES, STAGE_MS = 1, 20
LIMIT_US, RATIO = 15.0, 0.3


@dataclass(slots=True)
class _Count:
    """Tokens that the clients of one round have received."""

    tokens: int = 0
    started: int = 0


Read = Callable[[int, _Count], Coroutine[Any, Any, None]]


async def measure(setting: Setting) -> list[Figure]:
    """Measure both in turns on one cluster, each round with new requests."""
    num_rounds, window_s = (1, 2.0) if setting.is_quick else (3, 5.0)
    arguments = ("--max-step-sequences", str(NUM_STREAMS), "--queue-size", str(2 * NUM_STREAMS))
    served: list[float] = []
    generated: list[float] = []
    async with mock_cluster([f"step={STAGE_MS}ms"] * NUM_STAGES, coordinator_arguments=arguments) as cluster:
        for _ in range(num_rounds):
            async with _gateways(cluster) as read:
                served.append(await _us_per_token(cluster, read, window_s=window_s))
            async with _callers(cluster) as read:
                generated.append(await _us_per_token(cluster, read, window_s=window_s))
    return [_figure(served, generated)]


def _figure(served: list[float], generated: list[float]) -> Figure:
    ratios = tuple(serve / generate for serve, generate in zip(served, generated, strict=True))
    return Figure(
        name=f"{NUM_STREAMS} streams through {NUM_GATEWAYS} Serve streams : Generate, CPU time per token",
        measured=statistics.median(served),
        bound=statistics.median(generated),
        unit="us",
        better=Better.LOWER,
        target=RATIO,
        ratios=ratios,
        noise=0.15,
        how=f"processor time of the coordinator per token, median of rounds; also wanted: {LIMIT_US:g} us",
        details={"limit_us": LIMIT_US},
    )


async def _us_per_token(cluster: BenchCluster, read: Read, *, window_s: float) -> float:
    """Processor time per token in a window in which all streams decode."""
    count = _Count()
    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(read(number, count)) for number in range(NUM_STREAMS)]
        try:
            while count.started < NUM_STREAMS:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            tokens, cpu_s = count.tokens, _cpu_s(cluster)
            await asyncio.sleep(window_s)
            used_s, num_tokens = _cpu_s(cluster) - cpu_s, count.tokens - tokens
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        while (await cluster.status()).requests.decode:
            await asyncio.sleep(0.1)
    return used_s * 1e6 / num_tokens


def _cpu_s(cluster: BenchCluster) -> float:
    times = psutil.Process(cluster.processes.coordinator.pid).cpu_times()
    return times.user + times.system


def _request(cluster: BenchCluster) -> inference_pb2.GenerateRequest:
    prompt = cluster.prompt(PROMPT_TOKENS)
    assert not isinstance(prompt, str), "mock stages have no words"
    request = inference_pb2.GenerateRequest(max_tokens=MAX_TOKENS)
    request.token_ids.ids.extend(prompt)
    request.sampling.ignore_eos = True
    return request


@asynccontextmanager
async def _gateways(cluster: BenchCluster) -> AsyncIterator[Read]:
    links = [CoordinatorLink(cluster.processes.address) for _ in range(NUM_GATEWAYS)]
    for link in links:
        await link.start()

    async def read(number: int, count: _Count) -> None:
        stream = await links[number % NUM_GATEWAYS].submit(_request(cluster))
        is_started = False
        try:
            async for item in stream:
                if isinstance(item, Tokens):
                    count.tokens += len(item.token_ids)
                    count.started += not is_started
                    is_started = True
        finally:
            await stream.cancel()

    yield read
    for link in links:
        await link.stop()


@asynccontextmanager
async def _callers(cluster: BenchCluster) -> AsyncIterator[Read]:
    channel = PLAIN.channel(cluster.processes.address)
    stub = inference_pb2_grpc.InferenceStub(channel)

    async def read(number: int, count: _Count) -> None:
        is_started = False
        async for response in stub.Generate(_request(cluster)):
            count.tokens += len(response.token_ids)
            count.started += not is_started
            is_started = True

    yield read
    await channel.close()
