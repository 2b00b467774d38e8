"""Full journal disk: the coordinator reports it, pauses, and recovers when there is room."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client, Unavailable
from stageline_rpc.v1 import cluster_pb2, inference_pb2, inference_pb2_grpc
from tests.e2e.clusters import START_TIMEOUT_S, is_idle, wait_for_status
from tests.e2e.commands import ENVIRONMENT, run_stageline
from tests.faults.streams import Stream, mixed_asks
from tests.mock_answers import mock_tokens
from wire.transport import PLAIN

pytestmark = pytest.mark.full


VOCAB_SIZE = 1000
DISK_BYTES = 4 * 2**20
NUM_TOKENS = 400
INFERENCE = "stageline.v1.Inference"
CASES = mixed_asks(6, lengths=(1, 60), max_tokens=NUM_TOKENS, vocab_size=VOCAB_SIZE, seed=3)
EXPECTED = [mock_tokens(case.prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE) for case in CASES]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the journal."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class FullDisk:
    """A cluster of mock stages with long requests and its journal on a small disk."""

    def __init__(self, disk: Path, cluster: LocalCluster, client: Client) -> None:
        self.cluster = cluster
        self.streams = [Stream(case) for case in CASES]
        self._filler = disk / "filler"
        self._tasks = [asyncio.create_task(stream.read(client, timeout_s=120)) for stream in self.streams]

    async def fill(self) -> cluster_pb2.GetStatusResponse:
        """Fill the disk; return the status that reports it, which must come before any request ends."""
        await self._all_have(5)
        _fill(self._filler)
        status = await self._until_journal(cluster_pb2.JOURNAL_STATE_FAILING)
        assert not any(stream.has_ended for stream in self.streams)
        return status

    async def make_room(self) -> cluster_pb2.GetStatusResponse:
        """Free space; return the status once the coordinator writes again."""
        self._filler.unlink()
        return await self._until_journal(cluster_pb2.JOURNAL_STATE_WRITING)

    async def restart_coordinator(self) -> None:
        self.cluster.kill("coordinator", signal.SIGKILL)
        await self.cluster.coordinator.wait()
        await self.cluster.restart("coordinator")

    async def end_rightly(self) -> None:
        """Assert that every accepted request gets all its tokens, once."""
        async with asyncio.timeout(90):
            await asyncio.gather(*self._tasks)
        pairs = zip(self.streams, EXPECTED, strict=True)
        assert [stream.problem(tokens) for stream, tokens in pairs] == [""] * len(CASES)
        await wait_for_status(self.cluster.address, is_idle)

    async def are_paused(self) -> None:
        """Assert that no step is in flight and no token arrives."""
        await wait_for_status(self.cluster.address, lambda status: not status.requests.steps_in_flight)
        before = [len(stream.tokens) for stream in self.streams]
        await asyncio.sleep(0.5)  # absence of tokens needs a wait
        assert [len(stream.tokens) for stream in self.streams] == before
        assert not any(stream.has_ended for stream in self.streams)

    async def _all_have(self, num_tokens: int) -> None:
        async with asyncio.timeout(60):
            while min(len(stream.tokens) for stream in self.streams) < num_tokens:
                await asyncio.sleep(0.01)

    async def _until_journal(
        self, state: cluster_pb2.JournalState.ValueType
    ) -> cluster_pb2.GetStatusResponse:
        return await wait_for_status(self.cluster.address, lambda status: status.journal.state == state)


def config(disk: Path, logs: Path) -> LocalClusterConfig:
    return LocalClusterConfig(
        num_workers=2,
        mocks=("step=10ms",),
        http="127.0.0.1:0",
        coordinator_arguments=(
            *("--mock-model", f"layers=4,vocab={VOCAB_SIZE}"),
            *("--journal", str(disk / "journal.db")),
        ),
        environment=ENVIRONMENT,
        log_directory=logs,
    )


async def test_a_full_disk_is_reported_and_the_coordinator_recovers_by_itself(
    disk: Path, tmp_path: Path
) -> None:
    async with LocalCluster(config(disk, tmp_path / "logs")) as cluster, asyncio.timeout(200):
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert await ready(cluster) == (200, "serving\n")
        async with Client(cluster.address) as client:
            full = FullDisk(disk, cluster, client)
            status = await full.fill()
            assert status.journal.detail.endswith("journal.db cannot be written: database or disk is full")
            await is_reported(cluster, status)
            await is_rejected(cluster.address)
            await full.are_paused()
            status = await full.make_room()
            assert (status.health, status.journal.num_unwritten) == (cluster_pb2.HEALTH_SERVING, 0)
            assert await ready(cluster) == (200, "serving\n")
            assert await healths(cluster.address) == {"": SERVING, INFERENCE: SERVING}
            [completion] = await client.complete([1, 2, 3], max_tokens=4)
            assert list(completion.token_ids) == mock_tokens([1, 2, 3], 4, vocab_size=VOCAB_SIZE)
            await full.restart_coordinator()
            await full.end_rightly()


async def test_a_coordinator_killed_on_a_full_disk_loses_no_request(disk: Path, tmp_path: Path) -> None:
    async with LocalCluster(config(disk, tmp_path / "logs")) as cluster, asyncio.timeout(200):
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            full = FullDisk(disk, cluster, client)
            await full.fill()
            cluster.kill("coordinator", signal.SIGKILL)
            await cluster.coordinator.wait()
            (disk / "filler").unlink()
            await cluster.restart("coordinator")
            await full.end_rightly()


async def is_reported(cluster: LocalCluster, status: cluster_pb2.GetStatusResponse) -> None:
    """Assert the state in status, readiness, both health services and the command line; liveness stays OK."""
    assert status.health == cluster_pb2.HEALTH_DEGRADED
    code, text = await ready(cluster)
    assert (code, text.strip()) == (503, status.journal.detail)
    assert await http(cluster, "healthz") == (200, "ok\n")
    assert await healths(cluster.address) == {"": NOT_SERVING, INFERENCE: NOT_SERVING}
    shown = await run_stageline("status", "--coordinator", cluster.address)
    assert "Journal failing, " in shown.stdout
    assert "degraded, serving" in shown.stdout
    _, metrics = await http(cluster, "metrics")
    assert "stageline_journal_failing_ratio 1" in metrics
    log = cluster.coordinator.read_log()
    assert "cannot be written: database or disk is full: rejecting new requests" in log


async def is_rejected(address: str) -> None:
    """Assert that a new request is rejected with a machine-readable reason."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), max_tokens=4)
    async with PLAIN.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=10):
                pass
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    status = rpc_status.from_call(refused.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("JOURNAL_UNAVAILABLE", "stageline")
    async with Client(address) as client:
        with pytest.raises(Unavailable, match="new requests are rejected until one succeeds"):
            await client.complete([1, 2, 3], max_tokens=4)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def healths(address: str) -> dict[str, Any]:
    """`grpc.health.v1` states of the server and the service."""
    async with PLAIN.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {
            service: (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status
            for service in ("", INFERENCE)
        }


async def ready(cluster: LocalCluster) -> tuple[int, str]:
    return await http(cluster, "readyz")


async def http(cluster: LocalCluster, path: str) -> tuple[int, str]:
    """Status and body."""
    assert cluster.dashboard_url is not None
    return await asyncio.to_thread(_get, cluster.dashboard_url + path)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
