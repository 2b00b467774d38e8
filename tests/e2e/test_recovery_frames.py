"""Frames and results that are lost, repeated, reordered, truncated, altered or late between processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stageline import Client
from tests.e2e.recovery_setup import (
    DEADLINE_S,
    SHORT_PROMPTS,
    config,
    ends_undisturbed,
    is_idle,
    now_s,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.result_proxy import RESULT_FAULTS, has_tokens
from tests.faults.streams import Stream, Streams, longest_silence_s, undisturbed
from tests.integration.alterations import (
    corrupt_signal,
    delay,
    drop,
    drop_hidden,
    drop_step,
    flip_byte,
    hold_until_next,
    repeat,
    truncate,
)
from wire.frames import Frame

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

SEED = 6
NUM_FAULTS = 2
"""A request is computed again after two faulty steps, so all streams must end rightly."""
HIT_RATE = 0.2
NOTICED_WITHIN_S = 20.0
"""Every faulty frame must begin a new epoch, even where the tokens happen to be right."""

FRAME_FAULTS = {
    "dropped": drop,
    "without its step": drop_step,
    "without its hidden states": drop_hidden,
    "repeated": repeat,
    "reordered": hold_until_next,
    "truncated": truncate,
    "falsified": flip_byte,
    "altered": corrupt_signal,
    "delayed": delay(0.4),
}

QUICK = ("dropped", "truncated", "falsified", "altered")
"""Frame faults of `make test-full`; all of them in one process: tests/integration/test_cluster_faults.py."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(steady: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyCluster]:
    made = config(steady, 3, num_stages=3, logs=tmp_path_factory.mktemp("frames"))
    async with FaultyCluster(made, seed=SEED, has_frame_proxies=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: FaultyCluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(client: Client) -> list[list[int]]:
    return await undisturbed(client, SHORT_PROMPTS)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> random.Random:
    """Generator seeded by the test's name."""
    return random.Random(f"{SEED} {request.node.name}")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,)) for name in FRAME_FAULTS],
)
async def test_faulty_frames_between_stages_produce_no_wrong_token(
    cluster: FaultyCluster,
    client: Client,
    expected: list[list[int]],
    generator: random.Random,
    figures: Figures,
    name: str,
) -> None:
    # Frames into FIRST have no hidden states, and most faults in the rest fail without a checksum.
    victim = (await cluster.places())[generator.choice(("MIDDLE", "LAST"))]
    epoch = (await cluster.until()).epoch
    streams = Streams(client, SHORT_PROMPTS, cache_salt=f"frame {name}")
    await streams.all_have(3)
    injection = cluster.lines[victim].frames.inject(
        FRAME_FAULTS[name], when=lambda frame: _is_hit(frame, generator), times=NUM_FAULTS
    )
    async with asyncio.timeout(DEADLINE_S):
        await injection.happened.wait()
    faulty_s = now_s()
    await ends_undisturbed(cluster, streams, expected)
    if name != "delayed":
        await cluster.until(lambda status: status.epoch > epoch, timeout_s=NOTICED_WITHIN_S)
    figures.record(f"frame {name}: pause", streams.longest_silence_s(since_s=faulty_s))
    cluster.heal()


@pytest.mark.parametrize(
    "name",
    [
        "dropped",
        pytest.param("repeated", marks=pytest.mark.nightly),
        pytest.param("reordered", marks=pytest.mark.nightly),
        "truncated",
        "altered",
        pytest.param("delayed", marks=pytest.mark.nightly),
    ],
)
async def test_faulty_results_of_the_last_stage_produce_no_wrong_token(
    cluster: FaultyCluster,
    client: Client,
    expected: list[list[int]],
    generator: random.Random,
    figures: Figures,
    name: str,
) -> None:
    last = (await cluster.places())["LAST"]
    epoch = (await cluster.until()).epoch
    streams = Streams(client, SHORT_PROMPTS, cache_salt=f"result {name}")
    await streams.all_have(3)
    injection = cluster.lines[last].results.inject(
        RESULT_FAULTS[name],
        when=lambda result: has_tokens(result) and generator.random() < HIT_RATE,
        times=NUM_FAULTS,
    )
    async with asyncio.timeout(DEADLINE_S):
        await injection.happened.wait()
    faulty_s = now_s()
    await ends_undisturbed(cluster, streams, expected)
    if name != "delayed":
        await cluster.until(lambda status: status.epoch > epoch, timeout_s=NOTICED_WITHIN_S)
    figures.record(f"result {name}: pause", streams.longest_silence_s(since_s=faulty_s))
    cluster.heal()


async def test_a_lost_last_frame_is_detected(
    cluster: FaultyCluster, client: Client, expected: list[list[int]], figures: Figures
) -> None:
    last = (await cluster.places())["LAST"]
    stream = Stream(SHORT_PROMPTS[0])
    reading = asyncio.create_task(stream.read(client, cache_salt="alone", timeout_s=15))
    injection = cluster.lines[last].frames.inject(drop, when=lambda frame: len(stream.tokens) > 10)
    async with asyncio.timeout(DEADLINE_S):
        await injection.happened.wait()
        lost_s = now_s()
        await reading
    cluster.heal()
    assert stream.problem(expected[0]) == ""
    figures.record("the only frame lost: pause", longest_silence_s(stream.arrived_s, since_s=lost_s))
    await cluster.until(is_idle)


def _is_hit(frame: Frame, generator: random.Random) -> bool:
    """Select some of the non-empty frames at random."""
    return bool(frame.step.slices) and generator.random() < HIT_RATE
