"""Resident memory of real workers after a load, against weights, KV pages and a fixed allowance."""

from __future__ import annotations

from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster

ALLOWANCE_MB = 350
MB = 1e6


async def measure(setting: Setting) -> list[Figure]:
    """Measure the worker nearest to its bound."""
    async with real_cluster(setting) as cluster:
        await cluster.generate_all(32, PROMPT_TOKENS, NEW_TOKENS)
        by_pid = {worker.pid: worker for worker in (await cluster.status()).workers}
        pids = [worker.pid for worker in cluster.processes.workers]
        resident = dict(zip(pids, cluster.resident_bytes(), strict=True))
    bounds = {
        pid: worker.weight_bytes + worker.kv_bytes + ALLOWANCE_MB * MB for pid, worker in by_pid.items()
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
            "weights_mb": by_pid[worst].weight_bytes / MB,
            "kv_mb": by_pid[worst].kv_bytes / MB,
            "rest_mb": (resident[worst] - by_pid[worst].weight_bytes - by_pid[worst].kv_bytes) / MB,
        },
    )
    return [figure]
