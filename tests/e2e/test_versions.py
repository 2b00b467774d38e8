"""Processes of different builds together: what docs/operations.md says of upgrades, with real old builds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from httpx2 import AsyncClient

from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.builds import Build, build_of_previous_protocol, oldest_build_of_this_protocol
from tests.e2e.clusters import START_TIMEOUT_S, STEP_FLAGS, VOCAB_SIZE, is_serving, wait_for_status
from tests.e2e.commands import Shell, exit_code, run_stageline, until_logged
from tests.faults.load import ConstantLoad
from tests.faults.streams import Ask, mixed_asks, undisturbed
from wire.channels import PROTOCOL_VERSION, UPGRADE_RULE

pytestmark = pytest.mark.full

MOCK = ("--mock-model", "layers=4,hidden=64", "--stages", "1")
MOCK_WORKER = ("--mock", "step=1ms")
SMALL = ("--memory", "256MiB", "--threads", "1")


@pytest.fixture
def previous(tmp_path: Path) -> Build:
    return build_of_previous_protocol(tmp_path / "previous")


@pytest.fixture
def oldest(tmp_path: Path) -> Build:
    return oldest_build_of_this_protocol(tmp_path / "oldest")


async def test_a_worker_of_the_previous_protocol_is_refused_with_the_rule(
    previous: Build, tmp_path: Path
) -> None:
    async with Shell(tmp_path) as shell:
        head, address = await shell.coordinator(*MOCK)
        at = ("worker", "--coordinator", address, *MOCK_WORKER)
        await shell.start("new", *at, "--name", "new")
        await until_logged(head, "serving: epoch", timeout_s=START_TIMEOUT_S)
        old = await run_stageline(*at, "--name", "old", PYTHONPATH=previous.python_path)
        assert old.code == 1
        (line,) = [line for line in old.stderr.splitlines() if line.startswith("stageline: error[")]
        assert "error[JOIN_REFUSED]" in line
        assert f"expected {PROTOCOL_VERSION}, got {previous.protocol_version}: {UPGRADE_RULE}" in line
        status = await wait_for_status(address, is_serving)
        assert [worker.name for worker in status.workers] == ["new"]


async def test_a_worker_is_refused_by_a_coordinator_of_the_previous_protocol(
    previous: Build, tmp_path: Path
) -> None:
    async with Shell(tmp_path) as shell:
        head = await shell.start(
            "old", "coordinator", *MOCK, "--listen", "127.0.0.1:0", "--no-http", prefix=previous.prefix
        )
        address = await head.listening_address(timeout_s=START_TIMEOUT_S)
        new = await run_stageline("worker", "--coordinator", address, *MOCK_WORKER)
        assert new.code == 1
        assert f"expected {previous.protocol_version}, got {PROTOCOL_VERSION}" in new.stderr


async def test_clients_and_gateways_of_the_previous_protocol_are_served(
    previous: Build, tmp_path: Path
) -> None:
    async with Shell(tmp_path) as shell:
        head, address = await shell.coordinator(*MOCK)
        at = ("--coordinator", address)
        await shell.start("w", "worker", *at, *MOCK_WORKER)
        await until_logged(head, "serving: epoch", timeout_s=START_TIMEOUT_S)
        asked = ("generate", "--token-ids", "1,2,3", "--max-tokens", "9", *at)
        new = await run_stageline(*asked)
        old = await run_stageline(*asked, PYTHONPATH=previous.python_path)
        assert (old.code, old.stdout) == (0, new.stdout)
        status = await run_stageline("status", "--json", *at, PYTHONPATH=previous.python_path)
        assert json.loads(status.stdout)["epoch"] == "1"
        gateway = await shell.start("gw", "gateway", *at, "--listen", "127.0.0.1:0", prefix=previous.prefix)
        url = f"http://{await gateway.listening_address(timeout_s=START_TIMEOUT_S)}"
        assert await _completion(url) == [int(token) for token in new.stdout.split(",")]


async def test_a_cluster_is_upgraded_without_a_failed_request(
    oldest: Build, steady: Path, tmp_path: Path, free_address: str
) -> None:
    """The steps of docs/operations.md, from the oldest build of this protocol, under load."""
    cases = mixed_asks(8, lengths=(1, 90), max_tokens=40, vocab_size=VOCAB_SIZE, seed=45)
    at = ("--coordinator", free_address)
    journal = ("--journal", str(tmp_path / "journal"))
    head = ("coordinator", "--listen", free_address, "--no-http", "--model", str(steady), "--stages", "2")
    async with Shell(tmp_path) as shell:
        coordinator = await shell.start("head", *head, *STEP_FLAGS, *journal, prefix=oldest.prefix)
        for name in ("a", "b"):
            await shell.start(name, "worker", *at, *SMALL, "--name", name, prefix=oldest.prefix)
        await wait_for_status(free_address, is_serving, timeout_s=START_TIMEOUT_S)
        gateway = await shell.start("gw", "gateway", *at, "--listen", "127.0.0.1:0", prefix=oldest.prefix)
        url = f"http://{await gateway.listening_address(timeout_s=START_TIMEOUT_S)}"
        async with Client(free_address) as client:
            answers = dict(zip(cases, await undisturbed(client, cases), strict=True))

            def expected(case: Ask) -> Sequence[int]:
                return answers[case]

            async with ConstantLoad(client, cases, expected, num_streams=4) as load:
                for name, spare in (("a", "c"), ("b", "d")):
                    await shell.start(spare, "worker", *at, *SMALL, "--name", spare)
                    await wait_for_status(free_address, _has_worker(spare), timeout_s=START_TIMEOUT_S)
                    drained = await run_stageline("drain", name, *at)
                    assert drained.stdout == f"worker {name} drained\n", drained.stderr
                    await load.next_token(timeout_s=START_TIMEOUT_S)
                coordinator.send_signal(signal.SIGTERM)
                assert await exit_code(coordinator, timeout_s=START_TIMEOUT_S) == "exit code 0"
                await shell.start("head-again", *head, *STEP_FLAGS, *journal)
                await load.next_token(timeout_s=START_TIMEOUT_S)
            assert load.problems == []
            assert load.num_finished >= len(cases)
        status = await wait_for_status(free_address, is_serving, timeout_s=START_TIMEOUT_S)
        assert [worker.name for worker in status.workers] == ["c", "d"]
        assert status.requests.failed == 0
        before = await _completion(url)
        newer = await shell.start("gw-again", "gateway", *at, "--listen", "127.0.0.1:0")
        newer_url = f"http://{await newer.listening_address(timeout_s=START_TIMEOUT_S)}"
        assert await _completion(newer_url) == before


def _has_worker(name: str) -> Callable[[cluster_pb2.GetStatusResponse], bool]:
    return lambda status: name in {worker.name for worker in status.workers}


async def _completion(url: str) -> list[int]:
    """Greedy tokens of a prompt, from a gateway."""
    body = {"prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    async with AsyncClient(base_url=url, timeout=START_TIMEOUT_S) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
