"""Epochs that break one after another: suspicion and reports."""

from __future__ import annotations

from coordinator.cluster.actions import Action, AssignStage, BeginEpoch, StopServing
from coordinator.cluster.membership import WorkerState
from coordinator.engine.observer import EndCause
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver
from wire.errors import StepFaultKind
from wire.ids import RequestId
from wire.steps import FaultReport


def cause_of(cluster: ClusterDriver, reason: str = "it broke") -> EndCause:
    """Breaks the current epoch, serves the next one and returns the recorded cause."""
    stop = cluster.state.epoch_failed(cluster.state.epoch, reason)[0]
    assert isinstance(stop, StopServing)
    cluster.get_ready()
    return stop.cause


def test_only_the_third_broken_epoch_in_a_row_blames_requests() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    causes = [cause_of(cluster) for _ in range(4)]
    assert causes == [EndCause.BROKEN, EndCause.BROKEN, EndCause.NO_PROGRESS, EndCause.NO_PROGRESS]


def test_a_token_resets_the_count_and_a_prompt_chunk_does_not() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for _ in range(2):
        cause_of(cluster)
        cluster.state.result_arrived()
    assert cause_of(cluster) is EndCause.NO_PROGRESS
    cluster.state.token_arrived()
    assert cause_of(cluster) is EndCause.BROKEN


def test_a_faulty_step_is_not_a_broken_epoch() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for _ in range(4):
        (stop, _) = cluster.state.epoch_failed(cluster.state.epoch, "SHAPE", EndCause.FAULT)
        assert isinstance(stop, StopServing) and stop.cause is EndCause.FAULT
        cluster.get_ready()


def test_failures_are_reported_with_their_number_until_a_token() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.state.trouble == ""
    cause_of(cluster, "the connection to stage 0 broke")
    assert cluster.state.trouble == "the connection to stage 0 broke"
    cause_of(cluster, "the connection to stage 0 broke")
    assert cluster.state.trouble == (
        "the connection to stage 0 broke; 2 epochs in a row ended without a token"
    )
    cluster.state.token_arrived()
    assert cluster.state.trouble == ""


# Stages whose results are not finite


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def fault(epoch: int, stage: int, *requests: int) -> FaultReport:
    """A fault of these requests, or of two new ones per epoch."""
    ids = tuple(RequestId(bytes([number]) * 16) for number in requests or (10 * epoch, 10 * epoch + 1))
    return FaultReport(
        epoch=epoch,
        step_id=0,
        stage=stage,
        kind=StepFaultKind.NON_FINITE,
        message="numbers",
        request_ids=ids,
    )


def test_a_stage_is_suspect_only_after_failures_of_two_requests() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for epoch in (1, 2, 3):
        assert kinds(cluster.state.stage_failed(fault(epoch, 1, 7))) == [StopServing, BeginEpoch]
    assert kinds(cluster.state.stage_failed(fault(4, 1, 8))) == [StopServing, AssignStage]


def test_a_stage_that_produced_non_finite_steps_twice_is_replaced() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    assert kinds(cluster.state.stage_failed(fault(1, 1))) == [StopServing, BeginEpoch]
    cluster.get_ready()
    cluster.state.result_arrived()
    cluster.state.token_arrived()
    actions = cluster.state.stage_failed(fault(2, 1))
    assert kinds(actions) == [StopServing, AssignStage, AssignStage]
    assert isinstance(actions[0], StopServing) and actions[0].cause is EndCause.FAULT
    assert cluster.stage_names == ["a", "c"]
    record = cluster.state.workers["b"]
    assert (record.shown_state, record.shown_detail) == (
        WorkerState.SUSPECT,
        "stage 1, step 0: NON_FINITE: numbers",
    )


def test_an_irreplaceable_stage_is_retried() -> None:
    cluster = ClusterDriver(num_stages=2, needed_bytes=1500).serving()
    for epoch in (1, 2, 3):
        assert kinds(cluster.state.stage_failed(fault(epoch, 1))) == [StopServing, BeginEpoch]
    assert cluster.state.workers["b"].shown_state is WorkerState.READY


def test_a_retried_stage_reloads_its_layers() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for epoch in (1, 2):
        cluster.state.stage_failed(fault(epoch, 1))
    assert cluster.stage_names == ["a"]
    cluster.lose("a")
    (assign,) = cluster.shrink()
    assert isinstance(assign, AssignStage)
    assert (assign.worker.name, assign.force_reload) == ("b", True)


def test_old_failures_expire_and_late_ones_change_nothing() -> None:
    cluster = ClusterDriver(num_stages=3).serving()
    cluster.state.stage_failed(fault(1, 1))
    assert cluster.state.stage_failed(fault(1, 1)) == []
    cluster.get_ready()
    cluster.state.on_steady()
    assert kinds(cluster.state.stage_failed(fault(2, 1))) == [StopServing, BeginEpoch]
    assert kinds(cluster.state.stage_failed(fault(3, 0))) == [StopServing, BeginEpoch]
