"""A worker that hangs for longer than its lease and then continues."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import is_serving
from tests.e2e.recovery_setup import (
    DEADLINE_S,
    SHORT_PROMPTS,
    config,
    ends_undisturbed,
    now_s,
    serves_normally,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.streams import Streams, undisturbed

pytestmark = pytest.mark.full


LATE_MS = 700


async def test_a_worker_that_thaws_after_its_lease_is_rejected_and_joins_as_new(
    steady: Path, tmp_path: Path, figures: Figures
) -> None:
    async with (
        FaultyCluster(config(steady, 4, num_stages=3, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        expected = await undisturbed(client, SHORT_PROMPTS)
        victim = (await cluster.places())["MIDDLE"]
        pid = cluster.cluster.process(victim).pid
        streams = Streams(client, SHORT_PROMPTS, cache_salt="frozen")
        await streams.all_have(5)
        before = await cluster.until()
        frozen_s = now_s()
        cluster.freeze(victim)
        await ends_undisturbed(cluster, streams, expected)
        figures.record("SIGSTOP of MIDDLE, with a spare: pause", streams.longest_silence_s(since_s=frozen_s))
        after = await cluster.until()
        assert after.epoch > before.epoch
        assert victim not in _live(after)

        cluster.thaw(victim)
        await cluster.until(cluster.has_all_workers)
        process = cluster.cluster.process(victim)
        assert process.pid == pid
        async with asyncio.timeout(DEADLINE_S):
            while process.read_log().count("joined the coordinator") < 2:
                await asyncio.sleep(0.05)
        assert (await cluster.until()).epoch == after.epoch, "the thawed worker disturbed the others"
        await serves_normally(client, SHORT_PROMPTS, expected, salt="thawed")


@pytest.mark.nightly
async def test_a_worker_that_hangs_for_less_than_its_lease_is_not_lost(steady: Path, tmp_path: Path) -> None:
    async with (
        FaultyCluster(config(steady, 3, num_stages=3, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        expected = await undisturbed(client, SHORT_PROMPTS)
        streams = Streams(client, SHORT_PROMPTS, cache_salt="frozen")
        await streams.all_have(5)
        epoch = (await cluster.until()).epoch
        for victim in cluster.worker_names:
            cluster.freeze(victim)
            # One heartbeat is late, as shown by its age in the status.
            await cluster.until(partial(_is_late, name=victim))
            cluster.thaw(victim)
            await cluster.until(partial(_is_on_time, name=victim))
        await ends_undisturbed(cluster, streams, expected)
        status = await cluster.until(is_serving)
        assert status.epoch == epoch


def _live(status: cluster_pb2.GetStatusResponse) -> set[str]:
    """Names of the joined workers that are not lost."""
    return {w.name for w in status.workers if w.state != cluster_pb2.WORKER_STATE_LOST}


def _is_late(status: cluster_pb2.GetStatusResponse, *, name: str) -> bool:
    """Whether a heartbeat of this worker is overdue."""
    (age_ms,) = (worker.heartbeat_age.ToMilliseconds() for worker in status.workers if worker.name == name)
    return age_ms > LATE_MS


def _is_on_time(status: cluster_pb2.GetStatusResponse, *, name: str) -> bool:
    return not _is_late(status, name=name)
