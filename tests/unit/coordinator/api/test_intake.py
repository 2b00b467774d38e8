"""A request that cannot be served is refused by name, with the value and the range."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import Checkpoint, DType
from coordinator.api.intake import (
    DEFAULT_MAX_TOKENS,
    TEXT_SLACK,
    check_text_size,
    make_request,
    refuse_unknown_fields,
    request_id_of,
    resolve,
    resolve_prompt,
)
from coordinator.model import ServedModel
from coordinator.planning.plan import Plan, StepLimits
from coordinator.planning.planner import make_plan
from coordinator.requests.request import Request
from coordinator.scheduling.order import QueueOrder
from coordinator.scheduling.sequence import Sequence
from coordinator.text.tokenizer import ChatMessage, NoChatTemplate, TextCodec
from stageline_rpc.v1 import inference_pb2
from tests.unit.coordinator.planning.small_models import llama, workers
from wire.errors import InvalidRequest
from wire.ids import id_text, new_request_id

VOCAB_SIZE = 40
MODEL_LIMIT = 600
KV_LIMIT = 512
EOS = (2, 5)


class LettersCodec:
    """A token per letter; no template for conversations of more than one message."""

    longest_token_bytes = 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def encode_conversation(self, messages: list[ChatMessage]) -> list[int]:
        if len(messages) > 1:
            raise NoChatTemplate("no chat template")
        return self.encode(messages[0].content)


def served_model(*, has_tokenizer: bool = True) -> ServedModel:
    config = llama(vocab_size=VOCAB_SIZE, max_position_embeddings=MODEL_LIMIT)
    checkpoint = Checkpoint(
        directory=Path("tiny-letters"),
        config=config,
        tensors={},
        fingerprint="f" * 32,
        eos_token_ids=EOS,
        bos_token_id=None,
    )
    text = cast(TextCodec, LettersCodec()) if has_tokenizer else None
    return ServedModel(checkpoint, DType.F32, is_builtin=False, text=text)


def served_plan() -> Plan:
    limits = StepLimits(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=10_000)
    config = served_model().config
    return make_plan(
        config, DType.F32, workers(1 << 30), limits=limits, block_size=16, max_kv_tokens=KV_LIMIT
    )


MODEL, PLAN = served_model(), served_plan()


def request_of(
    *ids: int, sampling: dict[str, Any] | None = None, **fields: Any
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids),
        sampling=inference_pb2.SamplingParameters(**sampling or {}),
        **fields,
    )


def accept_request(message: inference_pb2.GenerateRequest) -> Request:
    return make_request(
        message,
        resolve(message, MODEL),
        new_request_id(),
        model=MODEL,
        plan=PLAN,
        client="here",
        place=lambda priority, choice: QueueOrder(float(priority), 3, choice),
    )


def accept(message: inference_pb2.GenerateRequest) -> Sequence:
    return accept_request(message).choices[0].sequence


def refusal(request: inference_pb2.GenerateRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        accept(request)
    return str(caught.value)


def test_the_limits_of_this_file_are_what_they_say() -> None:
    assert PLAN.max_sequence_tokens == KV_LIMIT < MODEL_LIMIT


# Sampling parameters


@pytest.mark.parametrize(
    ("name", "value", "range_text"),
    [
        *(("temperature", value, "[0, 100]") for value in (math.nan, math.inf, -math.inf, -0.5, 100.5)),
        *(("top_p", value, "(0, 1]") for value in (math.nan, math.inf, -math.inf, -0.5, 0.0, 1.5)),
        *(("top_k", value, "[0, 40]") for value in (41, 2**32 - 1)),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: float, range_text: str) -> None:
    text = refusal(request_of(1, sampling={name: value}))
    assert text == f"{name} is {value}, must be in {range_text}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0.0, 1e-30, 1.0, 100.0)),
        *(("top_p", value) for value in (1e-30, 0.5, 1.0)),
        *(("top_k", value) for value in (0, 1, 40)),
        *(("seed", value) for value in (0, 1, 2**64 - 1)),
    ],
)
def test_a_parameter_in_range_reaches_the_stages(name: str, value: float) -> None:
    sampling = accept(request_of(1, sampling={name: value})).sampling
    assert getattr(sampling, name) == pytest.approx(value, rel=1e-6)


def test_greedy_over_everything_is_the_default_and_the_seed_is_drawn() -> None:
    samplings = [accept(request_of(1)).sampling for _ in range(3)]
    assert all((each.temperature, each.top_k, each.top_p) == (0, 0, 1) for each in samplings)
    assert len({each.seed for each in samplings}) == 3
    assert all(0 <= each.seed < 2**64 for each in samplings)


def test_a_seed_of_zero_is_the_clients() -> None:
    assert accept(request_of(1, sampling={"seed": 0})).sampling.seed == 0


def test_eos_stops_unless_it_is_to_be_ignored() -> None:
    assert accept(request_of(1)).stop_token_ids == frozenset(EOS)
    assert accept(request_of(1, sampling={"ignore_eos": True})).stop_token_ids == frozenset()


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
    with pytest.raises(InvalidRequest, match=f"tiny-letters has no tokenizer.*not {kind}"):
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


def test_max_tokens_of_zero_is_refused() -> None:
    assert refusal(request_of(1, max_tokens=0)) == "max_tokens is 0, must be at least 1"


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


@given(st.integers(1, KV_LIMIT + 5), st.integers(1, KV_LIMIT + 5))
def test_exactly_what_fits_is_accepted(num_prompt_tokens: int, max_tokens: int) -> None:
    request = request_of(*[1] * num_prompt_tokens, max_tokens=max_tokens)
    if num_prompt_tokens + max_tokens > KV_LIMIT:
        refusal(request)
    else:
        sequence = accept(request)
        assert (sequence.num_prompt_tokens, sequence.max_tokens) == (num_prompt_tokens, max_tokens)
        assert sequence.order == QueueOrder(0.0, 3)


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
    return request


@pytest.mark.parametrize(
    "place", ["GenerateRequest", "SamplingParameters", "Conversation", "ChatMessage", "TokenIds"]
)
def test_a_field_that_would_be_ignored_is_refused_wherever_it_is(place: str) -> None:
    request = full_request()
    refuse_unknown_fields(request)
    if place == "TokenIds":
        request.token_ids.ids.append(1)
    message: Message = {
        "GenerateRequest": lambda: request,
        "SamplingParameters": lambda: request.sampling,
        "Conversation": lambda: request.conversation,
        "ChatMessage": lambda: request.conversation.messages[1],
        "TokenIds": lambda: request.token_ids,
    }[place]()
    with_unknown_field(message, 29)
    with pytest.raises(InvalidRequest, match=f"{place} has fields that this version does not know: 29"):
        refuse_unknown_fields(inference_pb2.GenerateRequest.FromString(request.SerializeToString()))
