"""A repeatedly breaking connection: requests fail in time with the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline import Client, Unavailable
from tests.e2e.recovery_setup import DEADLINE_S, SHORT_PROMPTS, config, is_idle, serves_normally
from tests.faults.cluster import FaultyCluster
from tests.faults.streams import Streams, undisturbed

pytestmark = pytest.mark.full


RECOVERY_TIMEOUT_S = 4
LEAST_BYTES = 700
"""Enough for a stream to open, too few for a frame of a prompt."""


async def test_a_connection_that_breaks_on_every_attempt_fails_requests_in_time(
    steady: Path, tmp_path: Path
) -> None:
    """The connection from the coordinator, which has no replacement."""
    made = config(
        steady, 2, num_stages=2, logs=tmp_path, flags=("--recovery-timeout", str(RECOVERY_TIMEOUT_S))
    )
    async with FaultyCluster(made, has_proxies=True) as cluster, Client(cluster.address) as client:
        expected = await undisturbed(client, SHORT_PROMPTS)
        line = cluster.lines[(await cluster.places())["FIRST"]].into
        streams = Streams(client, SHORT_PROMPTS, cache_salt="breaks")
        await streams.all_have(2)
        line.reset_after(LEAST_BYTES)
        line.cut()
        await streams.end(timeout_s=DEADLINE_S)
        errors = [stream.error for stream in streams.all if stream.error is not None]
        assert errors and all(isinstance(error, Unavailable) for error in errors), errors
        assert all(
            "no token within 4 s" in str(error) and "without a token" in str(error) for error in errors
        )
        line.reset_after(None)
        line.cut()
        await serves_normally(client, SHORT_PROMPTS, expected, salt="breaks")
        await cluster.until(is_idle)
