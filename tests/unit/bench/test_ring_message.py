from __future__ import annotations

import pytest

from bench.harness.ring_message import Lap, Place, passed_on


@pytest.mark.parametrize("lap", [Lap(80, 2048, 40), Lap(8, 0, 8), Lap(1616, 1 << 20, 640)])
def test_every_hop_carries_as_many_bytes_as_between_stages(lap: Lap) -> None:
    message = lap.message()
    assert len(message) == lap.step_bytes
    for place in (Place.FIRST, Place.MIDDLE, Place.MIDDLE):
        message = passed_on(message, place)
        assert len(message) == lap.step_bytes + lap.hidden_bytes
    assert len(passed_on(message, Place.LAST)) == lap.result_bytes
