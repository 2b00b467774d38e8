from __future__ import annotations

import asyncio

import pytest

from bench.harness.raw_ring import RawRing
from bench.harness.ring_message import Lap

LAP = Lap(80, 2048, 40)


@pytest.mark.full
async def test_every_message_passes_all_nodes_of_a_ring_again_and_again() -> None:
    async with RawRing(2, pause_s=0.002) as ring:
        assert 0 < await ring.rate(LAP, settle_s=0.02, window_s=0.1) < 1 / 0.002
        assert await ring.lap(LAP, num_laps=5) > 0


@pytest.mark.full
async def test_a_ring_that_ends_with_messages_in_flight_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with RawRing(2, pause_s=0.05) as ring:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ring.rate(LAP, settle_s=1, window_s=1)
    assert capfd.readouterr().err == ""
