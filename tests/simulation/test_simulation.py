"""Random schedules of faults, on the product as it is."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.campaign import Tally, campaign, examine
from tests.simulation.coverage import DIRECTED, EXPECTED, missing, unlisted
from tests.simulation.directed import DIRECTED as DIRECTED_SCHEDULES
from tests.simulation.directed import directed
from tests.simulation.faults import DEVICE_FAULTS
from tests.simulation.observed import Transition
from tests.simulation.schedule import LEAST_EVENTS, on_failing_devices, run

QUICK, FULL, LONG = 8, 120, 4000
SEED = 0


def check(tally: Tally) -> None:
    failed = {
        f"--seed {schedule.seed} --schedule {schedule.number}": schedule.problems for schedule in tally.failed
    }
    assert not failed, f"see `python -m tests.simulation` with any of {failed}"
    assert tally.num_schedules < LONG or not missing(tally.transitions), "decisions that were never taken"
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


@pytest.mark.parametrize(
    "num_schedules",
    [6, pytest.param(40, marks=pytest.mark.full), pytest.param(800, marks=pytest.mark.nightly)],
)
def test_no_request_fails_by_a_device_that_a_new_process_cures(num_schedules: int) -> None:
    """Devices take several steps, and fail with them: poisoned, out of memory, hung, or killed."""
    tally = Tally(SEED)
    for number in range(num_schedules):
        tally.add(run(on_failing_devices(SEED, number)))
    check(tally)
    assert "ABORTED" not in tally.ends
    assert {fault.__name__ for fault in DEVICE_FAULTS} <= set(tally.faults)


@pytest.mark.parametrize(
    "num_schedules",
    [8, pytest.param(40, marks=pytest.mark.full), pytest.param(800, marks=pytest.mark.nightly)],
)
def test_recurrent_states_are_restored_and_freed_under_any_fault(num_schedules: int) -> None:
    """Each sequence has one slot while it runs; none is lost, and no state is another one's."""
    tally = Tally(SEED)
    for number in range(num_schedules):
        tally.add(examine(SEED, number, has_states=True))
    check(tally)
    assert tally.states.keys() == {"taken", "saved", "restored", "freed", "evicted"}
    assert min(tally.states.values()) > num_schedules


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
