"""When a worker counts as ready: the messages of its Join stream in, conditions out."""

from __future__ import annotations

import pytest

from stage_worker.readiness import Readiness, Usefulness
from stageline_rpc.internal.v1 import join_pb2

Message = join_pb2.JoinRequest | join_pb2.JoinResponse


def response(name: str, **fields: object) -> join_pb2.JoinResponse:
    message = join_pb2.JoinResponse()
    part = getattr(message, name)
    part.SetInParent()
    for field, value in fields.items():
        setattr(part, field, value)
    return message


def request(name: str) -> join_pb2.JoinRequest:
    message = join_pb2.JoinRequest()
    getattr(message, name).SetInParent()
    return message


WELCOME, ANSWER, ASSIGN = response("welcome"), response("heartbeat_answer"), response("assign")
SERVES, PAUSES = response("serving", is_serving=True), response("serving")
REPLACED, DISMISSED = response("leave"), response("leave", exit_process=True)
LOADED, FAILED, DIFFER = request("loaded"), request("load_failed"), request("weights_differ")
DRAINS, BEATS = request("drain_requested"), request("heartbeat")


def after(*messages: Message) -> Usefulness:
    readiness = Readiness()
    for message in messages:
        readiness.observe(message)
    return Usefulness(readiness.condition())


@pytest.mark.parametrize(
    ("messages", "state"),
    [
        ((), Usefulness.CONNECTING),
        ((WELCOME, BEATS), Usefulness.JOINING),
        ((WELCOME, BEATS, ANSWER), Usefulness.SPARE),
        ((WELCOME, BEATS, ANSWER, SERVES), Usefulness.SPARE),
        ((WELCOME, ASSIGN, ANSWER), Usefulness.LOADING),
        ((WELCOME, ASSIGN, SERVES), Usefulness.LOADING),
        ((WELCOME, ASSIGN, LOADED), Usefulness.STARTING),
        ((WELCOME, ASSIGN, LOADED, PAUSES), Usefulness.STARTING),
        ((WELCOME, ASSIGN, LOADED, SERVES), Usefulness.SERVING),
        ((WELCOME, ASSIGN, LOADED, SERVES, PAUSES, response("end_epoch")), Usefulness.SERVING),
        ((WELCOME, ASSIGN, LOADED, SERVES, ASSIGN), Usefulness.LOADING),
        ((WELCOME, ASSIGN, FAILED), Usefulness.REJECTED),
        ((WELCOME, ASSIGN, LOADED, SERVES, DIFFER, SERVES), Usefulness.REJECTED),
        ((WELCOME, ASSIGN, LOADED, SERVES, DRAINS, SERVES, LOADED), Usefulness.LEAVING),
        ((WELCOME, DISMISSED, WELCOME), Usefulness.LEAVING),
        ((WELCOME, ANSWER, REPLACED), Usefulness.SPARE),
    ],
)
def test_messages_decide(messages: tuple[Message, ...], state: Usefulness) -> None:
    assert after(*messages) is state


def test_the_ready_states_are_those_in_which_a_rolling_restart_may_go_on() -> None:
    assert {state for state in Usefulness if state.value.is_ready} == {Usefulness.SPARE, Usefulness.SERVING}


def test_a_lost_coordinator_and_a_stop_are_not_ready() -> None:
    readiness = Readiness()
    for message in (WELCOME, ASSIGN, LOADED, SERVES):
        readiness.observe(message)
    assert readiness.condition().is_ready
    readiness.disconnected()
    assert Usefulness(readiness.condition()) is Usefulness.CONNECTING
    readiness.leave()
    readiness.disconnected()
    readiness.observe(WELCOME)
    assert Usefulness(readiness.condition()) is Usefulness.LEAVING
