"""When a plan is checked, and what follows from what the check finds."""

from __future__ import annotations

import pytest

from coordinator.cluster.cluster_state import (
    AssignStage,
    BeginEpoch,
    CheckPlan,
    ClusterPhase,
    StartServing,
    StopServing,
)
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver


def checking(num_stages: int = 2) -> ClusterDriver:
    """A cluster whose first plan waits for its verdict, in epoch 1."""
    cluster = ClusterDriver(num_stages=num_stages, needs_check=True)
    cluster.join_all(*"abcd"[:num_stages])
    cluster.load_all()
    (check,) = cluster.get_ready()
    assert check == CheckPlan(1, cluster.state.plan)  # type: ignore[arg-type]
    return cluster


def test_a_plan_is_checked_before_it_serves() -> None:
    cluster = checking()
    assert cluster.state.phase is ClusterPhase.CHECKING
    assert cluster.state.detail == "the self-check is under way"


def test_a_good_plan_serves_at_once_in_another_epoch() -> None:
    cluster = checking()
    (begin,) = cluster.state.checked(1, None)
    assert isinstance(begin, BeginEpoch)
    assert (begin.epoch, begin.delay_s) == (2, 0.0)
    (start,) = cluster.get_ready()
    assert isinstance(start, StartServing)
    assert cluster.state.phase is ClusterPhase.SERVING


def test_a_checked_plan_is_not_checked_again() -> None:
    cluster = checking()
    cluster.state.checked(1, None)
    cluster.get_ready()
    cluster.state.epoch_failed(2, "a step fault")
    assert [type(action) for action in cluster.get_ready()] == [StartServing]


def test_a_new_plan_is_checked() -> None:
    cluster = checking()
    cluster.state.checked(1, None)
    cluster.get_ready()
    cluster.join("c")
    cluster.lose("a")
    cluster.load_all()
    assert [type(action) for action in cluster.get_ready()] == [CheckPlan]


def test_an_epoch_that_ends_while_it_is_checked_is_followed_by_one_that_is() -> None:
    cluster = checking()
    stop, begin = cluster.state.epoch_failed(1, "a stream broke")
    assert isinstance(stop, StopServing) and isinstance(begin, BeginEpoch)
    assert cluster.state.checked(1, None) == []
    assert [type(action) for action in cluster.get_ready()] == [CheckPlan]


def test_a_worker_that_is_lost_during_the_check_ends_it() -> None:
    cluster = checking()
    (stop,) = cluster.lose("b")
    assert isinstance(stop, StopServing)
    assert cluster.state.checked(1, None) == []
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS


def test_a_verdict_nobody_waits_for_changes_nothing() -> None:
    cluster = checking()
    assert cluster.state.checked(2, "failed: numbers") == []
    cluster.state.checked(1, None)
    cluster.get_ready()
    assert cluster.state.checked(2, "failed: numbers") == []
    assert cluster.state.phase is ClusterPhase.SERVING


def test_a_plan_with_a_problem_is_given_up_and_says_why() -> None:
    cluster = checking()
    (stop,) = cluster.state.checked(1, "failed: numbers")
    assert isinstance(stop, StopServing)
    assert (cluster.state.phase, cluster.state.plan) == (ClusterPhase.BLOCKED, None)
    assert cluster.state.detail == "the self-check of a, b failed: numbers"


def test_a_refused_plan_is_not_made_again_when_somebody_else_comes_or_goes() -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers")
    assert cluster.join("c") == []
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert cluster.lose("c") == []
    assert cluster.state.phase is ClusterPhase.BLOCKED


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_refused_plan_is_made_again_when_one_of_its_workers_is_another_process(name: str) -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers")
    cluster.lose(name)
    actions = cluster.join(name, incarnation=2)
    assert [type(action) for action in actions] == [AssignStage, AssignStage]
    cluster.load_all()
    assert [type(action) for action in cluster.get_ready()] == [CheckPlan]


def test_other_workers_may_take_the_layers_of_a_refused_plan() -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers")
    cluster.lose("b")
    actions = cluster.join("c")
    assert [type(action) for action in actions] == [AssignStage, AssignStage]


def test_mock_stages_are_not_checked() -> None:
    cluster = ClusterDriver(num_stages=1, needs_check=True)
    cluster.join("a", is_mock=True)
    cluster.load_all()
    assert [type(action) for action in cluster.get_ready()] == [StartServing]
