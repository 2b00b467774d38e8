"""Two workers on one GPU: real processes that serve, lose one of them, and go on with the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import (
    NUM_NEW_TOKENS,
    START_TIMEOUT_S,
    STEP_FLAGS,
    Reference,
    is_serving,
    make_reference,
    tokens_of,
    wait_for_status,
)
from tests.e2e.commands import ENVIRONMENT

pytestmark = pytest.mark.gpu

MEMORY_BYTES = 1 << 30
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def reference(device: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("llama") / "model", "llama")


async def test_a_cluster_on_one_gpu_loses_a_worker_and_no_token(
    device: str, reference: Reference, tmp_path: Path
) -> None:
    config = LocalClusterConfig(
        num_workers=2,
        model=reference.directory,
        devices=(device,),
        memory_bytes=MEMORY_BYTES,
        coordinator_arguments=(*STEP_FLAGS, "--dtype", "f32"),
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    async with LocalCluster(config) as cluster, Client(cluster.address) as client:
        status = await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert [worker.device for worker in status.workers] == [device] * 2
        assert await _generate_all(client, reference) == reference.expected

        generating = asyncio.create_task(_generate_all(client, reference))
        await wait_for_status(cluster.address, lambda now: now.requests.decode > 0, timeout_s=DEADLINE_S)
        cluster.kill("worker-1")
        await cluster.restart("worker-1")
        async with asyncio.timeout(DEADLINE_S):
            assert await generating == reference.expected
        whole = await wait_for_status(cluster.address, _is_whole, timeout_s=DEADLINE_S)
        assert whole.epoch > status.epoch
        assert whole.requests.failed == 0
        assert await _generate_all(client, reference) == reference.expected


async def _generate_all(client: Client, reference: Reference) -> list[list[int]]:
    return await asyncio.gather(
        *(tokens_of(client, prompt, NUM_NEW_TOKENS, prefix_cache=False) for prompt in reference.prompts)
    )


def _is_whole(status: cluster_pb2.GetStatusResponse) -> bool:
    return is_serving(status) and sum(worker.HasField("stage") for worker in status.workers) == 2
