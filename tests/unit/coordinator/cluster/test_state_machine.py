"""Reactions to joining, loading, faulting and leaving workers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import WorkerState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.cluster.worker_order import LINKS_WAIT_S
from coordinator.engine.observer import EndCause
from coordinator.planner.links import Link
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.rejoin import LinksOverdue, StartTimer
from tests.unit.coordinator.cluster.cluster_driver import WAITS_FOR_RETURN, ClusterDriver, identity_of, kinds


def only_begin(actions: list[Action]) -> BeginEpoch:
    (begin,) = (action for action in actions if isinstance(action, BeginEpoch))
    return begin


# Forming a cluster


def test_no_plan_is_made_before_the_last_worker_joins() -> None:
    cluster = ClusterDriver(num_stages=3)
    assert cluster.state.detail == "0 of 3 workers joined"
    assert cluster.join("a") == []
    assert cluster.join("b") == []
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert cluster.state.detail == (
        "2 of 3 workers joined; layer 2 needs 1 B for weights; free: worker a 999 B, worker b 999 B"
    )
    actions = cluster.join("c")
    assert [type(action) for action in actions] == [AssignStage] * 3
    assert cluster.state.phase is ClusterPhase.LOADING


@pytest.mark.parametrize("order", list(permutations(["gpu-2", "gpu-10", "gpu-1"])))
def test_the_order_of_arrival_does_not_change_the_plan(order: tuple[str, ...]) -> None:
    cluster = ClusterDriver(num_stages=3)
    for name in order:
        cluster.join(name)
    assert cluster.stage_names == ["gpu-1", "gpu-2", "gpu-10"]


def test_each_worker_is_assigned_its_own_stage() -> None:
    cluster = ClusterDriver(num_stages=3)
    actions = cluster.join_all("c", "a", "b")
    assigned = [action for action in actions if isinstance(action, AssignStage)]
    assert [(action.worker.name, action.stage.stage, action.stage.layer_begin) for action in assigned] == [
        ("a", 0, 0),
        ("b", 1, 1),
        ("c", 2, 2),
    ]
    assert {action.plan_id for action in assigned} == {1}
    assert all(action.stage in action.plan.stages for action in assigned)


def test_the_epoch_begins_when_the_last_stage_is_loaded() -> None:
    cluster = ClusterDriver(num_stages=3)
    cluster.join_all("a", "b", "c")
    assert cluster.loaded("b") == []
    assert cluster.loaded("b") == []
    assert cluster.loaded("a") == []
    begin = only_begin(cluster.loaded("c"))
    assert (begin.epoch, begin.plan_id, begin.delay_s) == (1, 1, 0.0)
    assert [worker.name for worker in begin.workers] == ["a", "b", "c"]
    assert cluster.state.phase is ClusterPhase.STARTING_EPOCH


def test_the_first_epoch_is_above_every_epoch_that_a_worker_has_seen() -> None:
    cluster = ClusterDriver(num_stages=3)
    for name, last_epoch in (("a", 4), ("b", 41), ("c", 0)):
        cluster.join(name, last_epoch=last_epoch)
    assert only_begin(cluster.load_all()).epoch == 42


def test_loaded_of_an_older_plan_changes_nothing() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("a")
    assert cluster.state.loaded("a", 0) == []
    assert cluster.state.loaded("a", 2) == []
    assert cluster.state.loaded("unknown", 1) == []
    assert cluster.state.phase is ClusterPhase.LOADING


@pytest.mark.parametrize("missing", ["a", "b", "link", "results"])
def test_serving_needs_every_stage_the_link_and_the_results(missing: str) -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b")
    cluster.load_all()
    signs = {
        "a": lambda: cluster.state.epoch_ready("a", 1),
        "b": lambda: cluster.state.epoch_ready("b", 1),
        "link": lambda: cluster.state.link_open(1),
        "results": lambda: cluster.state.results_open(1),
    }
    for name, sign in signs.items():
        if name != missing:
            assert sign() == []
    assert cluster.state.phase is ClusterPhase.STARTING_EPOCH
    (start,) = signs[missing]()
    assert isinstance(start, StartServing)
    assert (start.epoch, start.plan) == (1, cluster.state.plan)
    assert cluster.state.phase is ClusterPhase.SERVING
    assert [action for sign in signs.values() for action in sign()] == []


def test_a_spare_does_not_count_as_ready() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b", "c")
    cluster.load_all()
    cluster.state.link_open(1)
    cluster.state.results_open(1)
    assert cluster.state.epoch_ready("a", 1) == []
    assert cluster.state.epoch_ready("c", 1) == []
    assert cluster.state.workers["c"].state is WorkerState.SPARE
    assert len(cluster.state.epoch_ready("b", 1)) == 1


# Faults


def test_a_fault_starts_a_new_epoch_on_the_same_plan() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    plan = cluster.state.plan
    stop, begin = cluster.state.epoch_failed(1, "stage 1: SHAPE", EndCause.FAULT)
    assert stop == StopServing(1, "stage 1: SHAPE", EndCause.FAULT)
    assert isinstance(begin, BeginEpoch)
    assert (begin.epoch, begin.plan_id, begin.plan) == (2, 1, plan)
    assert "stage 1: SHAPE" in cluster.state.detail
    assert isinstance(cluster.get_ready()[-1], StartServing)


@pytest.mark.parametrize("missing", ["a", "b", "link", "results"])
def test_signs_of_an_older_epoch_change_nothing(missing: str) -> None:
    """Neither early nor late signals of the old epoch count for the new one."""
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.state.epoch_failed(1, "fault")
    assert cluster.state.epoch_failed(1, "again") == []
    signs: dict[str, Callable[[int], list[Action]]] = {
        "a": lambda epoch: cluster.state.epoch_ready("a", epoch),
        "b": lambda epoch: cluster.state.epoch_ready("b", epoch),
        "link": cluster.state.link_open,
        "results": cluster.state.results_open,
    }
    assert [action for sign in signs.values() for action in sign(1)] == []
    assert [action for name, sign in signs.items() if name != missing for action in sign(2)] == []
    assert cluster.state.phase is ClusterPhase.STARTING_EPOCH
    (start,) = signs[missing](2)
    assert isinstance(start, StartServing)
    assert start.epoch == 2


def test_an_epoch_can_fail_before_it_serves() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b")
    cluster.load_all()
    stop, begin = cluster.state.epoch_failed(1, "not ready in time")
    assert (stop, only_begin([begin]).epoch) == (StopServing(1, "not ready in time", EndCause.BROKEN), 2)


def test_pauses_grow_without_progress_and_reset_with_a_result() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    delays = [only_begin(cluster.state.epoch_failed(epoch, "fault")).delay_s for epoch in range(1, 10)]
    assert delays[0] > 0
    assert delays == sorted(delays)
    assert delays[:3] == sorted(set(delays[:3]))
    assert delays[-1] == DEFAULT_POLICY.max_epoch_delay_s
    cluster.get_ready()
    cluster.state.result_arrived()
    assert only_begin(cluster.state.epoch_failed(10, "fault")).delay_s == 0


def test_another_plan_begins_without_a_pause() -> None:
    """Failures of the last plan do not count for this one."""
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    for epoch in range(1, 4):
        cluster.state.epoch_failed(epoch, "fault")
    cluster.lose("a")
    assert only_begin(cluster.load_all()).delay_s == 0


def test_a_cluster_that_faults_for_days_keeps_trying() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    for epoch in range(1, 1200):
        begin = only_begin(cluster.state.epoch_failed(epoch, "fault"))
    assert (begin.epoch, begin.delay_s) == (1200, DEFAULT_POLICY.max_epoch_delay_s)


# Loss


def test_a_lost_worker_stops_serving_and_the_others_wait() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert cluster.lose("b", "its stream broke") == [
        StopServing(1, "worker b is lost: its stream broke", EndCause.DEATH),
        WAITS_FOR_RETURN,
    ]
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert cluster.state.detail == (
        "worker b is lost: its stream broke; 2 of 3 workers joined; layer 1 needs 1 B for weights; "
        "free: worker a 999 B, worker c 999 B"
    )
    assert cluster.state.plan is None
    assert cluster.state.epoch_failed(1, "late") == []
    assert cluster.names == {"a", "c"}


def test_after_the_rejoin_grace_the_numbers_are_told_once() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    cluster.lose(*cluster.names, "its stream broke")
    before = cluster.state.detail
    assert cluster.shrink() == []
    assert cluster.state.detail == before
    assert before.startswith("worker a is lost: its stream broke; 0 of 1 workers joined")


@pytest.mark.parametrize("newcomer", ["b", "zz", "0"])
def test_a_new_worker_replaces_the_lost_one(newcomer: str) -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.lose("b")
    actions = cluster.join(newcomer)
    assert cluster.stage_names == ["a", newcomer, "c"]
    assert {action.plan_id for action in actions if isinstance(action, AssignStage)} == {2}
    assert only_begin(cluster.load_all()).epoch == 2


def test_a_spare_replaces_a_lost_worker_immediately() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b", "spare")
    cluster.load_all()
    cluster.get_ready()
    actions = cluster.lose("a")
    assert [type(action) for action in actions] == [StopServing, AssignStage, AssignStage]
    assert cluster.stage_names == ["spare", "b"]


def test_a_worker_lost_while_loading_stops_no_epoch() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b")
    assert cluster.lose("a") == []
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert cluster.state.loaded("b", 1) == []
    assert cluster.state.workers["b"].state is WorkerState.SPARE


def test_the_loss_of_an_older_incarnation_changes_nothing() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.state.lose("a", identity_of("a", incarnation=99).incarnation, "late") == []
    assert cluster.state.lose("unknown", identity_of("x").incarnation, "late") == []
    assert cluster.state.phase is ClusterPhase.SERVING


def test_a_spare_that_leaves_leaves_no_trace() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    assert cluster.lose("spare") == []
    assert cluster.names == {"a", "b"}
    assert cluster.state.phase is ClusterPhase.SERVING


def test_waiting_workers_are_recounted_when_one_leaves() -> None:
    cluster = ClusterDriver(num_stages=3)
    cluster.join_all("a", "b")
    cluster.lose("a")
    assert cluster.state.detail.startswith("1 of 3 workers joined; ")


def test_a_restarted_worker_replaces_itself() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    actions = cluster.join("a", incarnation=2)
    assert [type(action) for action in actions] == [StopServing, AssignStage, AssignStage]
    assert cluster.shrink() == []
    assert cluster.stage_names == ["a", "b"]
    assert cluster.state.workers["a"].identity.incarnation == identity_of("a", incarnation=2).incarnation
    assert cluster.state.lose("a", identity_of("a").incarnation, "the old stream") == []


# Trouble with loading and planning


def test_a_worker_that_cannot_load_is_tried_again_once() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b")
    assert [type(action) for action in cluster.fail_load("b")] == [AssignStage] * 2
    assert cluster.stage_names == ["a", "b"]
    assert cluster.state.workers["b"].detail == "could not load its stage: no such file"
    assert isinstance(cluster.load_all()[-1], BeginEpoch)
    assert cluster.state.workers["b"].detail == ""


def test_a_worker_that_fails_to_load_twice_is_quarantined_with_the_reason() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("a")
    cluster.fail_load("a")
    assert cluster.fail_load("a", "disk gone") == []
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert cluster.state.detail == (
        "0 of 1 workers joined; layer 0 needs 1 B for weights; "
        "worker a is out: could not load its stage: disk gone"
    )
    record = cluster.state.workers["a"]
    assert (record.state, record.shown_state) == (WorkerState.QUARANTINED, WorkerState.QUARANTINED)


def test_a_successful_load_resets_the_failure_count() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("a")
    cluster.fail_load("a")
    cluster.load_all()
    cluster.state.epoch_failed(1, "fault")
    cluster.join("a", incarnation=2)
    assert [type(action) for action in cluster.fail_load("a")] == [AssignStage]
    assert cluster.state.workers["a"].state is WorkerState.LOADING


def test_workers_that_can_load_share_the_layers_of_one_that_cannot() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.join("b", incarnation=2)
    cluster.fail_load("b")
    assert [type(action) for action in cluster.fail_load("b")] == [AssignStage] * 2
    assert cluster.stage_names == ["a", "c"]


def test_before_it_has_served_a_cluster_waits_for_all_workers() -> None:
    cluster = ClusterDriver(num_stages=3)
    cluster.join_all("a", "b", "c")
    cluster.fail_load("b")
    assert cluster.fail_load("b") == []
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert "worker b is out" in cluster.state.detail


def test_a_quarantined_worker_is_used_again_after_a_restart() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("b")
    cluster.fail_load("b")
    cluster.fail_load("b")
    actions = cluster.join("b", incarnation=2)
    assert [type(action) for action in actions] == [AssignStage]
    assert cluster.state.workers["b"].num_failed_loads == 0


def test_another_worker_takes_the_place_of_one_that_could_not_load() -> None:
    """It is preferred to a second attempt, and the failed worker stays as a spare."""
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b", "c")
    cluster.fail_load("a")
    assert cluster.stage_names == ["c", "b"]
    assert cluster.state.workers["a"].state is WorkerState.SPARE


def test_when_the_worker_that_failed_to_load_leaves_the_others_wait() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("b")
    cluster.fail_load("b")
    cluster.fail_load("b")
    cluster.lose("b")
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert cluster.state.detail.endswith("0 of 1 workers joined; layer 0 needs 1 B for weights")


def test_a_final_failure_to_load_is_not_tried_again() -> None:
    cluster = ClusterDriver(num_stages=1)
    cluster.join("a")
    assert cluster.state.load_failed("a", 1, "another checkpoint", is_final=True) == []
    assert cluster.state.workers["a"].state is WorkerState.QUARANTINED
    assert cluster.state.phase is ClusterPhase.BLOCKED


def test_a_failure_of_an_older_plan_changes_nothing() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.state.load_failed("a", 0, "late") == []
    assert cluster.state.load_failed("unknown", 1, "late") == []
    assert cluster.state.phase is ClusterPhase.SERVING


def test_a_worker_with_wrong_weights_is_replaced_and_not_reused() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("c")
    state, epoch = cluster.state, cluster.state.epoch
    stop, *assigns = state.weights_differ("a", "tensor x")
    assert stop == StopServing(epoch, "worker a: its weights differ: tensor x", EndCause.FAULT)
    assert {action.worker.name for action in assigns if isinstance(action, AssignStage)} == {"b", "c"}
    assert state.workers["a"].state is WorkerState.QUARANTINED
    cluster.lose("c")
    assert state.phase is not ClusterPhase.SERVING
    assert "a" not in cluster.stage_names
    assert state.weights_differ("a", "reported again") == []
    assert state.workers["a"].detail == "its weights differ: tensor x"


def test_a_spare_with_wrong_weights_is_quarantined_and_the_plan_serves() -> None:
    """It had a stage at the request and has none at the response."""
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("c")
    assert cluster.state.weights_differ("c", "tensor x") == []
    assert cluster.state.phase is ClusterPhase.SERVING
    assert cluster.state.workers["c"].state is WorkerState.QUARANTINED
    cluster.lose("a")
    assert "c" not in cluster.stage_names
    cluster.lose("c")
    cluster.join("c")
    assert "c" in cluster.stage_names


def test_an_impossible_plan_blocks_with_the_numbers() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=100)
    cluster.join("a", memory_bytes=60)
    assert cluster.join("b", memory_bytes=30) == []
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert "90 bytes offered, 100 needed" in cluster.state.detail
    assert all(worker.state is WorkerState.SPARE for worker in cluster.state.workers)


def test_a_blocked_cluster_plans_again_when_a_worker_rejoins_larger() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=100)
    cluster.join("a", memory_bytes=60)
    cluster.join("b", memory_bytes=30)
    assert len(cluster.join("b", memory_bytes=50, incarnation=2)) == 2
    assert cluster.state.phase is ClusterPhase.LOADING


def test_a_blocked_cluster_uses_a_larger_worker_that_joins_late() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=100)
    for name, memory_bytes in (("a", 10), ("b", 60)):
        cluster.join(name, memory_bytes=memory_bytes)
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert [type(action) for action in cluster.join("c", memory_bytes=60)] == [AssignStage] * 2
    assert cluster.stage_names == ["b", "c"]
    assert cluster.state.workers["a"].state is WorkerState.SPARE


def test_workers_are_exchanged_only_where_no_plan_fits() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=50)
    for name, memory_bytes in (("a", 10), ("b", 60)):
        cluster.join(name, memory_bytes=memory_bytes)
    assert cluster.join("c", memory_bytes=60) == []
    assert cluster.stage_names == ["a", "b"]


def test_a_blocked_cluster_plans_again_when_a_failed_worker_rejoins() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=100)
    cluster.join("a", memory_bytes=60)
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    cluster.join("b", memory_bytes=60)
    cluster.fail_load("b")
    cluster.fail_load("b")
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert len(cluster.join("b", memory_bytes=60, incarnation=2)) == 2


# Layers that spares would get


def test_spares_would_get_the_layers_of_each_worker_that_may_be_lost() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert cluster.state.stages_after_loss("a") == [], "no spare"
    cluster.join("d")
    cluster.join("e")
    for place, name in enumerate(("a", "b", "c")):
        (found,) = cluster.state.stages_after_loss(name)
        layers = (found.layer_begin, found.layer_end)
        assert (found.worker, layers) == ("d", (place, place + 1)), "d comes first in every plan"
    for name in ("a", "b", "c"):
        cluster = ClusterDriver(num_stages=3).serving()
        cluster.join("d")
        expected = cluster.state.stages_after_loss(name)
        cluster.lose(name)
        assert [cluster.state.stage_of("d")] == expected, "the real plan is the same"


# Links between workers

FAST, SLOW = Link(round_trip_s=0.001, bytes_per_s=1e9), Link(round_trip_s=0.1, bytes_per_s=1e6)


def measuring_cluster(**options: bool) -> ClusterDriver:
    """Workers a, b and c have joined, each on a host of its own."""
    cluster = ClusterDriver(num_stages=3, orders_by_links=True, **options)
    assert cluster.join("a") == [], "there is no other"
    for name in ("b", "c"):
        overdue = LinksOverdue(name, identity_of(name).incarnation)
        assert cluster.join(name) == [StartTimer(LINKS_WAIT_S, overdue)]
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert cluster.state.detail == "links to others are measured by b, c"
    return cluster


def test_the_first_plan_waits_for_measured_links_and_has_their_order() -> None:
    cluster = measuring_cluster()
    assert cluster.state.links_measured("b", {"a": SLOW}) == [], "other links are not known yet"
    actions = cluster.state.links_measured("c", {"a": FAST, "b": FAST})
    assert cluster.stage_names == ["a", "c", "b"]
    assert [type(action) for action in actions] == [AssignStage] * 3
    assert cluster.state.phase is ClusterPhase.LOADING
    cluster.load_all()
    cluster.get_ready()
    assert cluster.state.links_measured("b", {"a": FAST, "c": SLOW}) == [], "places are kept by then"
    cluster.lose("c")
    cluster.join("d")
    assert cluster.stage_names == ["a", "d", "b"]


def test_links_that_are_not_measured_in_time_are_not_awaited() -> None:
    cluster = measuring_cluster()
    assert cluster.state.links_measured("b", {}) == []
    (late, again) = (LinksOverdue("c", identity_of("c", incarnation=number).incarnation) for number in (1, 2))
    assert cluster.state.elapsed(again) == [], "of another process"
    assert kinds(cluster.state.elapsed(late)) == [AssignStage] * 3
    assert cluster.stage_names == ["a", "b", "c"]
    assert kinds(cluster.state.links_measured("c", {"a": FAST, "b": FAST})) == []
    assert kinds(cluster.state.links_measured("b", {"a": SLOW})) == [AssignStage] * 3, "while it loads"
    assert cluster.stage_names == ["a", "c", "b"]


def test_a_lost_worker_measures_no_links() -> None:
    cluster = measuring_cluster()
    cluster.state.links_measured("b", {})
    cluster.lose("c")
    assert "2 of 3 workers" in cluster.state.detail
    cluster.join("d")
    assert kinds(cluster.state.links_measured("d", {})) == [AssignStage] * 3


@pytest.mark.parametrize("restarted", [False, True])
def test_nothing_is_measured_on_one_host_and_after_a_restart(*, restarted: bool) -> None:
    cluster = ClusterDriver(num_stages=2, orders_by_links=True, has_served=restarted)
    cluster.join("a", address="x:1")
    assert kinds(cluster.join("b", address="y:1" if restarted else "x:2")) == [AssignStage] * 2


def test_workers_that_can_share_memory_are_on_one_host() -> None:
    cluster = ClusterDriver(num_stages=2, orders_by_links=True)
    cluster.join("a", memory_domain="shared")
    assert kinds(cluster.join("b", memory_domain="shared")) == [AssignStage] * 2


def test_workers_of_one_host_are_next_to_each_other() -> None:
    cluster = ClusterDriver(num_stages=3, orders_by_links=True)
    for name, address in (("a", "x:1"), ("b", "y:1"), ("c", "x:2")):
        cluster.join(name, address=address)
    cluster.state.links_measured("b", {"a": SLOW})
    cluster.state.links_measured("c", {"b": SLOW})
    assert cluster.stage_names in (["a", "c", "b"], ["b", "a", "c"], ["b", "c", "a"], ["c", "a", "b"])
