"""Two workers on one GPU: real processes that serve, lose one of them, and go on with the same tokens."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from bench.gpu.faulty import ASSERT, FAULT_VARIABLE, MEMORY, done_file
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
from wire.exit_codes import ExitCode

pytestmark = pytest.mark.gpu

MEMORY_BYTES = 1 << 30
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def reference(device: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("llama") / "model", "llama")


KILL_SENDER, KILL_RECEIVER = "kill the sender", "kill the receiver"


@pytest.mark.parametrize(("same_host", "least"), [("auto", "1B"), ("auto", "1GiB"), ("off", "1B")])
async def test_tokens_are_the_same_on_each_way_of_a_hop(
    same_host: str, least: str, device: str, reference: Reference, tmp_path: Path
) -> None:
    """On the device, in memory that both workers share and page-lock, and on a payload connection."""
    config = LocalClusterConfig(
        num_workers=2,
        model=reference.directory,
        devices=(device,),
        memory_bytes=MEMORY_BYTES,
        coordinator_arguments=(*STEP_FLAGS, "--dtype", "f32"),
        worker_arguments=(("--same-host", same_host, "--payload-min", least),) * 2,
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    way = _shares_memory if same_host == "auto" else _connects
    async with LocalCluster(config) as cluster, Client(cluster.address) as client:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        status = await wait_for_status(cluster.address, way, timeout_s=DEADLINE_S)
        assert {worker.same_host_fallback for worker in status.workers} == {""}
        assert await _generate_all(client, reference) == reference.expected
        assert way(await client.status())


@pytest.mark.parametrize("fault", [KILL_SENDER, KILL_RECEIVER, ASSERT, MEMORY])
async def test_a_cluster_on_one_gpu_loses_a_worker_and_no_token(
    fault: str, device: str, reference: Reference, tmp_path: Path
) -> None:
    """A killed worker, one whose context is poisoned, and one that stays without memory for a step."""
    file = tmp_path / "fault"
    config = LocalClusterConfig(
        num_workers=2,
        model=reference.directory,
        devices=(device,),
        memory_bytes=MEMORY_BYTES,
        coordinator_arguments=(*STEP_FLAGS, "--dtype", "f32"),
        worker_arguments=(("--payload-min", "1B"),) * 2,
        environment={**ENVIRONMENT, FAULT_VARIABLE: str(file)},
        command=(sys.executable, "-m", "bench.gpu.faulty"),
        log_directory=tmp_path / "logs",
    )
    async with LocalCluster(config) as cluster, Client(cluster.address) as client:
        status = await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert [worker.device for worker in status.workers] == [device] * 2
        await wait_for_status(cluster.address, _shares_memory, timeout_s=DEADLINE_S)
        assert await _generate_all(client, reference) == reference.expected

        generating = asyncio.create_task(_generate_all(client, reference))
        await wait_for_status(cluster.address, lambda now: now.requests.decode > 0, timeout_s=DEADLINE_S)
        await _fail(cluster, fault, file, status)
        async with asyncio.timeout(DEADLINE_S):
            assert await generating == reference.expected
        whole = await wait_for_status(cluster.address, _is_whole, timeout_s=DEADLINE_S)
        assert whole.epoch > status.epoch
        assert whole.requests.failed == 0
        await wait_for_status(cluster.address, _shares_memory, timeout_s=DEADLINE_S)
        assert await _generate_all(client, reference) == reference.expected


def _shares_memory(status: cluster_pb2.GetStatusResponse) -> bool:
    """Hidden states stay on a GPU."""
    first = min(status.workers, key=lambda worker: worker.stage)
    expected = "HOP_TRANSPORT_SHARED_MEMORY" if first.device == "cpu" else "HOP_TRANSPORT_CUDA_IPC"
    return cluster_pb2.HopTransport.Name(first.hop_transport) == expected


def _connects(status: cluster_pb2.GetStatusResponse) -> bool:
    first = min(status.workers, key=lambda worker: worker.stage)
    return first.hop_transport == cluster_pb2.HOP_TRANSPORT_TCP


async def _fail(cluster: LocalCluster, fault: str, file: Path, status: cluster_pb2.GetStatusResponse) -> None:
    """Let one worker fail; what has ended is started again."""
    is_kill = fault in (KILL_SENDER, KILL_RECEIVER)
    if is_kill:
        stage = 0 if fault == KILL_SENDER else 1
        cluster.kill(next(worker.name for worker in status.workers if worker.stage == stage))
    else:
        file.write_text(fault)
    async with asyncio.timeout(DEADLINE_S):
        if fault == MEMORY:
            while not done_file(file).exists():
                await asyncio.sleep(0.01)
            return
        ended = await cluster.next_exit()
    expected = -signal.SIGKILL if is_kill else ExitCode.DEVICE_FAILED
    assert ended.exit_code == expected, ended.last_lines()
    await cluster.restart(ended.name)


async def _generate_all(client: Client, reference: Reference) -> list[list[int]]:
    return await asyncio.gather(
        *(tokens_of(client, prompt, NUM_NEW_TOKENS, prefix_cache=False) for prompt in reference.prompts)
    )


def _is_whole(status: cluster_pb2.GetStatusResponse) -> bool:
    return is_serving(status) and sum(worker.HasField("stage") for worker in status.workers) == 2
