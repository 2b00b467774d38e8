"""Random schedules of gateways, streams and coordinators that break, and the bugs that they must find."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.gateway_schedule import GatewayVerdict, examine_gateways
from tests.simulation.planted_gateways import GATEWAY_BUGS

SEED = 0
QUICK, FULL, LONG = 7, 30, 600
MOST_SCHEDULES = 60
"""In which a planted bug must be found."""


def fingerprint(verdict: GatewayVerdict) -> tuple[object, ...]:
    return verdict.num_events, verdict.ends, verdict.faults, verdict.problems


@pytest.mark.parametrize(
    ("seed", "num_schedules"),
    [
        (SEED, QUICK),
        pytest.param(SEED, FULL, marks=pytest.mark.full),
        pytest.param(SEED + 1, LONG, marks=pytest.mark.nightly),
    ],
)
def test_gateways_get_each_token_once_in_order_under_any_fault(seed: int, num_schedules: int) -> None:
    failed, faults = dict[int, list[str]](), Counter[str]()
    for number in range(num_schedules):
        verdict = examine_gateways(seed, number)
        faults += verdict.faults
        if verdict.problems:
            failed[number] = verdict.problems
    assert not failed, f"see `python -m tests.simulation --gateways --seed {seed} --schedule ...`"
    assert {"kill_gateway", "break_stream", "restart_coordinator"} <= faults.keys()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("bug", GATEWAY_BUGS)
def test_a_planted_bug_of_serve_is_caught(bug: str) -> None:
    with GATEWAY_BUGS[bug]():
        assert any(examine_gateways(SEED, number).problems for number in range(MOST_SCHEDULES))


@pytest.mark.full
def test_a_schedule_of_gateways_can_be_repeated() -> None:
    assert fingerprint(examine_gateways(SEED, 5)) == fingerprint(examine_gateways(SEED, 5))
