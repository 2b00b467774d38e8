"""A request that kills every process that computes it, among requests that must succeed."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from stageline import Client, ServerError
from tests.e2e.clusters import VOCAB_SIZE
from tests.e2e.recovery_setup import DEADLINE_S, is_idle, mock_config
from tests.faults.cluster import FaultyCluster
from tests.faults.streams import Stream, Streams, mixed_asks
from tests.mock_answers import mock_tokens
from tests.poisoned_stageline import POISON_VARIABLE

POISON = VOCAB_SIZE - 1
NUM_TOKENS = 60
CASES = [
    case
    for case in mixed_asks(24, lengths=(1, 40), max_tokens=NUM_TOKENS, vocab_size=POISON, seed=47)
    if POISON not in mock_tokens(case.prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE)
]
EXPECTED = [list(mock_tokens(case.prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE)) for case in CASES]


@pytest.mark.full
async def test_a_request_that_kills_its_workers_fails_alone(
    tmp_path: Path,
) -> None:
    made = dataclasses.replace(
        mock_config(3, num_stages=3, logs=tmp_path, times="step=5ms"),
        command=(sys.executable, "-m", "tests.poisoned_stageline"),
    )
    made = dataclasses.replace(made, environment={**made.environment, POISON_VARIABLE: str(POISON)})
    async with FaultyCluster(made) as cluster, Client(cluster.address) as client:
        restarting = asyncio.create_task(_keep_up(cluster))
        streams = Streams(client, CASES)
        await streams.all_have(3)
        poison = Stream(dataclasses.replace(CASES[0], prompt=(1, 2, POISON, 3)))
        await asyncio.wait_for(poison.read(client, cache_salt="poison"), DEADLINE_S)
        await streams.end(timeout_s=DEADLINE_S)
        await cluster.until(is_idle)
        restarting.cancel()
        await asyncio.gather(restarting, return_exceptions=True)
    assert isinstance(poison.error, ServerError) and poison.error.code == "INTERNAL"
    assert "2 workers were lost while this request alone ran" in str(poison.error)
    assert not poison.tokens
    assert streams.problems(EXPECTED) == []


async def _keep_up(cluster: FaultyCluster) -> None:
    """Restart ended processes, as a supervisor does."""
    while True:
        process = await cluster.cluster.next_exit()
        await cluster.restart(process.name)
