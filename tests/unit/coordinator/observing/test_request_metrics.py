"""Times and tokens of requests, against a clock that the test sets."""

import pytest

from telemetry.metrics import definitions
from tests.unit.coordinator.observing.watched_engine import WatchedEngine
from wire.errors import ClusterUnavailable, InvalidRequest, Overloaded, RequestExists


def test_a_request_waits_gets_its_tokens_and_ends() -> None:
    watched = WatchedEngine()
    watched.submit(max_tokens=3)
    watched.now_s += 2.0
    watched.start_epoch()
    assert watched.times(definitions.QUEUE_TIME) == (1, 2.0)
    watched.answer(after_s=0.5)
    assert watched.times(definitions.FIRST_TOKEN_TIME) == (1, 2.5)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (0, 0.0)
    watched.answer(after_s=0.25)
    watched.answer(after_s=0.125)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (2, 0.375)
    assert watched.times(definitions.REQUEST_TIME, "finished") == (1, 2.875)
    assert watched.value(definitions.GENERATED_TOKENS) == 3


def test_every_choice_has_its_own_tokens_and_the_request_one_first() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3, num_choices=2)
    while watched.sent:
        watched.answer(after_s=0.5)
    assert watched.value(definitions.GENERATED_TOKENS) == 6
    assert watched.times(definitions.FIRST_TOKEN_TIME)[0] == 1
    assert watched.times(definitions.INTER_TOKEN_TIME)[0] == 4
    assert watched.times(definitions.QUEUE_TIME) == (1, 0.0)
    assert watched.times(definitions.REQUEST_TIME, "finished")[0] == 1


def test_a_pause_is_one_long_wait_for_a_token_and_no_second_first_one() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3)
    watched.answer(after_s=0.5)
    watched.stop_epoch()
    watched.now_s += 7.0
    watched.start_epoch()
    watched.answer(after_s=0.5)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (1, 7.5)
    assert watched.times(definitions.FIRST_TOKEN_TIME) == (1, 0.5)
    assert watched.times(definitions.QUEUE_TIME) == (1, 0.0)


def test_a_request_that_never_began_has_an_end_and_no_more() -> None:
    watched = WatchedEngine()
    request = watched.submit()
    watched.now_s += 3.0
    watched.engine.cancel(request.id)
    assert watched.times(definitions.REQUEST_TIME, "cancelled") == (1, 3.0)
    assert watched.times(definitions.QUEUE_TIME) == watched.times(definitions.FIRST_TOKEN_TIME) == (0, 0.0)
    failing = watched.submit()
    watched.engine.fail_all("no stages")
    assert not failing.is_live
    assert watched.times(definitions.REQUEST_TIME, "failed") == (1, 0.0)


def test_nothing_is_kept_of_what_has_ended() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    for _ in range(5):
        watched.submit(max_tokens=3, num_choices=2)
    leaving = watched.submit(max_tokens=50)
    while not leaving.choices[0].sequence.num_generated_tokens or len(watched.engine.registry.live) > 1:
        watched.answer(after_s=0.1)
    assert len(watched.requests._lives) == len(watched.requests._token_s) == 1
    watched.engine.cancel(leaving.id)
    assert not watched.requests._lives
    assert not watched.requests._token_s


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("64 requests wait"), "overloaded"),
        (InvalidRequest("no prompt"), "invalid"),
        (ClusterUnavailable("1 of 3 workers"), "unavailable"),
        (RequestExists("it lives"), "other"),
        (KeyError("a defect"), "other"),
    ],
)
def test_refusals_are_counted_by_their_reason(error: Exception, reason: str) -> None:
    watched = WatchedEngine()
    watched.requests.note_refusal(error)
    counts = {each: watched.value(definitions.REQUESTS_REFUSED, each) for each in definitions.REFUSAL.values}
    assert counts == {**dict.fromkeys(definitions.REFUSAL.values, 0), reason: 1}
