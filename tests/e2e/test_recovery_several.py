"""Several processes are killed at once, or one after another during recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline import Client, Unavailable
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import is_serving
from tests.e2e.recovery_setup import (
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


async def test_survivors_take_over_when_two_of_four_stages_are_killed(
    steady: Path, tmp_path: Path, figures: Figures
) -> None:
    async with (
        FaultyCluster(config(steady, 4, num_stages=4, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        expected = await undisturbed(client, SHORT_PROMPTS)
        places = await cluster.places()
        streams = Streams(client, SHORT_PROMPTS, cache_salt="two")
        await streams.all_have(5)
        killed_s = now_s()
        await cluster.kill(places["MIDDLE"], places["LAST"])
        await ends_undisturbed(cluster, streams, expected)
        figures.record("kill -9 of two of four, no spare: pause", streams.longest_silence_s(since_s=killed_s))

        await cluster.restart(places["MIDDLE"], places["LAST"])
        status = await cluster.until(
            lambda status: is_serving(status) and sum(w.HasField("stage") for w in status.workers) == 4
        )
        assert status.requests.failed == 0
        await serves_normally(client, SHORT_PROMPTS, expected, salt="grown back")


@pytest.mark.nightly
async def test_two_spares_take_over_when_two_stages_are_killed_at_once(
    steady: Path, tmp_path: Path, figures: Figures
) -> None:
    async with (
        FaultyCluster(config(steady, 5, num_stages=3, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        expected = await undisturbed(client, SHORT_PROMPTS)
        places = await cluster.places()
        streams = Streams(client, SHORT_PROMPTS, cache_salt="two")
        await streams.all_have(5)
        killed_s = now_s()
        await cluster.kill(places["FIRST"], places["LAST"])
        await ends_undisturbed(cluster, streams, expected)
        figures.record("kill -9 of two, two spares: pause", streams.longest_silence_s(since_s=killed_s))
        assert (await cluster.until()).requests.failed == 0


@pytest.mark.nightly
async def test_a_second_spare_takes_over_when_the_first_is_killed_while_it_loads(
    steady: Path, tmp_path: Path
) -> None:
    async with (
        FaultyCluster(config(steady, 5, num_stages=3, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        expected = await undisturbed(client, SHORT_PROMPTS)
        places = await cluster.places()
        spares = set(cluster.worker_names) - set(places.values())
        streams = Streams(client, SHORT_PROMPTS, cache_salt="replacement")
        await streams.all_have(5)
        # A frozen replacement stays in its load until it is killed.
        for spare in spares:
            cluster.freeze(spare)
        await cluster.kill(places["MIDDLE"])
        status = await cluster.until(lambda status: bool(_loading(status) & spares))
        (replacement,) = _loading(status) & spares
        (other,) = spares - {replacement}
        cluster.thaw(other)
        await cluster.kill(replacement)
        await ends_undisturbed(cluster, streams, expected)
        assert other in (await cluster.places()).values()
        assert (await cluster.until()).requests.failed == 0


async def test_without_a_journal_a_killed_coordinator_fails_requests_and_workers_rejoin(
    steady: Path, tmp_path: Path, free_address: str, figures: Figures
) -> None:
    made = config(steady, 3, num_stages=3, logs=tmp_path, listen=free_address)
    async with FaultyCluster(made) as cluster:
        async with Client(cluster.address) as client:
            expected = await undisturbed(client, SHORT_PROMPTS)
            before = await cluster.until()
            streams = Streams(client, SHORT_PROMPTS, cache_salt="coordinator")
            await streams.all_have(5)
            await cluster.kill("coordinator")
            killed_s = now_s()
            await streams.end(timeout_s=2.0)
            assert {type(stream.error) for stream in streams.all} == {Unavailable}
            assert streams.problems(expected, errors=(Unavailable,)) == []
        await cluster.restart("coordinator")
        after = await cluster.until(cluster.has_all_workers)
        figures.record("kill -9 of the coordinator: until it serves again", now_s() - killed_s)
        assert after.epoch > before.epoch
        async with Client(cluster.address) as client:
            await serves_normally(client, SHORT_PROMPTS, expected, salt="coordinator")
        for name in cluster.worker_names:
            log = cluster.cluster.process(name).read_log()
            assert log.count("loaded in") == 1, f"{name} has loaded its weights again"


def _loading(status: cluster_pb2.GetStatusResponse) -> set[str]:
    return {w.name for w in status.workers if w.state == cluster_pb2.WORKER_STATE_LOADING}
