"""Network partitions between hosts, while every process keeps running."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.recovery_setup import (
    SHORT_PROMPTS,
    config,
    ends_correctly_or_with_a_typed_error,
    ends_undisturbed,
    now_s,
    serves_normally,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.network import Network, network_of
from tests.faults.streams import Streams, undisturbed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")
SILENCE_S = 2.5
"""Longer than the lease of two seconds."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_of("coordinator", *WORKERS) as network:
        yield network


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    network: Network, steady: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FaultyCluster]:
    """Three stages and a spare, each on its own host."""
    made = config(
        steady,
        len(WORKERS),
        num_stages=3,
        logs=tmp_path_factory.mktemp("partition"),
        listen=f"{network.hosts['coordinator'].address}:7480",
    )
    made = dataclasses.replace(
        made,
        command=(sys.executable, "-P", "-m", "tests.faults.on_host", network.prefix),
        worker_arguments=tuple(
            ("--insecure", "--listen", f"{network.hosts[name].address}:0") for name in WORKERS
        ),
    )
    async with FaultyCluster(made, connect=network.connect_from("coordinator")) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: FaultyCluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(client: Client) -> list[list[int]]:
    return await undisturbed(client, SHORT_PROMPTS)


async def test_a_stage_unreachable_from_the_coordinator_is_replaced_by_a_spare(
    network: Network, cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    victim = (await cluster.places())["MIDDLE"]
    streams = Streams(client, SHORT_PROMPTS, cache_salt="parted")
    await streams.all_have(5)
    parted_s = now_s()
    network.part("coordinator", victim)
    try:
        # Its neighbours still reach it, so tokens arrive until its lease expires.
        await cluster.until(lambda status: victim not in _stages(status), timeout_s=30)
        await ends_undisturbed(cluster, streams, expected)
        figures.record("coordinator parted from MIDDLE: pause", streams.longest_silence_s(since_s=parted_s))
    finally:
        network.join("coordinator", victim)
    await cluster.until(cluster.has_all_workers)


async def test_an_isolated_host_is_replaced_by_a_spare(
    network: Network, cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    victim = (await cluster.places())["LAST"]
    streams = Streams(client, SHORT_PROMPTS, cache_salt="unplugged")
    await streams.all_have(5)
    unplugged_s = now_s()
    network.pull_cable(victim)
    try:
        await ends_undisturbed(cluster, streams, expected)
        figures.record("cable of LAST pulled: pause", streams.longest_silence_s(since_s=unplugged_s))
        assert victim not in (await cluster.places()).values()
    finally:
        network.plug_cable(victim)
    await cluster.until(cluster.has_all_workers)
    await serves_normally(client, SHORT_PROMPTS, expected, salt="unplugged")


async def test_a_partition_between_stages_produces_no_wrong_token(
    network: Network, cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    places = await cluster.places()
    streams = Streams(client, SHORT_PROMPTS, cache_salt="stages")
    await streams.all_have(5)
    parted_s = now_s()
    network.part(places["MIDDLE"], places["LAST"])
    try:
        await _silence_of(streams, SILENCE_S)
    finally:
        network.join(places["MIDDLE"], places["LAST"])
    await ends_correctly_or_with_a_typed_error(cluster, streams, expected)
    figures.record("MIDDLE parted from LAST: pause", streams.longest_silence_s(since_s=parted_s))
    await cluster.until(cluster.has_all_workers)
    await serves_normally(client, SHORT_PROMPTS, expected, salt="stages")


async def _silence_of(streams: Streams, seconds: float) -> None:
    """Wait until no token has arrived for `seconds`, or all streams have ended."""
    async with asyncio.timeout(30):
        while now_s() - streams.last_arrival_s() < seconds and not all(s.has_ended for s in streams.all):
            await asyncio.sleep(0.05)


def _stages(status: cluster_pb2.GetStatusResponse) -> set[str]:
    """The workers that hold a stage."""
    return {worker.name for worker in status.workers if worker.HasField("stage")}
