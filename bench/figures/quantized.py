"""One stream with int8 and int4 weights against bfloat16, products alone beside it, and resident memory.

One worker serves the whole model: a second one adds a hop to every token, which `hop` measures.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.llama import LLAMA_88M, LLAMA_480M, NAMES, Geometry, checkpoint
from bench.harness.peer import Peer
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.running import running_streams
from bench.harness.streams import decode_rate, decode_window
from stageline_rpc.v1 import cluster_pb2

MODELS = {LLAMA_88M: "88 M", LLAMA_480M: "480 M"}
TARGETS = {"int8": 1.3, "int4": 2.0}
MOST_NEW_TOKENS = 512
MB = 1e6


@dataclass(slots=True)
class _Runs:
    """Rates of one stream by format, in rounds, and the times of products alone."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    products: list[dict[str, float]] = field(default_factory=list)


async def measure(setting: Setting) -> list[Figure]:
    """All formats of one model are served at the same time and measured in turns."""
    figures: list[Figure] = []
    for geometry in list(MODELS)[: 1 if setting.is_quick else None]:
        figures += await _measure(setting, geometry)
    return figures


async def _measure(setting: Setting, geometry: Geometry) -> list[Figure]:
    runs = _Runs()
    async with AsyncExitStack() as stack:
        clusters: dict[str, BenchCluster] = {}
        for name in ("bf16", *TARGETS):
            arguments = () if name == "bf16" else ("--quantize", name)
            cluster = real_cluster(setting, num_workers=1, geometry=geometry, arguments=arguments)
            clusters[name] = await stack.enter_async_context(cluster)
            await warm_up(clusters[name])
        directory = checkpoint(setting.cache_directory, geometry)
        peer = Peer("bench.harness.quantized_products", NAMES[geometry], str(directory))
        await stack.enter_async_context(peer)
        for _ in range(setting.rounds(5)):
            for name, cluster in clusters.items():
                runs.rates.setdefault(name, []).append(await _one_stream(cluster))
                setting.say(f"{MODELS[geometry]}, {name}: {runs.rates[name][-1]:.1f} tok/s")
            runs.products.append(await peer.ask({"rows": 1, "seconds": 1.0}))
        memory = [await _memory(cluster, geometry, name) for name, cluster in clusters.items()]
    return [_rate(runs, geometry, name) for name in TARGETS] + memory


async def _one_stream(cluster: BenchCluster) -> float:
    """Tokens per second."""
    started_s = time.monotonic()
    async with running_streams(
        cluster, 1, prompt_tokens=PROMPT_TOKENS, max_tokens=MOST_NEW_TOKENS
    ) as running:
        await running.until(lambda streams: decode_window(streams, NEW_TOKENS - 1) is not None)
        streams = running.streams
    window = decode_window(streams, NEW_TOKENS - 1)
    assert window is not None and window.begin_s > started_s, "found above"
    return decode_rate(streams, window)


def _rate(runs: _Runs, geometry: Geometry, name: str) -> Figure:
    alone = statistics.median(times["bf16_s"] / times[f"{name}_s"] for times in runs.products)
    return of_rounds(
        f"decode, 1 stream, {MODELS[geometry]}, {name} : bf16",
        [Round(rate, base) for rate, base in zip(runs.rates[name], runs.rates["bf16"], strict=True)],
        unit="tok/s",
        how=f"tokens/s of one stream with --quantize {name} : without",
        target=TARGETS[name],
        noise=0.15,
        details={
            "products_alone_ratio": alone,
            "products_bf16_ms": statistics.median(times["bf16_s"] for times in runs.products) * 1e3,
            f"products_{name}_ms": statistics.median(times[f"{name}_s"] for times in runs.products) * 1e3,
        },
    )


async def _memory(cluster: BenchCluster, geometry: Geometry, name: str) -> Figure:
    """Resident memory of the worker against weights and KV of its plan and a fixed allowance."""
    by_pid = {worker.pid: worker for worker in (await cluster.status()).workers}
    pids = [worker.pid for worker in cluster.processes.workers]
    resident = dict(zip(pids, cluster.resident_bytes(), strict=True))
    pid = max(resident, key=lambda pid: resident[pid])
    worker: cluster_pb2.WorkerStatus = by_pid[pid]
    rest = resident[pid] - worker.weight_bytes - worker.kv_bytes
    return Figure(
        name=f"memory, {MODELS[geometry]}, {name} : weights + KV + 350 MB",
        measured=resident[pid] / MB,
        bound=(worker.weight_bytes + worker.kv_bytes) / MB + 350,
        unit="MB",
        better=Better.LOWER,
        target=1.0,
        noise=0.03,
        how="resident memory of the worker after one stream",
        details={"weights_mb": worker.weight_bytes / MB, "kv_mb": worker.kv_bytes / MB, "rest_mb": rest / MB},
    )
