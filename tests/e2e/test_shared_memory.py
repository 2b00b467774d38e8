"""Workers of one host share memory: the same tokens, recovery from every end, and no segment left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.recovery_setup import (
    SHORT_PROMPTS,
    config,
    ends_undisturbed,
    serves_normally,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.streams import Streams, undisturbed

pytestmark = pytest.mark.full

SHARED, GRPC = cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY, cluster_pb2.HOP_TRANSPORT_GRPC
SEGMENT = "stageline-payloads"


def shares_memory(status: cluster_pb2.GetStatusResponse) -> bool:
    hops = [worker for worker in status.workers if worker.HasField("stage")][:-1]
    return bool(hops) and all(worker.hop_transport == SHARED for worker in hops)


def travels_on_streams(status: cluster_pb2.GetStatusResponse) -> bool:
    hops = [worker for worker in status.workers if worker.HasField("stage")][:-1]
    return bool(hops) and all(worker.hop_transport == GRPC for worker in hops)


def segments_of(pid: int) -> set[str]:
    """Inodes of the segments that a process has mapped; none if it has ended, or belongs to another user."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {line.split()[4] for line in maps.splitlines() if SEGMENT in line}


def segments_of_stages(status: cluster_pb2.GetStatusResponse) -> set[str]:
    """Of the stages of `status`, each of which has one."""
    found = [segments_of(worker.pid) for worker in status.workers if worker.HasField("stage")]
    assert all(found)
    return set[str]().union(*found)


def segments_of_all_processes() -> set[str]:
    """Also of clusters of other tests."""
    return set[str]().union(*(segments_of(int(name)) for name in os.listdir("/proc") if name.isdigit()))


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("role", ["FIRST", "LAST"], ids=["sender", "receiver"])
async def test_streams_continue_when_an_end_of_shared_memory_is_killed(
    steady: Path, tmp_path: Path, role: str
) -> None:
    async with (
        FaultyCluster(config(steady, 3, num_stages=2, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        before = await cluster.until(shares_memory)
        segments = segments_of_stages(before)
        expected = await undisturbed(client, SHORT_PROMPTS)
        streams = Streams(client, SHORT_PROMPTS, cache_salt=role)
        await streams.all_have(5)
        await cluster.kill((await cluster.places())[role])
        await ends_undisturbed(cluster, streams, expected)
        after = await cluster.until(shares_memory)
        assert after.epoch > before.epoch
        segments |= segments_of_stages(after)
    assert not segments & segments_of_all_processes()


@pytest.mark.nightly
async def test_streams_continue_when_a_reader_of_shared_memory_stalls(steady: Path, tmp_path: Path) -> None:
    async with (
        FaultyCluster(config(steady, 3, num_stages=2, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        before = await cluster.until(shares_memory)
        expected = await undisturbed(client, SHORT_PROMPTS)
        streams = Streams(client, SHORT_PROMPTS, cache_salt="stalled")
        await streams.all_have(5)
        victim = (await cluster.places())["LAST"]
        cluster.freeze(victim)
        await ends_undisturbed(cluster, streams, expected)
        assert (await cluster.until(shares_memory)).epoch > before.epoch
        cluster.thaw(victim)
        await cluster.until(cluster.has_all_workers)
        await serves_normally(client, SHORT_PROMPTS, expected, salt="after the stall")


async def test_streams_that_carry_all_hidden_states_continue_when_a_stage_is_killed(
    steady: Path, tmp_path: Path
) -> None:
    """No way beside the streams comes back with the next epoch."""
    flags = ("--hidden-states", "grpc")
    async with (
        FaultyCluster(config(steady, 3, num_stages=2, logs=tmp_path, flags=flags)) as cluster,
        Client(cluster.address) as client,
    ):
        before = await cluster.until(travels_on_streams)
        expected = await undisturbed(client, SHORT_PROMPTS)
        streams = Streams(client, SHORT_PROMPTS, cache_salt="streams")
        await streams.all_have(5)
        await cluster.kill((await cluster.places())["LAST"])
        await ends_undisturbed(cluster, streams, expected)
        after = await cluster.until(travels_on_streams)
        assert after.epoch > before.epoch
        stages = [worker for worker in after.workers if worker.HasField("stage")]
        assert [segments_of(worker.pid) for worker in stages] == [set(), set()]


async def test_killed_processes_leave_no_segment(steady: Path, tmp_path: Path) -> None:
    async with FaultyCluster(config(steady, 2, num_stages=2, logs=tmp_path)) as cluster:
        segments = segments_of_stages(await cluster.until(shares_memory))
        assert len(segments) == 1
        await cluster.kill(*cluster.worker_names)
        assert not segments & segments_of_all_processes()
        assert not list(Path("/dev/shm").glob(f"*{SEGMENT}*"))
