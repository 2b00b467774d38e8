"""Choice of the call that follows a failed one, and its retry limits; no clock, no server."""

from typing import Any

import grpc
import pytest

from stageline import DeadlineExceeded, FinishReason, GenerateOutput, ServerError, TokenLogprobs, Usage
from stageline.client.call import ResumeAction, ResumePolicy, RetryPolicy, StreamCursor

LOST, NOT_FOUND, EXISTS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)


def test_a_lost_connection_is_followed_by_attach() -> None:
    policy = ResumePolicy(can_generate=True)
    assert policy.action is ResumeAction.GENERATE
    assert policy.follow(LOST, is_connection_loss=True)
    assert policy.action is ResumeAction.ATTACH
    assert policy.follow(LOST, is_connection_loss=True)
    assert policy.action is ResumeAction.ATTACH


def test_a_request_that_never_arrived_is_sent_again() -> None:
    policy = ResumePolicy(can_generate=True)
    policy.follow(LOST, is_connection_loss=True)
    assert policy.follow(NOT_FOUND, is_connection_loss=False)
    assert policy.action is ResumeAction.GENERATE
    assert policy.follow(EXISTS, is_connection_loss=False)
    assert policy.action is ResumeAction.ATTACH


def test_an_acknowledged_request_is_not_sent_again() -> None:
    policy = ResumePolicy(can_generate=True)
    policy.has_output = True
    policy.follow(LOST, is_connection_loss=True)
    assert not policy.follow(NOT_FOUND, is_connection_loss=False)


def test_an_attaching_call_sends_no_request() -> None:
    policy = ResumePolicy(can_generate=False)
    assert policy.action is ResumeAction.ATTACH
    assert not policy.follow(NOT_FOUND, is_connection_loss=False)
    policy.follow(LOST, is_connection_loss=True)
    assert not policy.follow(NOT_FOUND, is_connection_loss=False)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_a_first_call_that_the_server_refuses_is_the_last(code: grpc.StatusCode) -> None:
    assert not ResumePolicy(can_generate=True).follow(code, is_connection_loss=False)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not NOT_FOUND])
def test_a_refusal_after_a_loss_is_the_last_too(code: grpc.StatusCode) -> None:
    policy = ResumePolicy(can_generate=True)
    policy.follow(LOST, is_connection_loss=True)
    assert not policy.follow(code, is_connection_loss=False)


def test_pauses_grow_to_two_seconds_and_reset_after_an_outage() -> None:
    policy = RetryPolicy(outage_s=30, timeout_s=None, now_s=0)
    assert [policy.fail(0) for _ in range(7)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    policy.succeed()
    assert policy.fail(0) == 0


def test_the_pause_stays_at_two_seconds_however_long_the_outage() -> None:
    policy = RetryPolicy(outage_s=1e6, timeout_s=None, now_s=0)
    pauses_s = [policy.fail(0) for _ in range(2000)]
    assert set(pauses_s[6:]) == {2.0}


def test_an_outage_is_counted_from_its_first_failure() -> None:
    policy = RetryPolicy(outage_s=30, timeout_s=None, now_s=0)
    assert policy.time_left_s(1e6) is None
    policy.fail(100)
    policy.fail(120)
    assert policy.outage_left_s(125) == 5
    assert policy.outage_left_s(131) == 0
    policy.succeed()
    policy.fail(200)
    assert policy.outage_left_s(200) == 30


def test_the_timeout_bounds_calls_and_outages() -> None:
    policy = RetryPolicy(outage_s=30, timeout_s=10, now_s=100)
    assert policy.time_left_s(104) == 6
    policy.fail(108)
    assert policy.outage_left_s(108) == 2
    with pytest.raises(DeadlineExceeded, match="the timeout of 10 s has passed"):
        policy.outage_left_s(110)


USAGE = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0, seed=0, restarts=0)
LAST: dict[str, Any] = {"finish_reason": FinishReason.STOP, "usage": USAGE}


def output(choice: int, first_token_index: int, text: str, **more: Any) -> GenerateOutput:
    """One token per character of the text."""
    values: dict[str, Any] = {
        "text_offset": first_token_index,
        "token_ids": [ord(character) for character in text],
    }
    return GenerateOutput(
        request_id="r", choice=choice, first_token_index=first_token_index, text=text, **(values | more)
    )


def prompt_logprobs(first: int, num: int) -> dict[str, Any]:
    entries = [TokenLogprobs(token_id=first + index, logprob=-1.0, rank=1, top=[]) for index in range(num)]
    return {"prompt_logprobs": entries, "first_prompt_token_index": first}


def test_every_choice_has_a_position_of_its_own() -> None:
    continuity = StreamCursor(num_choices=2)
    assert continuity.check(output(0, 0, "ab")) is not None
    assert continuity.check(output(1, 0, "c")) is not None
    assert continuity.check(output(0, 2, "d", **LAST)) is not None
    positions = continuity.attach_request("request").positions
    assert {position.choice: position.from_token for position in positions} == {0: 3, 1: 1}
    assert not continuity.is_complete
    assert continuity.check(output(1, 1, "e", **LAST)) is not None
    assert continuity.is_complete
    continuity.check_finished()


@pytest.mark.parametrize(
    ("next_output", "message"),
    [
        (
            output(0, 2, "x"),
            "choice 0 of request r continues at token 2 and character 2, after 1 tokens and 1",
        ),
        (output(0, 0, "a"), "continues at token 0 and character 0, after 1 tokens and 1 characters"),
        (output(0, 1, "b", text_offset=0), "continues at token 1 and character 0, after 1 tokens"),
        (
            output(1, 1, "b"),
            "choice 1 of request r continues at token 1 and character 1, after 0 tokens and 0",
        ),
        (output(2, 0, "a"), "the server sent choice 2, expected choices below 2"),
        (output(0, 1, "", **prompt_logprobs(1, 1)), "continues at prompt logprob 1, after 0"),
    ],
)
def test_missing_or_repeated_output_is_an_error(next_output: GenerateOutput, message: str) -> None:
    continuity = StreamCursor(num_choices=2)
    continuity.check(output(0, 0, "a"))
    with pytest.raises(ServerError, match=message):
        continuity.check(next_output)


@pytest.mark.parametrize("text", ["", "b"])
def test_a_message_after_the_last_one_is_an_error(text: str) -> None:
    continuity = StreamCursor(num_choices=1)
    continuity.check(output(0, 0, "a", **LAST))
    with pytest.raises(ServerError, match="more after the last message of choice 0 of request r"):
        continuity.check(output(0, 1, text))


def test_a_last_message_before_the_cut_is_delivered_once() -> None:
    continuity = StreamCursor(num_choices=2)
    continuity.check(output(0, 0, "a", **LAST))
    continuity.interrupt()
    assert continuity.check(output(0, 1, "", **LAST)) is None
    with pytest.raises(ServerError, match="more after the last message"):
        continuity.check(output(0, 1, "b", **LAST))


def test_prompt_logprobs_are_passed_on_once() -> None:
    continuity = StreamCursor(num_choices=1)
    assert continuity.check(output(0, 0, "", **prompt_logprobs(0, 3))) is not None
    continuity.interrupt()
    assert continuity.check(output(0, 0, "", **prompt_logprobs(0, 2))) is None
    rest = continuity.check(output(0, 0, "a", **prompt_logprobs(2, 3)))
    assert rest is not None
    assert rest.first_prompt_token_index == 3
    assert [entry.token_id for entry in rest.prompt_logprobs or []] == [3, 4]


def test_a_gap_in_prompt_logprobs_is_an_error_after_a_cut_too() -> None:
    continuity = StreamCursor(num_choices=1)
    continuity.check(output(0, 0, "", **prompt_logprobs(0, 1)))
    continuity.interrupt()
    with pytest.raises(ServerError, match="continues at prompt logprob 2, after 1"):
        continuity.check(output(0, 0, "", **prompt_logprobs(2, 1)))


def test_attaching_accepts_the_first_text_offset() -> None:
    continuity = StreamCursor(num_choices=None, first_token=3, starts={1: 5})
    assert continuity.check(output(0, 3, "a", text_offset=40)) is not None
    assert continuity.check(output(0, 4, "b", text_offset=41)) is not None
    assert continuity.check(output(1, 5, "c", text_offset=7)) is not None
    with pytest.raises(ServerError, match="continues at token 5 and character 50, after 5 tokens and 42"):
        continuity.check(output(0, 5, "d", text_offset=50))


def test_attaching_at_the_start_expects_text_offset_zero() -> None:
    with pytest.raises(ServerError, match="character 4, after 0 tokens and 0 characters"):
        StreamCursor(num_choices=None).check(output(0, 0, "a", text_offset=4))


def test_with_an_unknown_number_of_choices_all_seen_must_end() -> None:
    continuity = StreamCursor(num_choices=None)
    with pytest.raises(ServerError, match="of choice 0, after 0 tokens"):
        continuity.check_finished()
    continuity.check(output(0, 0, "a", **LAST))
    continuity.check(output(1, 0, "a"))
    assert not continuity.is_complete
    with pytest.raises(ServerError, match="of choice 1, after 1 tokens"):
        continuity.check_finished()
    continuity.check(output(1, 1, "b", **LAST))
    continuity.check_finished()


def test_a_message_without_anything_is_not_passed_on() -> None:
    continuity = StreamCursor(num_choices=1)
    assert continuity.check(output(0, 0, "")) is None
    assert continuity.check(output(0, 0, "a")) is not None
