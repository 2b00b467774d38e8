"""Which call follows one that failed, and for how long; no clock and no server."""

import grpc
import pytest

from stageline import DeadlineExceeded
from stageline.patience import Patience
from stageline.reattachment import Reattachment, Way

LOST, NOT_FOUND, EXISTS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)


def test_a_lost_connection_is_followed_by_attach() -> None:
    reattachment = Reattachment(can_generate=True)
    assert reattachment.way is Way.GENERATE
    assert reattachment.follow(LOST, is_connection_loss=True)
    assert reattachment.way is Way.ATTACH
    assert reattachment.follow(LOST, is_connection_loss=True)
    assert reattachment.way is Way.ATTACH


def test_a_request_that_never_arrived_is_sent_again() -> None:
    reattachment = Reattachment(can_generate=True)
    reattachment.follow(LOST, is_connection_loss=True)
    assert reattachment.follow(NOT_FOUND, is_connection_loss=False)
    assert reattachment.way is Way.GENERATE
    assert reattachment.follow(EXISTS, is_connection_loss=False)
    assert reattachment.way is Way.ATTACH


def test_a_request_that_was_heard_of_is_not_sent_again() -> None:
    reattachment = Reattachment(can_generate=True)
    reattachment.has_heard = True
    reattachment.follow(LOST, is_connection_loss=True)
    assert not reattachment.follow(NOT_FOUND, is_connection_loss=False)


def test_one_who_only_attaches_has_nothing_to_send() -> None:
    reattachment = Reattachment(can_generate=False)
    assert reattachment.way is Way.ATTACH
    assert not reattachment.follow(NOT_FOUND, is_connection_loss=False)
    reattachment.follow(LOST, is_connection_loss=True)
    assert not reattachment.follow(NOT_FOUND, is_connection_loss=False)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_a_first_call_that_the_server_refuses_is_the_last(code: grpc.StatusCode) -> None:
    assert not Reattachment(can_generate=True).follow(code, is_connection_loss=False)


@pytest.mark.parametrize("code", set(grpc.StatusCode) - {NOT_FOUND})
def test_a_refusal_after_a_loss_is_the_last_too(code: grpc.StatusCode) -> None:
    reattachment = Reattachment(can_generate=True)
    reattachment.follow(LOST, is_connection_loss=True)
    assert not reattachment.follow(code, is_connection_loss=False)


def test_pauses_grow_to_two_seconds_and_begin_anew_after_an_outage() -> None:
    patience = Patience(outage_s=30, timeout_s=None, now_s=0)
    assert [patience.fail(0) for _ in range(7)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    patience.succeed()
    assert patience.fail(0) == 0


def test_an_outage_is_counted_from_its_first_failure() -> None:
    patience = Patience(outage_s=30, timeout_s=None, now_s=0)
    assert patience.time_left_s(1e6) is None
    patience.fail(100)
    patience.fail(120)
    assert patience.outage_left_s(125) == 5
    assert patience.outage_left_s(131) == 0
    patience.succeed()
    patience.fail(200)
    assert patience.outage_left_s(200) == 30


def test_the_timeout_bounds_calls_and_outages() -> None:
    patience = Patience(outage_s=30, timeout_s=10, now_s=100)
    assert patience.time_left_s(104) == 6
    patience.fail(108)
    assert patience.outage_left_s(108) == 2
    with pytest.raises(DeadlineExceeded, match="the timeout of 10 s has passed"):
        patience.outage_left_s(110)
