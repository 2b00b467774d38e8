"""When plans are checked, and reactions to the verdict."""

from __future__ import annotations

import pytest

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    CheckPlan,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import WorkerState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.observer import EndCause
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
    assert cluster.state.detail == "the self-check is running"


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


def test_a_check_interrupted_by_the_end_of_its_epoch_is_repeated() -> None:
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


def test_a_stale_verdict_changes_nothing() -> None:
    cluster = checking()
    assert cluster.state.checked(2, "failed: numbers") == []
    cluster.state.checked(1, None)
    cluster.get_ready()
    assert cluster.state.checked(2, "failed: numbers") == []
    assert cluster.state.phase is ClusterPhase.SERVING


def test_a_plan_with_a_problem_is_abandoned_with_the_reason() -> None:
    cluster = checking()
    (stop,) = cluster.state.checked(1, "failed: numbers")
    assert isinstance(stop, StopServing)
    assert (cluster.state.phase, cluster.state.plan) == (ClusterPhase.BLOCKED, None)
    assert cluster.state.detail == "the self-check of a, b failed: numbers"


def test_a_rejected_plan_is_not_repeated_when_a_worker_leaves() -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers")
    cluster.join("c", memory_bytes=0)
    assert cluster.stage_names == ["a", "c"]
    cluster.lose("c")
    assert cluster.state.phase is ClusterPhase.BLOCKED


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_rejected_plan_is_repeated_when_one_of_its_workers_restarted(name: str) -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers")
    cluster.lose(name)
    actions = cluster.join(name, incarnation=2)
    assert [type(action) for action in actions] == [AssignStage, AssignStage]
    cluster.load_all()
    assert [type(action) for action in cluster.get_ready()] == [CheckPlan]


def test_other_workers_may_take_the_layers_of_a_rejected_plan() -> None:
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


# The alternatives


class Checks:
    """A cluster whose plans pass or fail by their layers: `bad` names (worker, layer) pairs."""

    def __init__(self, *, num_stages: int, bad: set[tuple[str, int]], needed_bytes: int = 0) -> None:
        self.cluster = ClusterDriver(num_stages=num_stages, needs_check=True, needed_bytes=needed_bytes)
        self.state = self.cluster.state
        self.bad = bad
        self.checked: list[str] = []
        self.read_again: list[str] = []

    def join(self, *names: str) -> Checks:
        for name in names:
            self._note(self.cluster.join(name))
            self.settle()
        return self

    def lose(self, name: str) -> Checks:
        self._note(self.cluster.lose(name))
        self._note(self.cluster.shrink(self.state._rejoin_timer._num_losses))
        return self.settle()

    def settle(self) -> Checks:
        """Loads and checks until the cluster serves, or waits."""
        while self.state.plan is not None and self.state.phase is not ClusterPhase.SERVING:
            self.cluster.load_all()
            self.cluster.get_ready()
            if self.state.phase is ClusterPhase.CHECKING:
                self.checked.append("".join(self.cluster.stage_names))
                assert len(self.checked) < 50, "plans are tried endlessly"
                self._note(self.state.checked(self.state.epoch, self._problem()))
        return self

    def quarantined(self) -> dict[str, str]:
        out = (worker for worker in self.state.workers if worker.state is WorkerState.QUARANTINED)
        return {worker.identity.name: worker.detail for worker in out}

    def _problem(self) -> str | None:
        assert self.state.plan is not None
        held = {(stage.worker, stage.layer_begin) for stage in self.state.plan.stages}
        return "failed: numbers" if held & self.bad else None

    def _note(self, actions: list[Action]) -> None:
        assigned = [action for action in actions if isinstance(action, AssignStage)]
        self.read_again += [action.worker.name for action in assigned if action.force_reload]


def everywhere(*names: str) -> set[tuple[str, int]]:
    return {(name, layer) for name in names for layer in range(8)}


def test_a_bad_new_worker_is_quarantined_and_the_previous_plan_serves() -> None:
    checks = Checks(num_stages=3, bad=everywhere("d")).join("a", "b", "c")
    checks.lose("c")
    assert checks.cluster.stage_names == ["a", "b"]
    checks.join("d")
    assert checks.state.phase is ClusterPhase.SERVING
    assert checks.cluster.stage_names == ["a", "b"]
    assert checks.checked == ["abc", "ab", "abd", "ab"]
    assert checks.quarantined() == {"d": "the self-check of a, b, d failed: numbers"}
    checks.join("e")
    assert checks.cluster.stage_names == ["a", "b", "e"]


def test_another_spare_replaces_a_bad_spare() -> None:
    checks = Checks(num_stages=2, bad=everywhere("x")).join("a", "b", "x", "y")
    checks.lose("b")
    assert checks.state.phase is ClusterPhase.SERVING
    assert checks.checked == ["ab", "ax", "ay"]
    assert set(checks.quarantined()) == {"x"}


def test_the_remaining_workers_replace_a_bad_spare() -> None:
    checks = Checks(num_stages=2, bad=everywhere("x")).join("a", "b", "x")
    checks.lose("b")
    assert checks.checked == ["ab", "ax", "a"]
    assert checks.cluster.stage_names == ["a"]
    assert set(checks.quarantined()) == {"x"}


@pytest.mark.parametrize("bad", "abc")
def test_the_bad_worker_is_found_among_new_workers(bad: str) -> None:
    checks = Checks(num_stages=3, bad=everywhere(bad)).join("a", "b", "c", "d")
    assert checks.state.phase is ClusterPhase.SERVING
    assert set(checks.quarantined()) == {bad}
    assert bad not in checks.cluster.stage_names


def test_two_bad_workers_among_many_are_found() -> None:
    checks = Checks(num_stages=3, bad=everywhere("b", "d")).join("a", "b", "c", "d", "e")
    assert sorted(checks.cluster.stage_names) == ["a", "c", "e"]
    checks.lose("e")
    assert checks.state.phase is ClusterPhase.SERVING
    assert set(checks.quarantined()) <= {"b", "d"}
    assert not {"b", "d"} & set(checks.cluster.stage_names)


def test_a_worker_that_is_bad_with_some_layers_only_serves_with_others() -> None:
    """It passed with its first layer and fails with another."""
    checks = Checks(num_stages=2, bad={("b", 0)}).join("a", "b")
    checks.lose("a")
    assert checks.state.phase is ClusterPhase.BLOCKED
    assert "the self-check of b failed: numbers" in checks.state.detail
    checks.join("c")
    assert checks.state.phase is ClusterPhase.SERVING
    assert checks.cluster.stage_names == ["c", "b"]


def test_a_suspect_worker_shows_the_reason_and_reloads_its_layers() -> None:
    checks = Checks(num_stages=2, bad=everywhere("a", "b")).join("a", "b")
    record = checks.state.workers["a"]
    assert (record.shown_state, record.shown_detail) == (
        WorkerState.SUSPECT,
        "the self-check of a, b failed: numbers",
    )
    checks.join("c")
    assert checks.checked == ["ab", "ac", "bc"]
    assert checks.read_again == ["a", "b", "c"]
    assert checks.state.phase is ClusterPhase.BLOCKED


def test_a_failed_check_is_a_reason_for_the_end_of_its_epoch() -> None:
    cluster = checking()
    (stop,) = cluster.state.checked(1, "failed: numbers")
    assert stop == StopServing(1, "the self-check failed: numbers", EndCause.FAULT)


def test_a_worker_that_degrades_is_found() -> None:
    """It passed with one layer and fails alone with all of them."""
    checks = Checks(num_stages=2, bad=set()).join("a", "b", "c")
    checks.bad = everywhere("a")
    checks.lose("b")
    assert checks.checked == ["ab", "ac", "a", "c"]
    assert set(checks.quarantined()) == {"a"}


# A check that names the stage, and one of a cluster that serves


def test_only_the_first_deviating_stage_is_suspect() -> None:
    cluster = checking(num_stages=3)
    cluster.state.checked(1, "failed: numbers", stage=1)
    doubts = {worker.identity.name: worker.doubts for worker in cluster.state.workers}
    assert doubts == {"a": (), "b": ("the self-check of a, b, c failed: numbers",), "c": ()}


def test_the_first_deviating_worker_is_replaced_and_quarantined() -> None:
    cluster = checking(num_stages=3)
    cluster.state.checked(1, "failed: numbers", stage=1)
    cluster.join("d")
    assert set(cluster.stage_names) == {"a", "c", "d"}
    cluster.load_all()
    cluster.get_ready()
    cluster.state.checked(cluster.state.epoch, None)
    states = {worker.identity.name: worker.state for worker in cluster.state.workers}
    assert states["b"] is WorkerState.QUARANTINED


def test_a_trusted_worker_can_be_the_cause() -> None:
    cluster = checking(num_stages=2)
    cluster.state.checked(1, None)
    cluster.get_ready()
    cluster.state.doubted(2, "the self-check failed: numbers")
    cluster.get_ready()
    cluster.state.checked(3, "failed: numbers", stage=0)
    assert cluster.state.workers["a"].doubts and not cluster.state.workers["b"].doubts


def test_only_an_epoch_of_a_check_keeps_hidden_states() -> None:
    cluster = ClusterDriver(num_stages=1, needs_check=True)
    cluster.join("a")
    (begin,) = cluster.load_all()
    assert isinstance(begin, BeginEpoch) and begin.is_check
    cluster.get_ready()
    (begin,) = cluster.state.checked(1, None)
    assert isinstance(begin, BeginEpoch) and not begin.is_check


def test_a_plan_that_is_doubted_is_checked_again_before_it_serves() -> None:
    cluster = checking()
    cluster.state.checked(1, None)
    cluster.get_ready()
    stop, begin = cluster.state.doubted(2, "the self-check failed: numbers")
    assert stop == StopServing(2, "the self-check failed: numbers", EndCause.FAULT)
    assert isinstance(begin, BeginEpoch) and (begin.epoch, begin.is_check) == (3, True)
    assert [type(action) for action in cluster.get_ready()] == [CheckPlan]
    cluster.state.checked(3, None)
    assert [type(action) for action in cluster.get_ready()] == [StartServing]


def test_doubts_about_another_epoch_change_nothing() -> None:
    cluster = checking()
    assert cluster.state.doubted(1, "numbers") == []
    cluster.state.checked(1, None)
    cluster.get_ready()
    assert cluster.state.doubted(1, "numbers") == []
    assert cluster.state.phase is ClusterPhase.SERVING


# A reference that may be wrong


def blocked_by_a_reference() -> ClusterDriver:
    """Plan a, b failed against a reference of c, which is the third worker, and so did a, c and b, c."""
    cluster = ClusterDriver(num_stages=2, needs_check=True)
    cluster.join_all(*"abc")
    while cluster.state.plan is not None:
        cluster.load_all()
        cluster.get_ready()
        cluster.state.checked(cluster.state.epoch, "failed: numbers", stage=0, source="c")
    assert cluster.state.phase is ClusterPhase.BLOCKED
    return cluster


def test_plans_that_failed_against_a_dropped_reference_are_made_again() -> None:
    cluster = blocked_by_a_reference()
    assert cluster.state.reference_dropped("b") == []
    actions = cluster.state.reference_dropped("c")
    assert [type(action) for action in actions] == [AssignStage, AssignStage]
    assert cluster.stage_names == ["a", "b"]
    assert not any(record.doubts for record in cluster.state.workers)


def test_a_source_with_wrong_weights_is_quarantined_and_plans_are_repeated() -> None:
    cluster = blocked_by_a_reference()
    actions = cluster.state.weights_differ("c", "tensor x")
    assert [type(action) for action in actions] == [AssignStage, AssignStage]
    assert cluster.stage_names == ["a", "b"]
    assert cluster.state.workers["c"].state is WorkerState.QUARANTINED


def test_a_worker_quarantined_by_a_wrong_reference_is_used_again() -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers", stage=0, source="c")
    cluster.join("c")
    assert cluster.stage_names == ["b", "c"]
    cluster.load_all()
    cluster.get_ready()
    cluster.state.checked(2, None)
    assert cluster.state.workers["a"].state is WorkerState.QUARANTINED
    cluster.get_ready()
    cluster.state.weights_differ("c", "tensor x")
    assert cluster.state.workers["a"].state is WorkerState.LOADING
    assert set(cluster.stage_names) == {"a", "b"}


def test_a_worker_quarantined_by_another_reference_stays_quarantined() -> None:
    cluster = checking()
    cluster.state.checked(1, "failed: numbers", stage=0, source="b")
    cluster.join("c")
    cluster.load_all()
    cluster.get_ready()
    cluster.state.checked(2, None)
    cluster.get_ready()
    cluster.state.reference_dropped("c")
    assert cluster.state.workers["a"].state is WorkerState.QUARANTINED
    assert cluster.state.phase is ClusterPhase.SERVING
