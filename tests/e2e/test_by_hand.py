"""Coordinator and workers started one by one, as on separate hosts."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stageline import Client, Unavailable
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.e2e.clusters import (
    NUM_NEW_TOKENS,
    STEP_FLAGS,
    Reference,
    is_serving,
    random_prompt,
    tokens_of,
    wait_for_status,
)
from tests.e2e.commands import ENVIRONMENT, Shell, exit_code, until_logged

pytestmark = pytest.mark.asyncio(loop_scope="package")

SMALL = ("--memory", "256MiB", "--threads", "1")
START_TIMEOUT_S = 120.0


@pytest.mark.full
async def test_workers_start_in_any_order_and_outlive_their_coordinator(
    llama: Reference, tmp_path: Path, free_address: str
) -> None:
    elsewhere = shutil.copytree(llama.directory, tmp_path / "elsewhere")
    async with Shell(tmp_path) as shell:
        to_coordinator = ("worker", "--coordinator", free_address, *SMALL)
        workers = [
            await shell.start("c", *to_coordinator, "--name", "gpu-10", "--model", str(elsewhere)),
            await shell.start("a", *to_coordinator, "--name", "gpu-2", "--listen", "0.0.0.0:0", "--insecure"),
        ]
        for worker in workers:
            waits = await until_logged(worker, "waiting for the coordinator")
            assert free_address in waits
        serve = ("--model", str(llama.directory), "--stages", "3", "--layers", "2,5,1", *STEP_FLAGS)
        coordinator, _ = await shell.coordinator("--listen", free_address, *serve)
        missing = await wait_for_status(free_address, lambda status: "2 of 3" in status.detail)
        assert missing.state == cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS
        port = await _free_port()
        listen = ("--listen", f"127.0.0.1:{port}", "--advertise", f"localhost:{port}")
        workers.append(await shell.start("b", *to_coordinator, "--name", "gpu-9", *listen))

        status = await wait_for_status(free_address, is_serving, timeout_s=START_TIMEOUT_S)
        addresses = {worker.name: worker.address for worker in status.workers}  # ordered by measured links
        assert addresses.keys() == {"gpu-2", "gpu-9", "gpu-10"}
        assert [worker.layer_end for worker in status.workers] == [2, 7, 8]
        assert addresses["gpu-9"] == f"localhost:{port}"
        assert {worker.memory_bytes for worker in status.workers} == {256 * 2**20}
        await _equals_reference(free_address, llama)

        async with Client(free_address) as client:
            outputs = client.generate(random_prompt(5), max_tokens=3000)
            await anext(outputs)
            coordinator.send_signal(signal.SIGINT)
            with pytest.raises(Unavailable, match="the coordinator is stopping"):
                async for _ in outputs:
                    pass
        assert await exit_code(coordinator) == "exit code 0"
        assert "Traceback" not in coordinator.read_log()
        num_loads = [worker.read_log().count("loading layers") for worker in workers]

        await shell.coordinator("--listen", free_address, *serve, name="coordinator-again")
        again = await wait_for_status(free_address, is_serving, timeout_s=START_TIMEOUT_S)
        assert again.epoch > status.epoch
        assert [worker.pid for worker in again.workers] == [worker.pid for worker in status.workers]
        await _equals_reference(free_address, llama)
        loads = [worker.read_log().count("loading layers") for worker in workers]
        assert loads == num_loads, "weights stay loaded"
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            assert await exit_code(worker) == "exit code 0"
            assert "Traceback" not in worker.read_log()


@pytest.mark.full
async def test_a_worker_with_another_model_is_rejected_with_both_fingerprints(
    llama: Reference, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_layers=3)
    async with Shell(tmp_path) as shell:
        serve = ("--model", str(llama.directory), "--stages", "1", "--dtype", "bf16", *STEP_FLAGS)
        _, address = await shell.coordinator(*serve)
        to_coordinator = ("worker", "--coordinator", address, "--name", "gpu-a", *SMALL)
        wrong = await shell.start("wrong", *to_coordinator, "--model", str(other))
        blocked = await wait_for_status(
            address,
            lambda status: status.state == cluster_pb2.CLUSTER_STATE_BLOCKED,
            timeout_s=START_TIMEOUT_S,
        )
        (worker,) = blocked.workers
        assert worker.state == cluster_pb2.WORKER_STATE_QUARANTINED
        assert blocked.fingerprint in worker.detail
        assert f"checkpoint {other} differs from the coordinator's in its config and headers" in worker.detail
        assert "pass --model with the directory of a copy" in worker.detail
        assert worker.detail in blocked.detail
        wrong.send_signal(signal.SIGTERM)
        assert await exit_code(wrong) == "exit code 0"

        await shell.start("right", *to_coordinator)
        status = await wait_for_status(address, is_serving, timeout_s=START_TIMEOUT_S)
        assert "DTYPE_BF16" in str(status)
        async with Client(address) as client:
            assert len(await tokens_of(client, llama.prompts[4], NUM_NEW_TOKENS)) == NUM_NEW_TOKENS

        # Idle from here on: every byte is compared, and both processes have hashes of the same files.
        def is_compared(status: cluster_pb2.GetStatusResponse) -> bool:
            return [worker.weights for worker in status.workers] == [cluster_pb2.WEIGHTS_CHECK_FULL]

        await wait_for_status(address, is_compared, timeout_s=START_TIMEOUT_S)
        kept = Path(ENVIRONMENT["XDG_CACHE_HOME"], "stageline", "weights")
        inode = (llama.directory / "model.safetensors").stat().st_ino
        assert any(f" {inode}, " in file.read_text() for file in kept.iterdir())


@pytest.mark.full
async def test_a_worker_with_other_weights_of_the_same_shape_serves_no_token(
    llama: Reference, tmp_path: Path
) -> None:
    other = shutil.copytree(llama.directory, tmp_path / "other")
    negated = {name: -tensor for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(negated, other / "model.safetensors", metadata={"format": "pt"})
    async with Shell(tmp_path) as shell:
        serve = ("--model", str(llama.directory), "--stages", "1", *STEP_FLAGS)
        _, address = await shell.coordinator(*serve)
        to_coordinator = ("worker", "--coordinator", address, "--name", "gpu-a", *SMALL)
        await shell.start("wrong", *to_coordinator, "--model", str(other))
        ends = (cluster_pb2.CLUSTER_STATE_BLOCKED, cluster_pb2.CLUSTER_STATE_SERVING)
        blocked = await wait_for_status(
            address, lambda status: status.state in ends, timeout_s=START_TIMEOUT_S
        )
        assert blocked.state == cluster_pb2.CLUSTER_STATE_BLOCKED
        (worker,) = blocked.workers
        assert worker.state == cluster_pb2.WORKER_STATE_QUARANTINED
        what = f"checkpoint {other} differs from the coordinator's in its values: it has the fingerprint "
        assert what in worker.detail
        assert f", expected {blocked.fingerprint}: copy the coordinator's checkpoint" in worker.detail


async def _equals_reference(address: str, reference: Reference) -> None:
    async with Client(address) as client:
        requests = (tokens_of(client, prompt, NUM_NEW_TOKENS) for prompt in reference.prompts)
        assert await asyncio.gather(*requests) == reference.expected


async def _free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
