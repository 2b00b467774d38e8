"""Resident memory of real workers after a load, against weights, KV pages and a fixed allowance."""

from __future__ import annotations

from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster

ALLOWANCE_MB = 350
MB = 1e6


async def measure(setting: Setting) -> list[Figure]:
    """The worker that is nearest to its bound."""
    async with real_cluster(setting) as cluster:
        await cluster.generate_all(32, PROMPT_TOKENS, NEW_TOKENS)
        heartbeats = {worker.pid: worker.heartbeat for worker in (await cluster.status()).workers}
        pids = [worker.pid for worker in cluster.processes.workers]
        resident = dict(zip(pids, cluster.resident_bytes(), strict=True))
    bounds = {
        pid: heartbeat.weight_bytes + heartbeat.kv_bytes + ALLOWANCE_MB * MB
        for pid, heartbeat in heartbeats.items()
    }
    worst = max(resident, key=lambda pid: resident[pid] / bounds[pid])
    figure = Figure(
        name="memory, worker : weights + KV + 350 MB",
        measured=resident[worst] / MB,
        bound=bounds[worst] / MB,
        unit="MB",
        better=Better.LOWER,
        target=1.0,
        noise=0.03,
        how="resident after 32 streams, of the worker nearest to its bound",
        details={
            "weights_mb": heartbeats[worst].weight_bytes / MB,
            "kv_mb": heartbeats[worst].kv_bytes / MB,
            "rest_mb": (resident[worst] - heartbeats[worst].weight_bytes - heartbeats[worst].kv_bytes) / MB,
        },
    )
    return [figure]
