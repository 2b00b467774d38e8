"""Assignment of stages to workers: which stage, held, quarantined and draining workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.cluster.actions import (
    AssignStage,
    BeginEpoch,
    Disconnect,
    DismissWorker,
    FinishRunning,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import WorkerState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.observer import EndCause
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.rejoin import GraceExpired, HoldExpired, StartTimer
from tests.unit.coordinator.cluster.cluster_driver import (
    WAITS_FOR_RETURN,
    ClusterDriver,
    identity_of,
    kinds,
)


def shown(cluster: ClusterDriver, name: str) -> WorkerState:
    return cluster.state.workers[name].shown_state


# Survivors, and workers that rejoin


def test_survivors_share_the_layers_when_no_worker_rejoins() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert cluster.lose("b")[-1] == WAITS_FOR_RETURN
    actions = cluster.shrink()
    assert kinds(actions) == [AssignStage] * 2
    assert cluster.stage_names == ["a", "c"]
    begin = cluster.load_all()[-1]
    assert isinstance(begin, BeginEpoch)
    assert [worker.name for worker in begin.workers] == ["a", "c"]
    assert isinstance(cluster.get_ready()[-1], StartServing)


def test_a_worker_that_rejoins_in_time_keeps_its_stage() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.lose("a")
    cluster.join("a", incarnation=2)
    assert cluster.stage_names == ["a", "b", "c"]
    assert cluster.shrink() == []
    cluster.load_all()
    assert cluster.shrink() == []
    assert cluster.state.phase is ClusterPhase.STARTING_EPOCH


def test_the_timer_of_an_older_loss_does_nothing() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.lose("a")
    cluster.join("a", incarnation=2)
    assert cluster.lose("b")[-1] == StartTimer(WAITS_FOR_RETURN.delay_s, GraceExpired(2))
    assert cluster.shrink(1) == []
    assert cluster.state.plan is None
    assert kinds(cluster.shrink(2)) == [AssignStage] * 2


def test_a_cluster_that_shrank_grows_when_its_worker_returns_to_its_old_place() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.lose("a")
    cluster.shrink()
    cluster.load_all()
    cluster.get_ready()
    actions = cluster.join("a", incarnation=2)
    assert kinds(actions) == [StopServing] + [AssignStage] * 3
    assert actions[0] == StopServing(2, "3 workers instead of 2", EndCause.REPLANNED)
    assert cluster.stage_names == ["a", "b", "c"]


def test_places_are_kept_over_two_losses() -> None:
    cluster = ClusterDriver(num_stages=4).serving()
    cluster.lose("b")
    cluster.shrink(1)
    cluster.lose("d")
    cluster.shrink(2)
    assert cluster.stage_names == ["a", "c"]
    cluster.join("d", incarnation=2)
    assert cluster.stage_names == ["a", "c", "d"]
    cluster.join("b", incarnation=2)
    assert cluster.stage_names == ["a", "b", "c", "d"]


def test_a_spare_beyond_the_full_size_changes_no_plan() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.join("0") == []
    assert cluster.stage_names == ["a", "b"]


def test_a_spare_becomes_a_stage_while_the_pipeline_may_grow() -> None:
    cluster = ClusterDriver(num_stages=2, max_stages=3).serving()
    assert cluster.state.num_stages == 2
    actions = cluster.join("0")
    assert kinds(actions) == [StopServing] + [AssignStage] * 3
    assert actions[0] == StopServing(1, "3 workers instead of 2", EndCause.REPLANNED)
    assert cluster.stage_names == ["a", "b", "0"], "the others keep their places"
    assert cluster.state.num_stages == 3
    cluster.load_all()
    cluster.get_ready()
    assert cluster.join("z") == [], "the fourth is a spare"


def _lose_the_third(cluster: ClusterDriver) -> None:
    cluster.lose("c")


def _fail_to_load_the_third(cluster: ClusterDriver) -> None:
    cluster.state.load_failed("c", cluster.state.plan_id, "out of memory", is_final=True)


def _fail_the_check(cluster: ClusterDriver) -> None:
    cluster.load_all()
    cluster.get_ready()
    cluster.state.checked(cluster.state.epoch, "wrong logits", stage=2)


@pytest.mark.parametrize("fail", [_lose_the_third, _fail_to_load_the_third, _fail_the_check])
def test_a_pipeline_that_cannot_grow_begins_with_its_own_stages(
    fail: Callable[[ClusterDriver], None],
) -> None:
    cluster = ClusterDriver(num_stages=2, max_stages=3, needs_check=True)
    cluster.join_all("a", "b", "c")
    assert len(cluster.stage_names) == 3
    fail(cluster)
    assert sorted(cluster.stage_names) == ["a", "b"]
    assert cluster.state.phase is ClusterPhase.LOADING


def test_a_drained_stage_is_not_missed() -> None:
    cluster = ClusterDriver(num_stages=2, max_stages=3).serving()
    for act in (cluster.join, cluster.state.drain):
        act("c")
        cluster.load_all()
        cluster.get_ready()
    assert (cluster.stage_names, cluster.state.detail) == (["a", "b"], "")
    assert cluster.state.num_stages == 2


def test_a_restarted_coordinator_waits_for_all_stages_that_it_may_have_had() -> None:
    """Requests of its journal may be too long for the KV cache of fewer."""
    cluster = ClusterDriver(num_stages=2, max_stages=3, has_served=True)
    assert cluster.state.start()
    cluster.join_all("a", "b")
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    cluster.join("c")
    assert cluster.stage_names == ["a", "b", "c"]
    fewer = ClusterDriver(num_stages=2, max_stages=3, has_served=True)
    assert fewer.state.start()
    fewer.join_all("a", "b")
    fewer.shrink(0)
    assert fewer.stage_names == ["a", "b"], "after the grace it takes what there is"


def test_a_pipeline_that_grew_is_complete_only_with_all_its_stages() -> None:
    cluster = ClusterDriver(num_stages=2, max_stages=3).serving()
    cluster.join("c")
    cluster.load_all()
    cluster.get_ready()
    assert cluster.state.detail == ""
    assert cluster.lose("a")[-1] == WAITS_FOR_RETURN
    cluster.shrink()
    cluster.load_all()
    cluster.get_ready()
    assert cluster.state.detail.startswith("with 2 of 3 stages")
    cluster.join("a", incarnation=2)
    assert cluster.stage_names == ["a", "b", "c"]


def test_a_pipeline_begins_with_all_that_have_joined() -> None:
    cluster = ClusterDriver(num_stages=2, max_stages=4)
    cluster.join("a")
    assert cluster.state.plan is None, "it does not begin with less than its stages"
    cluster.join_all("b", "c")
    assert cluster.stage_names == ["a", "b", "c"]
    assert cluster.state.phase is ClusterPhase.LOADING


def test_no_cluster_begins_with_less_than_all() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join("a")
    assert cluster.shrink(0) == []
    assert cluster.state.plan is None


def test_survivors_that_are_too_small_wait_and_report_the_shortage() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=1500).serving()
    cluster.lose("b")
    assert cluster.shrink() == []
    assert cluster.state.phase is ClusterPhase.BLOCKED
    assert "1000 bytes offered, 1500 needed" in cluster.state.detail
    assert kinds(cluster.join("new")) == [AssignStage] * 2


def test_survivors_retry_after_one_failed_load() -> None:
    """Without other workers, no timer would start a plan."""
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.lose("c")
    cluster.shrink()
    assert kinds(cluster.fail_load("b")) == [AssignStage] * 2
    assert cluster.stage_names == ["a", "b"]


# After a coordinator that has served


def test_a_restarted_coordinator_waits_and_then_plans_without_lost_workers() -> None:
    cluster = ClusterDriver(num_stages=3, has_served=True, last_epoch=7)
    assert cluster.state.start() == [StartTimer(DEFAULT_POLICY.coordinator_rejoin_s, GraceExpired(0))]
    assert cluster.join_all("a", "c") == []
    assert cluster.state.phase is ClusterPhase.WAITING_FOR_WORKERS
    assert kinds(cluster.shrink(0)) == [AssignStage] * 2
    begin = cluster.load_all()[-1]
    assert isinstance(begin, BeginEpoch) and begin.epoch == 8


def test_a_restarted_coordinator_does_not_wait_with_all_workers() -> None:
    cluster = ClusterDriver(num_stages=2, has_served=True)
    cluster.state.start()
    assert kinds(cluster.join_all("a", "b")) == [AssignStage] * 2
    cluster.load_all()
    assert cluster.shrink(0) == []


def test_a_restarted_coordinator_uses_the_first_workers_after_the_wait() -> None:
    cluster = ClusterDriver(num_stages=2, has_served=True)
    cluster.state.start()
    assert cluster.shrink(0) == []
    assert kinds(cluster.join("b")) == [AssignStage]


def test_a_first_coordinator_waits_for_all() -> None:
    assert ClusterDriver(num_stages=2).state.start() == []


# Workers that are lost again and again


def flap(cluster: ClusterDriver, name: str, times: int) -> list[list[object]]:
    """Actions after each rejoin; the worker is used when its hold expires."""
    returns = []
    for incarnation in range(2, 2 + times):
        cluster.lose(name)
        actions = cluster.join(name, incarnation=incarnation)
        returns.append(list(actions))
        cluster.state.elapsed(HoldExpired(name, identity_of(name, incarnation=incarnation).incarnation))
    return returns


def test_a_flapping_worker_waits_longer_each_time() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    returns = flap(cluster, "b", 12)
    assert kinds(returns[0]) == [AssignStage] * 2
    delays = [action.delay_s for actions in returns for action in actions if isinstance(action, StartTimer)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]


def test_a_held_worker_is_not_used_and_shows_the_reason() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    flap(cluster, "b", 1)
    cluster.lose("b")
    (timer,) = cluster.join("b", incarnation=9)
    assert timer == StartTimer(0.5, HoldExpired("b", identity_of("b", incarnation=9).incarnation))
    assert shown(cluster, "b") is WorkerState.JOINING
    assert cluster.state.workers["b"].detail == "lost 2 times; it waits 0.5 s before it is used"
    assert kinds(cluster.join("c")) == [AssignStage] * 2
    assert cluster.stage_names == ["a", "c"]
    assert cluster.state.elapsed(timer.timer) == []
    assert (shown(cluster, "b"), cluster.state.workers["b"].detail) == (WorkerState.SPARE, "")
    cluster.lose("a")
    assert cluster.stage_names == ["b", "c"]
    assert cluster.state.elapsed(timer.timer) == []
    assert shown(cluster, "b") is WorkerState.LOADING


def test_the_hold_of_an_older_incarnation_releases_no_worker() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    flap(cluster, "b", 1)
    cluster.lose("b")
    (old,) = cluster.join("b", incarnation=8)
    cluster.join("b", incarnation=9)
    assert isinstance(old, StartTimer)
    assert cluster.state.elapsed(old.timer) == []
    assert shown(cluster, "b") is WorkerState.JOINING


def test_losses_expire_after_a_stable_period() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    flap(cluster, "b", 3)
    cluster.state.on_steady()
    assert kinds(flap(cluster, "b", 1)[0]) == [AssignStage] * 2


def test_a_worker_that_is_lost_as_often_as_the_others_does_not_wait() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    for incarnation in range(2, 8):
        for name in "abc":
            cluster.lose(name)
            assert kinds(cluster.join(name, incarnation=incarnation)) == [AssignStage] * 3


def test_a_worker_needed_for_any_plan_is_not_held() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=1500).serving()
    for returned in flap(cluster, "b", 5)[1:]:
        assert kinds(returned) == [StartTimer, AssignStage, AssignStage]


def test_losses_count_half_after_a_while_with_breaks() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    flap(cluster, "b", 4)
    cluster.state.on_window()
    (actions,) = flap(cluster, "b", 1)
    assert [action.delay_s for action in actions if isinstance(action, StartTimer)] == [1.0], (
        "three losses, not five"
    )
    cluster.state.on_window()
    cluster.state.on_window()
    assert kinds(flap(cluster, "b", 1)[0]) == [AssignStage] * 2


def test_a_silent_worker_has_no_rejoin_timer() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.state.workers.set_silent("b", identity_of("b").incarnation, is_silent=True)
    assert kinds(cluster.lose("b", "no heartbeat for 2.0 s")) == [StopServing, AssignStage]
    assert cluster.stage_names == ["a"]


def test_a_spare_may_join_and_leave_at_any_time() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    assert flap(cluster, "spare", 5) == [[]] * 5
    assert shown(cluster, "spare") is WorkerState.SPARE


# Draining


def test_a_spare_drains_immediately_and_is_notified_once() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    assert cluster.state.drain("spare") == [DismissWorker(identity_of("spare"), "drained")]
    assert shown(cluster, "spare") is WorkerState.DRAINING
    assert cluster.state.drain("spare") == []
    assert cluster.state.phase is ClusterPhase.SERVING
    assert cluster.lose("spare") == []


def test_a_draining_worker_hands_its_layers_to_a_spare() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    actions = cluster.state.drain("a")
    assert actions[0] == StopServing(1, "worker a is drained", EndCause.REPLANNED)
    assert kinds(actions) == [StopServing, AssignStage, AssignStage, DismissWorker]
    assert cluster.stage_names == ["spare", "b"]
    assert cluster.lose("a") == []


def test_a_draining_worker_hands_its_layers_to_the_remaining_workers() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert kinds(cluster.state.drain("b")) == [StopServing, AssignStage, AssignStage, DismissWorker]
    assert cluster.stage_names == ["a", "c"]


def test_a_cluster_plans_without_a_worker_that_leaves_before_serving() -> None:
    cluster = ClusterDriver(num_stages=3)
    cluster.join_all("a", "b", "c")
    assert kinds(cluster.state.drain("b")) == [AssignStage, AssignStage, DismissWorker]
    assert cluster.stage_names == ["a", "c"]


def test_the_last_worker_finishes_running_requests_before_it_leaves() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    worker = identity_of("a")
    assert cluster.state.drain("a") == [FinishRunning(worker)]
    assert cluster.state.phase is ClusterPhase.SERVING
    assert cluster.state.drained("a", worker.incarnation) == [
        StopServing(1, "worker a is drained", EndCause.REPLANNED),
        DismissWorker(worker, "drained"),
    ]
    assert cluster.state.drained("a", worker.incarnation) == []
    assert cluster.state.detail.startswith("worker a is drained; 0 of 1 workers joined; ")


def test_remaining_workers_report_the_shortage_without_a_rejoin_timer() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=1500).serving()
    assert kinds(cluster.state.drain("a")) == [FinishRunning]
    assert kinds(cluster.state.drained("a", identity_of("a").incarnation)) == [StopServing, DismissWorker]
    assert "1000 bytes offered, 1500 needed" in cluster.state.detail
    cluster.lose("a")
    cluster.lose("b")
    assert kinds(cluster.join("b", incarnation=2, memory_bytes=2000)) == [AssignStage]


def test_a_joining_worker_replaces_a_draining_one() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    cluster.state.drain("a")
    actions = cluster.join("b")
    assert kinds(actions) == [StopServing, AssignStage, DismissWorker]
    assert cluster.stage_names == ["b"]
    assert cluster.state.drained("a", identity_of("a").incarnation) == []


def test_drained_of_an_older_incarnation_or_without_a_drain_does_nothing() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    assert cluster.state.drained("a", identity_of("a").incarnation) == []
    cluster.state.drain("a")
    assert cluster.state.drained("a", identity_of("a", incarnation=7).incarnation) == []
    assert cluster.state.drain("unknown") == []


def test_a_draining_worker_gets_no_stage() -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join("a")
    assert kinds(cluster.state.drain("a")) == [DismissWorker]
    assert cluster.join("b") == []
    assert cluster.state.detail.startswith("1 of 2 workers joined; ")


# Silence, neighbours, lateness


def test_a_silent_worker_is_suspect_until_its_next_heartbeat() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    incarnation = identity_of("a").incarnation
    cluster.state.workers.set_silent("a", incarnation, is_silent=True)
    assert shown(cluster, "a") is WorkerState.SUSPECT
    assert cluster.state.phase is ClusterPhase.SERVING
    cluster.state.workers.set_silent("a", identity_of("a", incarnation=2).incarnation, is_silent=False)
    assert shown(cluster, "a") is WorkerState.SUSPECT
    cluster.state.workers.set_silent("a", incarnation, is_silent=False)
    assert shown(cluster, "a") is WorkerState.READY


def test_spares_replace_a_silent_worker() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join_all("spare", "other")
    cluster.state.workers.set_silent("b", identity_of("b").incarnation, is_silent=True)
    cluster.lose("a")
    assert sorted(cluster.stage_names) == ["other", "spare"]


def test_a_stage_unreachable_twice_is_replaced() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert kinds(cluster.state.hop_failed(1, 0, "cannot send")) == [StopServing, BeginEpoch]
    assert cluster.state.hop_failed(1, 0, "again, of the old epoch") == []
    assert kinds(cluster.state.hop_failed(2, 0, "cannot send")) == [StopServing, AssignStage, AssignStage]
    assert cluster.stage_names == ["a", "c"]
    record = cluster.state.workers["b"]
    assert (record.shown_state, record.detail) == (WorkerState.SUSPECT, "cannot send")
    cluster.load_all()
    cluster.get_ready()
    assert kinds(cluster.lose("c")) == [StopServing, StartTimer]
    assert kinds(cluster.state.elapsed(GraceExpired(1))) == [AssignStage, AssignStage]
    assert cluster.stage_names == ["a", "b"], "it may be reached now"


def test_failures_to_reach_a_stage_count_only_in_a_row() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.state.hop_failed(1, 0, "cannot send")
    cluster.get_ready()
    cluster.state.result_arrived()
    assert kinds(cluster.state.hop_failed(2, 0, "cannot send")) == [StopServing, BeginEpoch]
    assert kinds(cluster.state.hop_failed(3, 1, "cannot send")) == [StopServing, BeginEpoch]


def test_an_irreplaceable_unreachable_stage_is_retried() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=1500).serving()
    for epoch in (1, 2, 3):
        assert kinds(cluster.state.hop_failed(epoch, 0, "cannot send")) == [StopServing, BeginEpoch]
    assert cluster.stage_names == ["a", "b"]
    assert shown(cluster, "b") is WorkerState.READY


def test_the_link_from_last_to_the_coordinator_blames_no_stage() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for epoch in (1, 2, 3):
        assert kinds(cluster.state.hop_failed(epoch, 1, "cannot send")) == [StopServing, BeginEpoch]


def test_only_late_workers_are_disconnected() -> None:
    cluster = ClusterDriver(num_stages=3)
    cluster.join_all("a", "b", "c")
    cluster.load_all()
    cluster.state.epoch_ready("b", 1)
    assert cluster.state.epoch_late(2, "late") == []
    assert cluster.state.epoch_late(1, "late") == [
        Disconnect(identity_of("a"), "late"),
        Disconnect(identity_of("c"), "late"),
    ]


@pytest.mark.parametrize("ready", ["", "ab"])
def test_no_worker_is_blamed_for_a_delay_if_all_or_none_are_ready(ready: str) -> None:
    cluster = ClusterDriver(num_stages=2)
    cluster.join_all("a", "b", "spare")
    cluster.load_all()
    for name in (*ready, "spare"):
        cluster.state.epoch_ready(name, 1)
    assert kinds(cluster.state.epoch_late(1, "late")) == [StopServing, BeginEpoch]
    assert cluster.state.epoch_late(1, "late") == []


def test_an_epoch_that_serves_is_not_late() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.state.epoch_late(1, "late") == []


# Who is lost_text


def lost_text(cluster: ClusterDriver) -> dict[str, str]:
    return {worker.identity.name: worker.detail for worker in cluster.state.workers.lost}


def test_a_lost_worker_is_missed_until_all_stages_serve_again() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert cluster.state.detail == ""
    cluster.lose("b", "no heartbeat for 2.1 s")
    assert lost_text(cluster) == {"b": "no heartbeat for 2.1 s; it had layer 1"}
    cluster.shrink()
    cluster.load_all()
    cluster.get_ready()
    assert list(lost_text(cluster)) == ["b"]
    assert cluster.state.detail == "with 2 of 3 stages; worker b is lost"
    cluster.join("d")
    assert list(lost_text(cluster)) == ["b"], "no tokens come of the new plan yet"
    cluster.load_all()
    cluster.get_ready()
    assert lost_text(cluster) == {}
    assert cluster.state.detail == ""


def test_a_rejoined_worker_is_not_missed() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.lose("b")
    cluster.join("b", incarnation=2)
    assert lost_text(cluster) == {}


def test_spares_and_drained_workers_are_not_missed() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    cluster.join("spare")
    cluster.lose("spare")
    cluster.state.drain("a")
    cluster.lose("a")
    assert lost_text(cluster) == {}


def test_the_list_of_missed_workers_is_bounded() -> None:
    cluster = ClusterDriver(num_stages=1).serving()
    for number in range(12):
        cluster.lose(cluster.stage_names[0])
        cluster.join(f"worker-{number}")
    assert len(lost_text(cluster)) == DEFAULT_POLICY.max_remembered_losses
    assert "worker-10" in lost_text(cluster)
