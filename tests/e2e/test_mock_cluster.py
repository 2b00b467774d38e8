"""Many mock stages on one small machine: one process each, without unneeded modules."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import START_TIMEOUT_S, is_idle, tokens_of, wait_for_status
from tests.e2e.commands import ENVIRONMENT, run_stageline
from tests.mock_answers import mock_tokens
from wire.payload_sockets import IDLE_S

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_STAGES = 16
VOCAB_SIZE = 1000
MOST_BYTES = 80_000_000
HEAVY = re.compile(r"/[^/\n]*(torch|tokenizers|transformers|llguidance|numpy)[^\n]*")


@pytest.mark.full
async def test_sixteen_mock_stages_serve_in_little_memory(tmp_path: Path) -> None:
    config = LocalClusterConfig(
        num_workers=NUM_STAGES,
        mocks=("step=5ms",),
        coordinator_arguments=("--mock-model", f"layers={NUM_STAGES},vocab={VOCAB_SIZE}"),
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    async with LocalCluster(config) as cluster:
        status = await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert (status.model, status.num_stages) == ("mock", NUM_STAGES)
        await _serves_what_is_predicted(cluster.address)
        await _status_calls_them_mock(cluster.address)
        await wait_for_status(cluster.address, is_idle)
        await asyncio.sleep(2 * IDLE_S)  # buffers of received payloads are kept for so long
        for worker in status.workers:
            _is_small(worker.pid, worker.name)


async def test_hidden_states_of_many_chunks_travel_on_the_streams_only(tmp_path: Path) -> None:
    """Frames of 2 MiB, where workers offer shared memory and payload connections."""
    shape = f"layers=3,hidden=16384,vocab={VOCAB_SIZE}"
    config = LocalClusterConfig(
        num_workers=3,
        mocks=("step=1ms",),
        coordinator_arguments=("--mock-model", shape, "--max-step-tokens", "64", "--hidden-states", "grpc"),
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        await _serves_what_is_predicted(cluster.address)
        status = await wait_for_status(cluster.address, _has_hops)
    grpc = cluster_pb2.HOP_TRANSPORT_GRPC
    assert [worker.hop_transport for worker in status.workers] == [grpc, grpc, 0]


def _has_hops(status: cluster_pb2.GetStatusResponse) -> bool:
    return all(worker.hop_transport for worker in status.workers[:-1])


async def _serves_what_is_predicted(address: str) -> None:
    prompts = [
        [(7 * index + place) % VOCAB_SIZE for place in range(1 + 90 * (index % 3))] for index in range(24)
    ]
    async with Client(address) as client:
        answers = await asyncio.gather(*(tokens_of(client, prompt, 24) for prompt in prompts))
    assert answers == [mock_tokens(prompt, 24, vocab_size=VOCAB_SIZE) for prompt in prompts]


async def _all_are_ready(address: str) -> None:
    """On a busy machine, heartbeats of 16 workers may be late, and status says so; so may a step, which
    begins a new epoch.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            shown = await run_stageline("status", "--coordinator", address)
            assert (shown.code, shown.stderr) == (0, "")
            serving = re.match(rf"mock in bf16, {NUM_STAGES} stages, epoch \d+\nserving\n", shown.stdout)
            ready = re.findall(r"(?:FIRST|MIDDLE|LAST) +worker-\d+ +\d+ \(1\) +mock +ready ", shown.stdout)
            if serving and len(ready) == NUM_STAGES:
                return
            await asyncio.sleep(0.5)


async def _status_calls_them_mock(address: str) -> None:
    await _all_are_ready(address)
    generated = await run_stageline(
        "generate", "--token-ids", "1,2,3", "--max-tokens", "5", "--coordinator", address
    )
    expected = ",".join(map(str, mock_tokens([1, 2, 3], 5, vocab_size=VOCAB_SIZE)))
    assert generated.stdout == f"{expected}\n"


def _is_small(pid: int, name: str) -> None:
    """Assert low memory after serving. Mapped files show libraries that a module list could hide."""
    heavy = HEAVY.findall(Path(f"/proc/{pid}/maps").read_text())
    assert heavy == [], f"{name} has loaded {set(heavy)}"
    resident_bytes = psutil.Process(pid).memory_info().rss
    assert resident_bytes <= MOST_BYTES, f"{name} holds {resident_bytes} bytes"


BAD_USAGE = {
    "worker --mock step=20": "mock time step='20': expected a number with us, ms or s, such as 20ms",
    "worker --mock step=1ms --model .": "--mock cannot be used with --model",
    "coordinator --stages 2 --mock-model hidden=3": "'hidden=3' has no number of layers",
    "up --mock step=1ms --mock-model layers=x": "mock model layers='x': expected a number from 1 to 4096",
    "up --workers 3 --mock step=1ms --mock step=2ms": "2 mock specs for 3 workers: give 1 or one each",
}


@pytest.mark.full
async def test_wrong_mock_flags_are_reported_in_one_line_with_exit_code_2() -> None:
    finished = await asyncio.gather(*(run_stageline(*line.split()) for line in BAD_USAGE))
    for (line, text), run in zip(BAD_USAGE.items(), finished, strict=True):
        assert run.code == 2, line
        assert text in run.the_error(), line


@pytest.mark.full
async def test_more_mock_stages_than_layers_are_rejected_before_any_start() -> None:
    run = await run_stageline("up", "--workers", "4", "--mock", "step=1ms", "--mock-model", "layers=3")
    assert run.code == 1
    assert "4 stages for a model of 3 layers" in run.the_error()
