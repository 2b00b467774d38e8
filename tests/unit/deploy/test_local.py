"""The launcher with fake workers and coordinators, which are real processes."""

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deploy import ClusterFailed, LocalCluster, LocalClusterConfig
from stageline_rpc.v1 import cluster_pb2
from tests.fake_processes import FAKE_COMMAND, FAKE_ENVIRONMENT, is_running

MakeConfig = Callable[..., LocalClusterConfig]


def _pids(cluster: LocalCluster) -> list[int]:
    return [process.pid for process in (cluster.coordinator, *cluster.workers)]


def _running(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


async def test_a_cluster_starts_and_stops_all_its_processes(fake_cluster: MakeConfig) -> None:
    seen: list[cluster_pb2.GetStatusResponse] = []
    async with LocalCluster(fake_cluster()) as cluster:
        status = await cluster.wait_until_serving(timeout_s=20, on_status=seen.append)
        pids = _pids(cluster)
        assert [worker.name for worker in status.workers] == ["worker-0", "worker-1"]
        assert seen[-1] is status
        assert cluster.address.startswith("127.0.0.1:")
        assert cluster.line("worker-1")[:5] == [
            "worker",
            "--coordinator",
            cluster.address,
            "--name",
            "worker-1",
        ]
        assert _running(pids) == pids
    assert _running(pids) == []
    assert [worker.describe_exit() for worker in cluster.workers] == ["exit code 0"] * 2


async def test_a_temporary_log_directory_is_removed_at_a_clean_end() -> None:
    config = LocalClusterConfig(num_workers=1, command=FAKE_COMMAND, environment=FAKE_ENVIRONMENT)
    async with LocalCluster(config) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        assert "listening on" in (cluster.log_directory / "coordinator.log").read_text()
    assert not cluster.log_directory.exists()


async def test_logs_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    directory, before = tmp_path / "new" / "logs", os.umask(0)
    try:
        config = LocalClusterConfig(
            num_workers=1, command=FAKE_COMMAND, environment=FAKE_ENVIRONMENT, log_directory=directory
        )
        async with LocalCluster(config) as cluster:
            await cluster.wait_until_serving(timeout_s=20)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


async def test_a_worker_that_ends_while_starting_fails_the_start_with_its_last_lines(
    fake_cluster: MakeConfig,
) -> None:
    async with LocalCluster(fake_cluster(FAKE_FAILING_WORKER="worker-1")) as cluster:
        with pytest.raises(
            ClusterFailed, match=r"worker-1 .* exit code 1(?s:.*)first line(?s:.*)out of memory"
        ):
            await cluster.wait_until_serving(timeout_s=20)


async def test_a_coordinator_that_ends_while_starting_fails_the_start_with_its_last_lines(
    fake_cluster: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ClusterFailed, match=r"coordinator .* exit code 1(?s:.*)no such model"):
        async with LocalCluster(fake_cluster(FAKE_COORDINATOR_FAILS="1")):
            pytest.fail("the cluster has started")
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["coordinator.log"]


async def test_an_impossible_plan_fails_the_start(fake_cluster: MakeConfig) -> None:
    async with LocalCluster(fake_cluster(FAKE_BLOCKED="1")) as cluster:
        with pytest.raises(ClusterFailed, match="workers joined"):
            await cluster.wait_until_serving(timeout_s=20)


@pytest.mark.full
async def test_a_slow_start_reports_the_missing_process(fake_cluster: MakeConfig) -> None:
    async with LocalCluster(fake_cluster()) as cluster:
        cluster.kill("worker-0", signal.SIGSTOP)
        with pytest.raises(ClusterFailed, match=r"not serving after 1 s: . of 2 workers joined; logs are"):
            await cluster.wait_until_serving(timeout_s=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGSTOP])
async def test_hung_processes_are_killed_after_the_grace_period(
    fake_cluster: MakeConfig, number: signal.Signals
) -> None:
    async with LocalCluster(fake_cluster(FAKE_HANGS="1")) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        pids = _pids(cluster)
        cluster.kill("worker-0", number)
        await cluster.stop(grace_s=0.2)
        assert _running(pids) == []
        assert {worker.describe_exit() for worker in cluster.workers} == {"killed by SIGKILL"}


async def test_a_cancelled_stop_kills_processes(fake_cluster: MakeConfig) -> None:
    async with LocalCluster(fake_cluster(FAKE_HANGS="1")) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        pids = _pids(cluster)
        stopping = asyncio.create_task(cluster.stop(grace_s=60))
        done, _ = await asyncio.wait({stopping}, timeout=0.2)
        assert done == set()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert _running(pids) == []


async def test_an_exit_is_reported_once_and_the_worker_can_be_restarted(fake_cluster: MakeConfig) -> None:
    async with LocalCluster(fake_cluster()) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        killed = cluster.process("worker-1")
        cluster.kill("worker-1")
        async with asyncio.timeout(10):
            assert await cluster.next_exit() is killed
        assert killed.describe_exit() == "killed by SIGKILL"

        started = await cluster.restart("worker-1")
        await cluster.wait_until_serving(timeout_s=20)
        assert cluster.workers[1] is started
        assert started.pid != killed.pid
        # Log lines of the previous process are not read as those of the new one.
        assert started.read_log().count("listening on") == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await cluster.next_exit()


async def test_while_running_fails_when_a_process_exits(fake_cluster: MakeConfig) -> None:
    async def answer() -> int:
        return 42

    async with LocalCluster(fake_cluster()) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        assert await cluster.while_running(answer()) == 42
        cluster.kill("coordinator")
        with pytest.raises(ClusterFailed, match=r"coordinator .* killed by SIGKILL"):
            await cluster.while_running(asyncio.Event().wait())


async def test_a_wildcard_coordinator_address_is_dialled_on_loopback(tmp_path: Path) -> None:
    config = LocalClusterConfig(
        num_workers=1,
        listen="0.0.0.0:0",
        command=FAKE_COMMAND,
        environment=FAKE_ENVIRONMENT,
        log_directory=tmp_path,
    )
    async with LocalCluster(config) as cluster:
        assert cluster.address.startswith("127.0.0.1:")
        await cluster.wait_until_serving(timeout_s=20)
