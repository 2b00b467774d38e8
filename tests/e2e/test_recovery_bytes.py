"""Connections between real processes that are slow, stall, break or corrupt bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stageline import Client
from tests.e2e.clusters import is_serving
from tests.e2e.recovery_setup import (
    DEADLINE_S,
    SHORT_PROMPTS,
    config,
    ends_undisturbed,
    is_idle,
    now_s,
    serves_normally,
)
from tests.faults.byte_proxy import ByteProxy, Direction
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.streams import Streams, undisturbed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

SEED = 8
ROLES = (
    pytest.param("FIRST", marks=pytest.mark.nightly),
    "MIDDLE",
    pytest.param("LAST", marks=pytest.mark.nightly),
)
WITHIN_BYTES = 20_000
"""One flipped bit per this many bytes of a hop: some frames of sixteen decodes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(steady: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyCluster]:
    made = config(steady, 3, num_stages=3, logs=tmp_path_factory.mktemp("bytes"))
    async with FaultyCluster(made, seed=SEED, has_proxies=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: FaultyCluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(client: Client) -> list[list[int]]:
    return await undisturbed(client, SHORT_PROMPTS)


@pytest.mark.parametrize("role", ROLES)
async def test_a_cut_connection_between_stages_is_reestablished(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures, role: str
) -> None:
    line = await _line_into(cluster, role)
    streams = Streams(client, SHORT_PROMPTS, cache_salt=f"cut {role}")
    await streams.all_have(5)
    cut_s = now_s()
    line.cut()
    await ends_undisturbed(cluster, streams, expected)
    figures.record(f"connection into {role} cut: pause", streams.longest_silence_s(since_s=cut_s))


async def test_cut_connections_to_the_coordinator_are_reestablished(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    last = (await cluster.places())["LAST"]
    streams = Streams(client, SHORT_PROMPTS, cache_salt="cut results")
    await streams.all_have(5)
    cut_s = now_s()
    cluster.lines[last].out.cut()
    await ends_undisturbed(cluster, streams, expected)
    figures.record("LAST cut off the coordinator: pause", streams.longest_silence_s(since_s=cut_s))


async def test_slow_connections_cause_no_fault(
    cluster: FaultyCluster, client: Client, expected: list[list[int]]
) -> None:
    epoch = (await cluster.until()).epoch
    for lines in cluster.lines.values():
        lines.into.delay(0.02)
        lines.out.delay(0.02)
    streams = Streams(client, SHORT_PROMPTS, cache_salt="slow")
    await ends_undisturbed(cluster, streams, expected)
    cluster.heal()
    assert (await cluster.until()).epoch == epoch


MOST_FLIPS = 4
"""A few bytes of a connection have no effect, such as those of a ping; most are detected."""


@pytest.mark.parametrize("role", ROLES)
async def test_a_flipped_bit_between_stages_produces_no_wrong_token(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures, role: str
) -> None:
    line = await _line_into(cluster, role)
    epoch = (await cluster.until()).epoch
    for attempt in range(MOST_FLIPS):
        streams = Streams(client, SHORT_PROMPTS, cache_salt=f"flip {role} {attempt}")
        await streams.all_have(3)
        flip = line.flip(Direction.FORTH, within_bytes=WITHIN_BYTES)
        async with asyncio.timeout(DEADLINE_S):
            await flip.happened.wait()
        flipped_s = now_s()
        await ends_undisturbed(cluster, streams, expected)
        if (await cluster.until()).epoch > epoch:
            break
    else:
        raise AssertionError(f"none of {MOST_FLIPS} flipped bits was noticed")
    figures.record(f"bit flipped into {role}: pause", streams.longest_silence_s(since_s=flipped_s))


async def test_a_stalled_connection_between_stages_makes_steps_overdue(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    line = await _line_into(cluster, "LAST")
    streams = Streams(client, SHORT_PROMPTS, cache_salt="stall")
    await streams.all_have(5)
    epoch = (await cluster.until()).epoch
    stalled_s = now_s()
    line.stall()
    try:
        await cluster.until(lambda status: status.epoch > epoch, timeout_s=20)
    finally:
        line.flow()
    await ends_undisturbed(cluster, streams, expected)
    figures.record("connection into LAST stalls: pause", streams.longest_silence_s(since_s=stalled_s))


async def test_a_worker_partitioned_beyond_its_lease_rejoins(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    victim = (await cluster.places())["MIDDLE"]
    streams = Streams(client, SHORT_PROMPTS, cache_salt="partition")
    await streams.all_have(5)
    before = await cluster.until()
    parted_s = now_s()
    cluster.lines[victim].partition()
    await cluster.until(lambda status: not is_serving(status) or status.epoch > before.epoch)
    cluster.heal()
    await ends_undisturbed(cluster, streams, expected)
    figures.record("MIDDLE partitioned until noticed: pause", streams.longest_silence_s(since_s=parted_s))
    await cluster.until(cluster.has_all_workers)
    await serves_normally(client, SHORT_PROMPTS, expected, salt="partition")
    await cluster.until(is_idle)


async def _line_into(cluster: FaultyCluster, role: str) -> ByteProxy:
    return cluster.lines[(await cluster.places())[role]].into
