"""Device failures under load: processes exit with code 3, `up` restarts them, no request fails."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import START_TIMEOUT_S, VOCAB_SIZE, is_idle, is_serving, tokens_of, wait_for_status
from tests.e2e.commands import ENVIRONMENT
from tests.e2e.recovery_setup import DEADLINE_S
from tests.e2e.terminal import CTRL_C, Terminal
from tests.faults.streams import Streams, mixed_asks
from tests.mock_answers import mock_tokens
from wire.exit_codes import ExitCode

NUM_TOKENS = 60
MODEL = f"layers=8,vocab={VOCAB_SIZE}"


@pytest.mark.full
async def test_poisoned_devices_under_load_change_no_token(tmp_path: Path) -> None:
    cases = mixed_asks(8, lengths=(1, 40), max_tokens=NUM_TOKENS, vocab_size=VOCAB_SIZE, seed=53)
    expected = [list(mock_tokens(case.prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE)) for case in cases]
    arguments = ("--workers", "3", "--mock", "step=5ms,poison_after=150", "--mock-model", MODEL)
    async with Terminal("up", *arguments, "--listen", "127.0.0.1:0", temporary=tmp_path) as up:
        match = await up.expect(r"Serving at (127\.0\.0\.1:\d+)\.", timeout_s=START_TIMEOUT_S)
        async with Client(match[1]) as client:
            for round_number in range(2):
                streams = Streams(client, cases, cache_salt=f"round {round_number}")
                await streams.end(timeout_s=DEADLINE_S)
                assert streams.problems(expected) == []
        await up.expect(r"worker-\d \(pid \d+\) ended: exit code 3", timeout_s=DEADLINE_S)
        await up.expect(r"Restarting worker-\d in 0\.5 s\.")
        await up.expect(r"Restarted worker-\d \(pid \d+\)\.")
        status = await wait_for_status(match[1], is_idle, timeout_s=DEADLINE_S)
        assert status.requests.failed == 0
        up.type(CTRL_C)
        assert await up.exit_code() == 0
        logs = "".join(file.read_text() for file in tmp_path.glob("*/*.log"))
    assert re.search(r"^stageline.* device mock failed: DeviceError: mock: poisoned after 150", logs, re.M)
    assert re.search(r"worker worker-\d is lost: its device failed", logs)


@pytest.mark.full
async def test_a_hung_step_stops_its_process_and_the_other_workers_continue(tmp_path: Path) -> None:
    config = LocalClusterConfig(
        num_workers=2,
        mocks=("step=2ms,hang_after=30", "step=2ms"),
        coordinator_arguments=("--mock-model", MODEL),
        worker_arguments=(("--step-timeout", "1"),) * 2,
        environment=ENVIRONMENT,
        log_directory=tmp_path / "logs",
    )
    prompt = [5, 6, 7]
    async with LocalCluster(config) as cluster, Client(cluster.address) as client:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        tokens = asyncio.create_task(tokens_of(client, prompt, NUM_TOKENS))
        async with asyncio.timeout(DEADLINE_S):
            hung = await cluster.next_exit()
        assert (hung.name, hung.exit_code) == ("worker-0", ExitCode.DEVICE_FAILED)
        assert "a step still computes 1 s after it was given up" in hung.last_lines()[-1]
        assert await tokens == list(mock_tokens(prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE))
        status = await wait_for_status(cluster.address, is_serving)
        assert [worker.name for worker in status.workers if worker.HasField("stage")] == ["worker-1"]
        assert status.requests.failed == 0
        assert status.state == cluster_pb2.CLUSTER_STATE_SERVING
