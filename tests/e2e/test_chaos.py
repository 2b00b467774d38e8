"""A minute of chaos, as `make chaos` does it for longer."""

from __future__ import annotations

import pytest

from tests.chaos.run import ChaosConfig, run_chaos

SECONDS = 60.0
SEED = 1


@pytest.mark.chaos
async def test_a_minute_of_random_faults_gives_no_wrong_token_and_leaves_nothing_behind(
    free_address: str,
) -> None:
    report = await run_chaos(ChaosConfig(seconds=SECONDS, seed=SEED), free_address)
    assert report.problems == [], "\n".join(report.lines())
    assert report.num_finished > 0
    assert any(seen.has_new_epoch for seen in report.seen)
