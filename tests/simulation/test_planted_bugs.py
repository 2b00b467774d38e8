"""The test of the test: bugs that are planted are found."""

from __future__ import annotations

import pytest

from tests.simulation.campaign import campaign
from tests.simulation.planted import BUGS

MOST_SCHEDULES = 2000
"""What a minute has room for."""
RARE = {
    "checksums_are_not_compared",
    "checksums_of_payloads_are_not_compared",
    "answers_to_an_earlier_start_count",
    "who_prefills_is_forgotten_when_an_epoch_ends",
}
"""What it takes some hundred schedules to see."""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.full) if bug in RARE else bug for bug in BUGS]
)
def test_a_planted_bug_is_caught(bug: str) -> None:
    tally = campaign(0, num_schedules=MOST_SCHEDULES, num_processes=1, bug=bug)
    assert tally.failed, f"{bug} lived through {tally.num_schedules} schedules"
