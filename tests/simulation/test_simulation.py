"""Random schedules of faults, on the product as it is."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.campaign import Tally, campaign, examine
from tests.simulation.coverage import DIRECTED, EXPECTED, missing, unlisted
from tests.simulation.directed import DIRECTED as DIRECTED_SCHEDULES
from tests.simulation.directed import directed
from tests.simulation.observed import Transition
from tests.simulation.schedule import LEAST_EVENTS, run

QUICK, FULL, LONG = 60, 600, 4000
SEED = 0


def check(tally: Tally) -> None:
    failed = {
        f"--seed {schedule.seed} --schedule {schedule.number}": schedule.problems for schedule in tally.failed
    }
    assert not failed, f"see `python -m tests.simulation` with any of {failed}"
    assert tally.num_schedules < FULL or not missing(tally.transitions), "decisions that were never taken"
    assert not unlisted(tally.transitions), "decisions that the table of the cluster does not list"
    assert tally.least_events >= LEAST_EVENTS


@pytest.mark.parametrize(
    ("seed", "num_schedules"),
    [
        (SEED, QUICK),
        pytest.param(SEED, FULL, marks=pytest.mark.full),
        pytest.param(SEED + 1, LONG, marks=pytest.mark.nightly),
    ],
)
def test_tokens_arrive_once_in_order_under_any_fault(seed: int, num_schedules: int) -> None:
    check(campaign(seed, num_schedules=num_schedules))


def test_directed_schedules_reach_the_rare_transitions() -> None:
    taken = Counter[Transition]()
    for number, name in enumerate(DIRECTED_SCHEDULES):
        verdict = run(directed(number))
        assert not verdict.problems, name
        taken += verdict.transitions
    assert not missing(taken, DIRECTED)
    assert not unlisted(taken)


def test_expected_transitions_are_in_the_transition_table() -> None:
    assert not unlisted(EXPECTED | DIRECTED)


def test_a_schedule_can_be_repeated() -> None:
    assert fingerprint(17) == fingerprint(17)


def fingerprint(number: int) -> tuple[object, ...]:
    verdict = examine(SEED, number)
    return verdict.num_events, verdict.ends, verdict.faults, verdict.transitions
