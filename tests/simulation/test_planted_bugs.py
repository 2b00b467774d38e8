"""The test of the test: bugs that are planted are found."""

from __future__ import annotations

import pytest

from tests.simulation.campaign import campaign, examine
from tests.simulation.planted import BUGS

SEED = 0
MOST_SCHEDULES = 2000
"""What a minute has room for."""
CAUGHT_BY = {"checksums_are_not_compared": 859, "checksums_of_payloads_are_not_compared": 300}
"""Schedules that see what takes some hundred schedules to see: tried first. A change of the product may make
another schedule see it; then all are tried, and the failure of none is one of the test.
"""
RARE = ("answers_to_an_earlier_start_count", "who_prefills_is_forgotten_when_an_epoch_ends")
"""Seen by one of some hundred schedules, each time by another one."""


QUICK = ("a_shared_page_is_freed_with_its_first_owner", "a_slot_keeps_the_state_of_the_sequence_before")
"""Seen within seconds."""


def _tier(bug: str) -> tuple[pytest.MarkDecorator, ...]:
    if bug in RARE:
        return (pytest.mark.nightly,)
    return () if bug in QUICK else (pytest.mark.full,)


@pytest.mark.matrix(2, full=6)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=_tier(bug)) for bug in BUGS])
def test_a_planted_bug_is_caught(bug: str) -> None:
    if bug in CAUGHT_BY and examine(SEED, CAUGHT_BY[bug], bug).problems:
        return
    tally = campaign(SEED, num_schedules=MOST_SCHEDULES, num_processes=1, bug=bug)
    assert tally.failed, f"{bug} lived through {tally.num_schedules} schedules"
