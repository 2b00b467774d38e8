"""A worker process holds little more than its own layers, also while it loads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy import LocalCluster, LocalClusterConfig
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT
from tests.zero_checkpoint import write_zero_checkpoint

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.full]

MIB = 2**20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

LIMITS = ("--kv-tokens", "256", "--max-step-tokens", "64", "--max-model-len", "256")


async def test_peak_memory_of_a_worker_is_its_weights_plus_a_constant(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    total = write_zero_checkpoint(directory, CONFIG, num_shards=7)
    config = LocalClusterConfig(
        num_workers=3,
        model=directory,
        memory_bytes=1200 * MIB,
        num_threads=1,
        coordinator_arguments=("--dtype", "bf16", *LIMITS),
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    async with LocalCluster(config) as cluster:
        status = await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        weights = [worker.weight_bytes for worker in status.workers]
        assert sum(weights) == total
        for worker, weight_bytes in zip(status.workers, weights, strict=True):
            peak = _peak_bytes(worker.pid)
            # Without resident weights the bound would prove nothing.
            assert peak > weight_bytes
            assert peak < 1.15 * weight_bytes + 400 * MIB, f"{worker.name}: {peak} for {weight_bytes}"
            # The slack is too small for the layers of other workers.
            assert total - weight_bytes > 0.15 * weight_bytes + 400 * MIB


def _peak_bytes(pid: int) -> int:
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
