"""A request that cannot be served is refused by name, with the value and the range."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.intake import (
    DEFAULT_KEEP_S,
    DEFAULT_MAX_TOKENS,
    MAX_KEEP_S,
    TEXT_SLACK,
    check_text_size,
    needs_tokenizer,
    request_id_of,
    resolve_prompt,
)
from coordinator.api.message_limits import GenerateDecoder
from stageline_rpc.v1 import inference_pb2
from tests.unit.coordinator.api.small_requests import (
    AGE_S,
    KV_LIMIT,
    MODEL,
    MODEL_LIMIT,
    PLAN,
    accept,
    accept_request,
    refusal,
    request_of,
    served_model,
)
from tests.unit.coordinator.text.letters_codec import VOCAB_SIZE
from wire.errors import InvalidRequest
from wire.ids import id_text, new_request_id

OnDisconnect = inference_pb2.OnDisconnect


def test_the_limits_of_this_file_are_what_they_say() -> None:
    assert PLAN.max_sequence_tokens == KV_LIMIT < MODEL_LIMIT


# Prompts


def test_a_prompt_is_needed() -> None:
    assert "a prompt is needed" in refusal(inference_pb2.GenerateRequest())


@pytest.mark.parametrize(
    "request_", [request_of(), inference_pb2.GenerateRequest(text="")], ids=["token ids", "text"]
)
def test_an_empty_prompt_is_refused(request_: inference_pb2.GenerateRequest) -> None:
    assert refusal(request_) == "the prompt has no tokens; at least 1 is needed"


@pytest.mark.parametrize("token", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    text = refusal(request_of(1, token, 2))
    assert text == f"prompt token id {token} is outside the vocabulary [0, {VOCAB_SIZE})"
    assert accept(request_of(0, VOCAB_SIZE - 1)).all_tokens == (0, VOCAB_SIZE - 1)


def test_text_and_conversations_go_through_the_tokenizer() -> None:
    assert accept(inference_pb2.GenerateRequest(text="abc")).all_tokens == (0, 1, 2)
    message = inference_pb2.ChatMessage(role="user", content="ba")
    conversation = inference_pb2.Conversation(messages=[message])
    assert accept(inference_pb2.GenerateRequest(conversation=conversation)).all_tokens == (1, 0)
    twice = inference_pb2.Conversation(messages=[message, message])
    assert refusal(inference_pb2.GenerateRequest(conversation=twice)) == "no chat template"


@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_without_a_tokenizer_only_token_ids_are_served(kind: str) -> None:
    request = inference_pb2.GenerateRequest()
    if kind == "text":
        request.text = "abc"
    else:
        request.conversation.messages.add(role="user", content="abc")
    model = served_model(has_tokenizer=False)
    with pytest.raises(InvalidRequest, match=f"tiny-letters has no tokenizer.*not a prompt of {kind}"):
        resolve_prompt(request, model)
    assert resolve_prompt(request_of(1, 2), model) == (1, 2)


# Lengths


def conversation_of(text: str) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content=text)
    return inference_pb2.GenerateRequest(conversation=inference_pb2.Conversation(messages=[message]))


@pytest.mark.parametrize(
    "request_with", [lambda text: inference_pb2.GenerateRequest(text=text), conversation_of]
)
def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(
    request_with: Callable[[str], inference_pb2.GenerateRequest],
) -> None:
    most = TEXT_SLACK * MODEL_LIMIT
    check_text_size(request_with("a" * most), MODEL)
    with pytest.raises(InvalidRequest, match=f"text has {most + 1} bytes; more than {most} can never fit"):
        check_text_size(request_with("a" * (most + 1)), MODEL)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"),
    [(1, 2**32 - 1), (1, KV_LIMIT), (KV_LIMIT, 1), (KV_LIMIT + 88, 1), (100_000, 1)],
)
def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    text = refusal(request_of(*[1] * num_prompt_tokens, max_tokens=max_tokens))
    for number in (num_prompt_tokens, max_tokens, num_prompt_tokens + max_tokens, KV_LIMIT, MODEL_LIMIT):
        assert str(number) in text
    assert f"KV cache: {KV_LIMIT} = 32 blocks of 16" in text


def test_a_prompt_beyond_the_limit_is_refused_without_max_tokens_too() -> None:
    assert str(KV_LIMIT + 2) in refusal(request_of(*[1] * (KV_LIMIT + 1)))
    assert str(KV_LIMIT + 1) in refusal(request_of(*[1] * KV_LIMIT))


def test_max_tokens_of_zero_computes_the_prompt_only_which_may_fill_all_there_is() -> None:
    sequence = accept(request_of(*[1] * KV_LIMIT, max_tokens=0))
    assert (sequence.num_prompt_tokens, sequence.max_tokens) == (KV_LIMIT, 0)
    assert str(KV_LIMIT + 1) in refusal(request_of(*[1] * (KV_LIMIT + 1), max_tokens=0))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"),
    [
        (1, DEFAULT_MAX_TOKENS),
        (KV_LIMIT - DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS),
        (KV_LIMIT - 1, 1),
        (500, 12),
    ],
)
def test_max_tokens_is_256_or_what_there_is_room_for(num_prompt_tokens: int, max_tokens: int) -> None:
    assert accept(request_of(*[1] * num_prompt_tokens)).max_tokens == max_tokens


@given(st.integers(1, KV_LIMIT + 5), st.integers(0, KV_LIMIT + 5))
def test_exactly_what_fits_is_accepted(num_prompt_tokens: int, max_tokens: int) -> None:
    request = request_of(*[1] * num_prompt_tokens, max_tokens=max_tokens)
    if num_prompt_tokens + max_tokens > KV_LIMIT:
        refusal(request)
    else:
        sequence = accept(request)
        assert (sequence.num_prompt_tokens, sequence.max_tokens) == (num_prompt_tokens, max_tokens)


# Choices, priorities, and what a disconnect does


@pytest.mark.parametrize("num_choices", [1, 2, 64])
def test_choices_differ_in_their_number_alone(num_choices: int) -> None:
    request = accept_request(request_of(4, 3, max_tokens=9, sampling={"n": num_choices, "seed": 8}))
    sequences = [choice.sequence for choice in request.choices]
    assert [each.key for each in sequences] == [(request.id, index) for index in range(num_choices)]
    assert [each.order.choice for each in sequences] == list(range(num_choices))
    assert {each.order.arrival for each in sequences} == {3}
    assert {(each.all_tokens, each.max_tokens, each.sampling) for each in sequences} == {
        ((4, 3), 9, sequences[0].sampling)
    }


def test_one_drawn_seed_is_for_all_choices() -> None:
    request = accept_request(request_of(1, sampling={"n": 5}))
    assert len({choice.sequence.sampling.seed for choice in request.choices}) == 1


@pytest.mark.parametrize(
    ("priority", "due_s"),
    [
        (inference_pb2.PRIORITY_UNSPECIFIED, 100.0),
        (inference_pb2.PRIORITY_LOW, 100.0 + AGE_S),
        (inference_pb2.PRIORITY_NORMAL, 100.0),
        (inference_pb2.PRIORITY_HIGH, 100.0 - AGE_S),
    ],
)
def test_a_class_of_priority_is_worth_an_age(
    priority: inference_pb2.Priority.ValueType, due_s: float
) -> None:
    assert accept(request_of(1, priority=priority)).order.due_s == due_s


def test_a_priority_that_this_version_does_not_know_is_refused() -> None:
    message = request_of(1)
    message.priority = 4  # type: ignore[assignment]
    assert refusal(message) == "priority is 4, must be LOW, NORMAL or HIGH"


@pytest.mark.parametrize(
    ("policy", "keep_s"),
    [
        (None, None),
        (OnDisconnect(), None),
        (OnDisconnect(action=OnDisconnect.CANCEL), None),
        (OnDisconnect(action=OnDisconnect.DETACH), DEFAULT_KEEP_S),
        (OnDisconnect(action=OnDisconnect.DETACH, keep_s=1e-3), 1e-3),
        (OnDisconnect(action=OnDisconnect.DETACH, keep_s=MAX_KEEP_S), MAX_KEEP_S),
    ],
)
def test_output_outlives_its_request_only_where_that_is_asked_for(
    policy: OnDisconnect | None, keep_s: float | None
) -> None:
    assert accept_request(request_of(1, on_disconnect=policy)).keep_s == (
        None if keep_s is None else pytest.approx(keep_s)
    )


@pytest.mark.parametrize("keep_s", [0.0, -1.0, MAX_KEEP_S + 1, math.nan, math.inf, -math.inf])
def test_a_time_to_keep_out_of_range_is_refused(keep_s: float) -> None:
    policy = OnDisconnect(action=OnDisconnect.DETACH, keep_s=keep_s)
    assert refusal(request_of(1, on_disconnect=policy)) == f"keep_s is {keep_s:g}, must be in (0, 3600]"


@pytest.mark.parametrize("action", [OnDisconnect.ACTION_UNSPECIFIED, OnDisconnect.CANCEL])
def test_a_time_to_keep_that_would_be_ignored_is_refused(action: OnDisconnect.Action.ValueType) -> None:
    policy = OnDisconnect(action=action, keep_s=5)
    assert refusal(request_of(1, on_disconnect=policy)) == "on_disconnect has keep_s, which only DETACH takes"


def test_an_action_that_this_version_does_not_know_is_refused() -> None:
    message = request_of(1)
    message.on_disconnect.action = 3  # type: ignore[assignment]
    assert refusal(message) == "on_disconnect is 3, must be CANCEL or DETACH"


def test_only_what_the_tokenizer_works_on_goes_to_its_threads() -> None:
    assert not needs_tokenizer(request_of(1, sampling={"bad_word_ids": [inference_pb2.TokenIds(ids=[1])]}))
    assert needs_tokenizer(request_of(1, sampling={"bad_words": ["ab"]}))
    assert needs_tokenizer(inference_pb2.GenerateRequest(text="a"))
    assert needs_tokenizer(conversation_of("a"))


# Ids and fields


def test_a_request_keeps_its_id_or_gets_a_new_one() -> None:
    request_id = new_request_id()
    assert request_id_of(request_of(1, request_id=id_text(request_id))) == request_id
    assert request_id_of(request_of(1)) != request_id_of(request_of(1))


@pytest.mark.parametrize("text", ["mine", "0" * 32, "9d1f6f0a-1f0b-4a0e-8f6c-3c2b6a1d5e4f"])
def test_an_id_that_is_no_uuid7_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        request_id_of(request_of(1, request_id=text))


def with_unknown_field(message: Message, number: int) -> None:
    """What a newer client would send: a varint field that this version has no name for."""
    tag = number << 3
    encoded = bytes([tag & 0x7F | 0x80, tag >> 7, 1])
    message.MergeFromString(encoded)


def full_request() -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(request_id="x", max_tokens=1)
    request.conversation.messages.add(role="user", content="a")
    request.conversation.messages.add(role="user", content="b")
    request.sampling.temperature = 1
    request.sampling.choice.texts.append("a")
    request.sampling.logit_bias[3] = 1.5
    request.on_disconnect.action = OnDisconnect.DETACH
    return request


@pytest.mark.parametrize(
    "place",
    [
        *("GenerateRequest", "SamplingParameters", "Conversation", "ChatMessage", "TokenIds"),
        *("OnDisconnect", "Choices"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused_wherever_it_is(place: str) -> None:
    request = full_request()
    decoder = GenerateDecoder(max_model_len=MODEL_LIMIT, vocab_size=VOCAB_SIZE)
    decoder.decode(request.SerializeToString())
    if place == "TokenIds":
        request.token_ids.ids.append(1)
    message: Message = {
        "OnDisconnect": lambda: request.on_disconnect,
        "Choices": lambda: request.sampling.choice,
        "GenerateRequest": lambda: request,
        "SamplingParameters": lambda: request.sampling,
        "Conversation": lambda: request.conversation,
        "ChatMessage": lambda: request.conversation.messages[1],
        "TokenIds": lambda: request.token_ids,
    }[place]()
    with_unknown_field(message, 29)
    with pytest.raises(InvalidRequest, match=f"{place} has fields that this version does not know: 29"):
        decoder.decode(request.SerializeToString())
