"""Epochs that break, one after another: what is suspected, and what is said."""

from __future__ import annotations

from coordinator.cluster.actions import EndCause, StopServing
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver


def cause_of(cluster: ClusterDriver, reason: str = "it broke") -> EndCause:
    """That of the end of the present epoch, which breaks; another one serves after it."""
    stop = cluster.state.epoch_failed(cluster.state.epoch, reason)[0]
    assert isinstance(stop, StopServing)
    cluster.get_ready()
    return stop.cause


def test_an_epoch_that_breaks_blames_nobody_and_the_third_in_a_row_does() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    causes = [cause_of(cluster) for _ in range(4)]
    assert causes == [EndCause.BROKEN, EndCause.BROKEN, EndCause.FRUITLESS, EndCause.FRUITLESS]


def test_a_token_makes_up_for_what_broke_and_a_part_of_a_prompt_does_not() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for _ in range(2):
        cause_of(cluster)
        cluster.state.result_arrived()
    assert cause_of(cluster) is EndCause.FRUITLESS
    cluster.state.token_arrived()
    assert cause_of(cluster) is EndCause.BROKEN


def test_a_faulty_step_is_no_break() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    for _ in range(4):
        (stop, _) = cluster.state.epoch_failed(cluster.state.epoch, "SHAPE", EndCause.FAULT)
        assert isinstance(stop, StopServing) and stop.cause is EndCause.FAULT
        cluster.get_ready()


def test_the_trouble_is_told_with_its_number_and_ends_with_a_token() -> None:
    cluster = ClusterDriver(num_stages=2).serving()
    assert cluster.state.trouble == ""
    cause_of(cluster, "the connection to stage 0 broke")
    assert cluster.state.trouble == "the connection to stage 0 broke"
    cause_of(cluster, "the connection to stage 0 broke")
    assert cluster.state.trouble == (
        "the connection to stage 0 broke, and so or in a like way ended 2 epochs without a token"
    )
    cluster.state.token_arrived()
    assert cluster.state.trouble == ""
