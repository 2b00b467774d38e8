"""kill -9 of every role, during prefill and decode of sixteen streams: a spare takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stageline import Client
from tests.e2e.recovery_setup import (
    LONG_PROMPTS,
    SHORT_PROMPTS,
    config,
    ends_undisturbed,
    now_s,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.streams import Streams, undisturbed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = ("FIRST", "MIDDLE", "LAST")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(steady: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyCluster]:
    """Three stages and a spare."""
    made = config(steady, 4, num_stages=3, logs=tmp_path_factory.mktemp("kill"))
    async with FaultyCluster(made) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: FaultyCluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def short(client: Client) -> list[list[int]]:
    return await undisturbed(client, SHORT_PROMPTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long(client: Client) -> list[list[int]]:
    return await undisturbed(client, LONG_PROMPTS)


@pytest.mark.matrix(0, full=2)
@pytest.mark.parametrize("role", ROLES)
async def test_streams_continue_when_a_stage_is_killed_while_they_decode(
    cluster: FaultyCluster, client: Client, short: list[list[int]], role: str, figures: Figures
) -> None:
    victim = (await cluster.places())[role]
    streams = Streams(client, SHORT_PROMPTS, cache_salt=f"decode {role}")
    await streams.all_have(5)
    await _killed(cluster, victim, streams, short, figures, f"kill -9 of {role}, decodes")


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("role", ROLES)
async def test_streams_continue_when_a_stage_is_killed_while_most_are_in_prefill(
    cluster: FaultyCluster, client: Client, long: list[list[int]], role: str, figures: Figures
) -> None:
    victim = (await cluster.places())[role]
    streams = Streams(client, LONG_PROMPTS, cache_salt=f"prefill {role}")
    await streams.some_have(2)
    assert sum(not tokens for tokens in streams.tokens) > len(LONG_PROMPTS) // 2, "too late"
    await _killed(cluster, victim, streams, long, figures, f"kill -9 of {role}, prefill")


async def _killed(
    cluster: FaultyCluster,
    victim: str,
    streams: Streams,
    expected: list[list[int]],
    figures: Figures,
    name: str,
) -> None:
    before = await cluster.until()
    killed_s = now_s()
    await cluster.kill(victim)
    try:
        await ends_undisturbed(cluster, streams, expected)
        figures.record(f"{name}, with a spare: pause", streams.longest_silence_s(since_s=killed_s))
        after = await cluster.until()
        assert after.epoch > before.epoch
        assert after.requests.failed == before.requests.failed
        assert victim not in (await cluster.places()).values()
    finally:
        await cluster.restart(victim)
        await cluster.until(cluster.has_all_workers)
