"""Clusters of real workers with one thread each, serving the 88 M model or a larger one."""

from __future__ import annotations

from bench.harness.cluster import BenchCluster
from bench.harness.group import Setting
from bench.harness.llama import LLAMA_88M, Geometry, checkpoint
from deploy import LocalClusterConfig

PROMPT_TOKENS = 128
NEW_TOKENS = 64
KV_TOKENS = 16384
"""Slightly more than the largest load needs, so that all pages count in a worker's memory."""

MEMORY_BYTES = 2 << 30


def real_cluster(
    setting: Setting,
    *,
    num_workers: int = 2,
    has_tls: bool = False,
    geometry: Geometry = LLAMA_88M,
    arguments: tuple[str, ...] = (),
) -> BenchCluster:
    """A cluster, not started; `arguments` are further flags of its coordinator."""
    config = LocalClusterConfig(
        num_workers=num_workers,
        model=checkpoint(setting.cache_directory, geometry),
        num_threads=1,
        memory_bytes=MEMORY_BYTES,
        coordinator_arguments=(
            *("--kv-tokens", str(KV_TOKENS), "--max-model-len", "4096"),
            *setting.coordinator_arguments,
            *arguments,
        ),
    )
    return BenchCluster(config, vocab_size=geometry.vocab, has_tls=has_tls)


async def warm_up(cluster: BenchCluster) -> None:
    """Send requests like the measured ones, so that caches and lazy initialization are warm."""
    await cluster.generate_all(4, PROMPT_TOKENS, 8)
