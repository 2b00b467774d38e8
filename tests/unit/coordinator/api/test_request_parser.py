"""Every sampling parameter takes effect or is rejected by name with its range."""

from __future__ import annotations

import math
from array import array
from collections import abc, deque
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import count
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.message_limits import GenerateDecoder
from coordinator.api.request_parser import (
    DEFAULT_KEEP_S,
    DEFAULT_MAX_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    TEXT_SLACK,
    check_text_size,
    needs_tokenizer,
    request_id_of,
    resolve_prompt,
)
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.scheduler.sequence import FinishReason
from kvcache import ActiveSequence
from stageline_rpc.v1 import inference_pb2
from tests.unit.coordinator.api.small_requests import (
    AGE_S,
    EOS,
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
from tests.unit.text.letters_codec import VOCAB_SIZE, letters
from wire.errors import InvalidRequest
from wire.ids import id_text, new_request_id
from wire.sampling import KEEP_RANGE_S, MAX_STOP_CHARACTERS, MAX_STOPS, StepSampling
from wire.status_codec import duration

SamplingParameters = inference_pb2.SamplingParameters
TokenIds = inference_pb2.TokenIds
NOT_FINITE = (math.nan, math.inf, -math.inf)
FLOAT_MAX = 3.4028234663852886e38
MAX_TOKENS = 10
"""Of every request here."""


def request_with(**sampling: Any) -> inference_pb2.GenerateRequest:
    return request_of(1, 0, max_tokens=MAX_TOKENS, sampling=sampling)


def test_many_biases_are_encoded_when_the_request_is_made() -> None:
    few, many = (sampling_of(bad_word_ids=words(number)) for number in (512, 513))
    assert (few.encoded is None, many.encoded is None) == (True, False)


def words(number: int) -> list[inference_pb2.TokenIds]:
    return [inference_pb2.TokenIds(ids=[1, 2])] * number


def sampling_of(**sampling: Any) -> StepSampling:
    return accept(request_with(**sampling)).sampling


# Numbers

OUT_OF_RANGE = [
    *(("temperature", value, "[0, 100]") for value in (*NOT_FINITE, -0.5, -1e-30, 100.5, FLOAT_MAX)),
    *(("top_p", value, "(0, 1]") for value in (*NOT_FINITE, -0.5, 0.0, 1.5, -FLOAT_MAX)),
    *(("min_p", value, "[0, 1]") for value in (*NOT_FINITE, -0.5, 1.5)),
    *(("typical_p", value, "(0, 1]") for value in (*NOT_FINITE, -0.5, 0.0, 1.5)),
    *(("repetition_penalty", value, "(0, 100]") for value in (*NOT_FINITE, -0.5, 0.0, 100.5)),
    *(("frequency_penalty", value, "[-2, 2]") for value in (*NOT_FINITE, -2.5, 2.5)),
    *(("presence_penalty", value, "[-2, 2]") for value in (*NOT_FINITE, -2.5, 2.5)),
    *(("top_k", value, f"[0, {VOCAB_SIZE}]") for value in (VOCAB_SIZE + 1, 2**32 - 1)),
    *(("min_tokens", value, f"[0, {MAX_TOKENS}]") for value in (MAX_TOKENS + 1, 2**32 - 1)),
    *(("logprobs", value, "[0, 20]") for value in (21, 2**32 - 1)),
    *(("prompt_logprobs", value, "[0, 20]") for value in (21, 2**32 - 1)),
    *(("n", value, "[1, 64]") for value in (0, 65, 2**32 - 1)),
]

IN_RANGE = [
    *(("temperature", value) for value in (0.0, 1e-30, 1.0, 100.0)),
    *(("top_p", value) for value in (1e-30, 0.5, 1.0)),
    *(("min_p", value) for value in (0.0, 1e-30, 1.0)),
    *(("typical_p", value) for value in (1e-30, 0.5, 1.0)),
    *(("repetition_penalty", value) for value in (1e-30, 1.0, 100.0)),
    *(("frequency_penalty", value) for value in (-2.0, 0.0, 2.0)),
    *(("presence_penalty", value) for value in (-2.0, 0.0, 2.0)),
    *(("top_k", value) for value in (0, 1, VOCAB_SIZE)),
    *(("min_tokens", value) for value in (0, 1, MAX_TOKENS)),
    *(("logprobs", value) for value in (0, 20)),
    *(("prompt_logprobs", value) for value in (0, 20)),
    *(("seed", value) for value in (0, 1, 2**64 - 1)),
]


@pytest.mark.parametrize(("name", "value", "range_text"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_rejected_by_name(name: str, value: float, range_text: str) -> None:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    assert refusal(request_with(**{name: value})) == f"{name} is {shown}, must be in {range_text}"


@pytest.mark.parametrize(("name", "value"), IN_RANGE)
def test_a_number_in_range_reaches_the_stages(name: str, value: float) -> None:
    assert getattr(sampling_of(**{name: value}), name) == pytest.approx(value, rel=1e-6)


def test_absent_parameters_have_no_effect_and_a_seed_is_chosen() -> None:
    samplings = [sampling_of() for _ in range(3)]
    assert all(sampling == StepSampling(seed=sampling.seed) for sampling in samplings)
    assert len({sampling.seed for sampling in samplings}) == 3
    assert all(0 <= sampling.seed < 2**64 for sampling in samplings)


# Tokens


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_rejected(name: str) -> None:
    text = refusal(request_with(**{name: [1, VOCAB_SIZE]}))
    assert text == f"{name} has token id {VOCAB_SIZE}, must be in [0, {VOCAB_SIZE - 1}]"
    accept(request_with(**{name: [0, VOCAB_SIZE - 1]}))


@pytest.mark.parametrize("value", [*NOT_FINITE, -100.5, 100.5])
def test_a_bias_out_of_range_is_rejected_by_its_token(value: float) -> None:
    text = refusal(request_with(logit_bias={3: 1.0, 4: value}))
    assert text == f"logit_bias of token 4 is {value:g}, must be in [-100, 100]"


def test_biases_reach_the_stages_in_the_order_of_their_tokens() -> None:
    sampling = sampling_of(logit_bias={7: -100.0, VOCAB_SIZE - 1: 100.0, 0: 0.5})
    assert sampling.logit_bias == ((0, 0.5), (7, -100.0), (VOCAB_SIZE - 1, 100.0))
    text = refusal(request_with(logit_bias={VOCAB_SIZE: 1.0}))
    assert text == f"logit_bias has token id {VOCAB_SIZE}, must be in [0, {VOCAB_SIZE - 1}]"


def test_allowed_tokens_reach_the_stages_each_once() -> None:
    assert sampling_of(allowed_token_ids=[9, 3, 9, 9]).allowed_token_ids == (3, 9)


def ends_with(request: inference_pb2.GenerateRequest, token: int) -> bool:
    """Whether this token, generated first, ends the output."""
    sequence = accept(request)
    blocks = ActiveSequence(
        sequence.all_tokens, block_size=4, max_output_tokens=MAX_TOKENS, new_id=count(1).__next__
    )
    sequence.begin_prefill(blocks, num_cached_tokens=0)
    sequence.take_chunk(sequence.num_tokens)
    return sequence.accept_token(token) is FinishReason.STOP


def test_eos_and_stop_tokens_stop_unless_eos_is_to_be_ignored() -> None:
    assert [token for token in range(VOCAB_SIZE) if ends_with(request_with(), token)] == [*EOS]
    assert [token for token in range(9) if ends_with(request_with(stop_token_ids=[7, 2]), token)] == [2, 5, 7]
    assert not any(ends_with(request_with(ignore_eos=True), token) for token in range(VOCAB_SIZE))
    ignoring = request_with(ignore_eos=True, stop_token_ids=[7, 2])
    assert [token for token in range(9) if ends_with(ignoring, token)] == [2, 7]


def test_stop_tokens_are_held_back_before_min_tokens() -> None:
    assert sampling_of(stop_token_ids=[9]).min_tokens_hold_back == ()
    assert sampling_of(stop_token_ids=[9], min_tokens=1).min_tokens_hold_back == (2, 5, 9)
    assert sampling_of(ignore_eos=True, min_tokens=1).min_tokens_hold_back == ()


# Words


def test_bad_words_are_spelled_with_and_without_a_space_before() -> None:
    sampling = sampling_of(bad_words=["ab"], bad_word_ids=[TokenIds(ids=[30]), TokenIds(ids=[1, 1])])
    assert sampling.bad_words == ((0, 1), (25, 0, 1), (30,), (1, 1))


@pytest.mark.parametrize("word", ["", " ", "\n\t"])
def test_a_bad_word_without_a_character_is_rejected(word: str) -> None:
    assert "bad_words has an empty word" in refusal(request_with(bad_words=["a", word]))


def test_a_bad_word_beyond_the_vocabulary_is_rejected() -> None:
    text = refusal(request_with(bad_words=["a", chr(ord("a") + VOCAB_SIZE)]))
    assert text == (
        f"bad_words has a word with token id {VOCAB_SIZE}, which the model cannot generate: its ids are in "
        f"[0, {VOCAB_SIZE - 1}], leave the word out"
    )


def test_bad_words_are_bounded_in_number_and_length() -> None:
    accept(request_with(bad_word_ids=[TokenIds(ids=[0] * MAX_BAD_WORD_TOKENS)] * MAX_BAD_WORDS))
    accept(request_with(bad_words=["a" * (MAX_BAD_WORD_TOKENS - 1)] * (MAX_BAD_WORDS // 2)))
    one_more = [TokenIds(ids=[0])] * MAX_BAD_WORDS
    for message in (
        request_with(bad_words=["a"], bad_word_ids=one_more),
        request_with(bad_words=["a"] * (MAX_BAD_WORDS + 1)),
    ):
        text = refusal(message)
        assert text == f"bad_words and bad_word_ids have {MAX_BAD_WORDS + 1} entries, at most {MAX_BAD_WORDS}"
    for length in (0, MAX_BAD_WORD_TOKENS + 1):
        text = refusal(request_with(bad_word_ids=[TokenIds(ids=[0] * length)]))
        assert text == f"bad_word_ids has a word of {length} tokens, must be in [1, {MAX_BAD_WORD_TOKENS}]"
    # Includes the space of its second spelling.
    text = refusal(request_with(bad_words=["a" * MAX_BAD_WORD_TOKENS]))
    assert text == f"bad_words has a word of {MAX_BAD_WORD_TOKENS + 1} tokens, must be in [1, 64]"
    text = refusal(request_with(bad_words=["a" * (MAX_BAD_WORD_CHARACTERS + 1)]))
    assert text == f"bad_words has a word of {MAX_BAD_WORD_CHARACTERS + 1} characters, must be in [1, 1024]"
    assert "bad_word_ids has token id 40" in refusal(request_with(bad_word_ids=[TokenIds(ids=[VOCAB_SIZE])]))


def test_stop_strings_are_bounded_in_number_and_length() -> None:
    accept(request_with(stop=["a" * MAX_STOP_CHARACTERS] * MAX_STOPS))
    assert (
        refusal(request_with(stop=["a"] * (MAX_STOPS + 1)))
        == f"stop has {MAX_STOPS + 1} strings, must be in [0, 16]"
    )
    for length in (0, MAX_STOP_CHARACTERS + 1):
        text = refusal(request_with(stop=["a", "b" * length]))
        assert text == f"stop has a string of {length} characters, must be in [1, {MAX_STOP_CHARACTERS}]"


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"stop": ["a"]}, "stop needs a tokenizer, which this model lacks: use stop_token_ids"),
        (
            {"bad_words": ["a"]},
            "model tiny-letters has no tokenizer: pass bad_word_ids, not bad_words",
        ),
    ],
)
def test_without_a_tokenizer_words_are_rejected(sampling: dict[str, Any], text: str) -> None:
    assert refusal(request_with(**sampling), served_model(has_tokenizer=False)) == text


# Output


def generate(buffer: OutputBuffer, tokens: abc.Sequence[int]) -> str:
    """Text of an output after all tokens up to a stop string."""
    any(buffer.append(token) for token in tokens)
    buffer.finish(FinishReason.LENGTH)
    return buffer.read(0, max_tokens=99).text


def text_of(tokens: abc.Sequence[int], **sampling: Any) -> str:
    """The output when these tokens are generated after the prompt "ba"."""
    return generate(accept_request(request_with(**sampling)).choices[0].buffer, tokens)


def test_the_text_ends_before_a_stop_string_but_not_before_min_tokens() -> None:
    tokens = (3, 4, 3, 4, 6)
    assert text_of(tokens) == letters(tokens) == "dedeg"
    assert text_of(tokens, stop=["x", "de"]) == ""
    assert text_of(tokens, stop=["x", "de"], min_tokens=3) == "de"


def test_special_tokens_are_skipped_unless_requested() -> None:
    assert text_of((3, 5, 4)) == "de"
    assert text_of((3, 5, 4), skip_special_tokens=True) == "de"
    assert text_of((3, 5, 4), skip_special_tokens=False) == "dfe"


def test_an_echo_begins_with_the_prompt() -> None:
    assert text_of((3, 4)) == "de"
    assert text_of((3, 4), echo=True) == "bade"


@pytest.mark.parametrize(
    ("sampling", "scored", "for_client", "reported"),
    [
        ({}, False, None, 0),
        ({"logprobs": 3}, False, None, 0),
        ({"prompt_logprobs": 0}, True, 0, 0),
        ({"prompt_logprobs": 4}, True, 4, 4),
        ({"echo": True}, False, None, 0),
        ({"echo": True, "logprobs": 3}, True, None, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 2}, True, 2, 3),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 2}, True, 2, 2),
    ],
)
def test_the_prompt_is_scored_once_for_all_choices(
    sampling: dict[str, Any], scored: bool, for_client: int | None, reported: int
) -> None:
    request = accept_request(request_with(n=2, **sampling))
    assert [choice.sequence.needs_scoring for choice in request.choices] == [scored, False]
    assert request.num_top_prompt_logprobs == for_client
    assert request.choices[0].sequence.sampling.prompt_logprobs == reported
    waits = "logprobs" in sampling and "echo" in sampling
    assert [choice.buffer.is_waiting_for_prompt_logprobs for choice in request.choices] == [waits] * 2


# Structured output

STRUCTURES: dict[str, Any] = {
    "json_schema": "{}",
    "regex": "a+",
    "choice": inference_pb2.Choices(texts=["a", "b"]),
    "grammar": 'start: "a"',
}


def test_every_kind_of_structured_output_is_parsed() -> None:
    kinds = SamplingParameters.DESCRIPTOR.oneofs_by_name["structured_output"].fields
    assert {field.name for field in kinds} == set(STRUCTURES)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_output_is_rejected_where_no_grammar_is_served(kind: str) -> None:
    text = refusal(request_with(**{kind: STRUCTURES[kind]}))
    assert text == f"{kind}: structured output is not served"


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_output_with_ignored_eos_is_rejected(kind: str) -> None:
    text = refusal(request_with(ignore_eos=True, **{kind: STRUCTURES[kind]}))
    assert text == "ignore_eos excludes structured output, which ends with an end-of-sequence token"


# Nothing is ignored

OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "seed": 9,
    "ignore_eos": True,
    "min_p": 0.5,
    "typical_p": 0.5,
    "repetition_penalty": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {3: 0.5},
    "allowed_token_ids": [3],
    "bad_words": ["ab"],
    "bad_word_ids": [TokenIds(ids=[3])],
    "min_tokens": 3,
    "stop": ["ab"],
    "stop_token_ids": [3],
    "logprobs": 3,
    "prompt_logprobs": 3,
    "n": 3,
    "echo": True,
    "skip_special_tokens": False,
    **STRUCTURES,
}
OTHER_REQUESTS: dict[str, Any] = {
    "prefix_cache": False,
    "request_id": id_text(new_request_id()),
    "text": "ab",
    "token_ids": TokenIds(ids=[3]),
    "conversation": inference_pb2.Conversation(messages=[{"role": "user", "content": "ab"}]),
    "max_tokens": 3,
    "sampling": SamplingParameters(seed=9),
    "cache_salt": "mine",
    "on_disconnect": inference_pb2.OnDisconnect(action=inference_pb2.OnDisconnect.ACTION_DETACH),
    "priority": inference_pb2.PRIORITY_HIGH,
    "output": inference_pb2.OUTPUT_TOKENS_ONLY,
    "client_state": b"mine",
}


def parts_of(value: Any) -> Any:
    """All parts of an object as plain data."""
    if isinstance(value, str | bytes | int | float | Enum | None):
        return value
    if isinstance(value, Mapping):
        return sorted((str(key), parts_of(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque | array):
        return [parts_of(item) for item in value]
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= set(getattr(value, "__dict__", ()))
    return type(value).__name__, [(name, parts_of(getattr(value, name))) for name in sorted(names)]


def outcome_of(message: inference_pb2.GenerateRequest) -> Any:
    """The parts of the request, or the rejection text."""
    try:
        return parts_of(accept_request(message))
    except InvalidRequest as error:
        return str(error)


PLAIN = inference_pb2.GenerateRequest(
    request_id=id_text(new_request_id()),
    token_ids=TokenIds(ids=[1, 0]),
    max_tokens=MAX_TOKENS,
    sampling=SamplingParameters(seed=1),
)


def changed(path: str, value: Any) -> inference_pb2.GenerateRequest:
    """PLAIN with one field changed."""
    message = inference_pb2.GenerateRequest()
    message.CopyFrom(PLAIN)
    place, _, name = path.rpartition(".")
    target: Any = message.sampling if place else message
    target.ClearField(name)
    target.MergeFrom(type(target)(**{name: value}))
    return message


@pytest.mark.parametrize(
    ("path", "values"),
    [
        *((f"sampling.{name}", OTHER_VALUES) for name in SamplingParameters.DESCRIPTOR.fields_by_name),
        *((name, OTHER_REQUESTS) for name in inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name),
    ],
)
def test_every_field_of_the_contract_has_an_effect_or_is_rejected(path: str, values: dict[str, Any]) -> None:
    name = path.rpartition(".")[2]
    assert name in values, f"{path} is new: say here what another value of it looks like"
    message = changed(path, values[name])
    outcome = outcome_of(message)
    assert outcome != outcome_of(PLAIN), f"nothing reads {path}"
    assert not isinstance(outcome, str) or name in outcome, f"{path} is refused as something else"


def test_a_request_is_the_same_request_twice() -> None:
    """Otherwise the previous test would find an effect of every field."""
    assert outcome_of(PLAIN) == outcome_of(PLAIN)


def test_an_output_of_tokens_only_has_no_stop_strings() -> None:
    message = request_with(stop=["ab"])
    message.output = inference_pb2.OUTPUT_TOKENS_ONLY
    assert refusal(message) == "stop needs text, output is TOKENS_ONLY: use stop_token_ids"
    message.output = 7  # type: ignore[assignment]
    assert refusal(message) == "output is 7, must be TEXT or TOKENS_ONLY"


# What all choices carry to every stage


def test_bans_and_biases_of_all_choices_together_are_bounded() -> None:
    word = TokenIds(ids=[1] * 64)
    accept(request_with(bad_word_ids=[word] * 512, n=2))
    text = refusal(request_with(bad_word_ids=[word] * 512, n=2, logit_bias={3: 1.0}))
    assert text == (
        "logit_bias and bad_words have 32769 entries and tokens for each of n = 2 choices, 65538 in all; "
        "at most 65536"
    )


OnDisconnect = inference_pb2.OnDisconnect


def test_the_kv_cache_bounds_sequences_below_the_model_limit() -> None:
    assert PLAN.max_sequence_tokens == KV_LIMIT < MODEL_LIMIT


# Prompts


def test_a_prompt_is_needed() -> None:
    assert "a prompt is needed" in refusal(inference_pb2.GenerateRequest())


@pytest.mark.parametrize(
    "request_", [request_of(), inference_pb2.GenerateRequest(text="")], ids=["token ids", "text"]
)
def test_an_empty_prompt_is_rejected(request_: inference_pb2.GenerateRequest) -> None:
    assert refusal(request_) == "the prompt has no tokens; at least 1 is needed"


@pytest.mark.parametrize("token", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_rejected_intake(token: int) -> None:
    text = refusal(request_of(1, token, 2))
    assert text == f"prompt token id {token} is outside the vocabulary [0, {VOCAB_SIZE})"
    assert accept(request_of(0, VOCAB_SIZE - 1)).all_tokens == (0, VOCAB_SIZE - 1)


def test_text_and_conversations_are_tokenized() -> None:
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
def test_a_text_that_can_never_fit_is_rejected_before_it_is_tokenized(
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
def test_a_sequence_that_can_never_fit_is_rejected_with_the_numbers(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    text = refusal(request_of(*[1] * num_prompt_tokens, max_tokens=max_tokens))
    for number in (num_prompt_tokens, max_tokens, num_prompt_tokens + max_tokens, KV_LIMIT, MODEL_LIMIT):
        assert str(number) in text
    assert f"KV cache: {KV_LIMIT} = 32 blocks of 16" in text


def test_a_prompt_beyond_the_limit_is_rejected_without_max_tokens_too() -> None:
    assert str(KV_LIMIT + 2) in refusal(request_of(*[1] * (KV_LIMIT + 1)))
    assert str(KV_LIMIT + 1) in refusal(request_of(*[1] * KV_LIMIT))


def test_max_tokens_of_zero_computes_a_prompt_that_may_fill_the_context() -> None:
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
def test_max_tokens_defaults_to_256_or_the_remaining_context(num_prompt_tokens: int, max_tokens: int) -> None:
    assert accept(request_of(*[1] * num_prompt_tokens)).max_tokens == max_tokens


@given(st.integers(1, KV_LIMIT + 5), st.integers(0, KV_LIMIT + 5))
def test_a_sequence_of_the_exact_limit_is_accepted(num_prompt_tokens: int, max_tokens: int) -> None:
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
    assert [sequence.key for sequence in sequences] == [(request.id, index) for index in range(num_choices)]
    assert [sequence.order.choice for sequence in sequences] == list(range(num_choices))
    assert {sequence.order.arrival for sequence in sequences} == {3}
    assert {(sequence.all_tokens, sequence.max_tokens, sequence.sampling) for sequence in sequences} == {
        ((4, 3), 9, sequences[0].sampling)
    }


def test_all_choices_share_one_chosen_seed() -> None:
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


def test_an_unknown_priority_is_rejected() -> None:
    message = request_of(1)
    message.priority = 4  # type: ignore[assignment]
    assert refusal(message) == "priority is 4, must be LOW, NORMAL or HIGH"


@pytest.mark.parametrize(
    ("policy", "keep_s"),
    [
        (None, None),
        (OnDisconnect(), None),
        (OnDisconnect(action=OnDisconnect.ACTION_CANCEL), None),
        (OnDisconnect(action=OnDisconnect.ACTION_DETACH), DEFAULT_KEEP_S),
        (OnDisconnect(action=OnDisconnect.ACTION_DETACH, keep_for=duration(1e-3)), 1e-3),
        (
            OnDisconnect(action=OnDisconnect.ACTION_DETACH, keep_for=duration(KEEP_RANGE_S.high)),
            KEEP_RANGE_S.high,
        ),
    ],
)
def test_output_is_kept_only_where_requested(policy: OnDisconnect | None, keep_s: float | None) -> None:
    assert accept_request(request_of(1, on_disconnect=policy)).keep_s == (
        None if keep_s is None else pytest.approx(keep_s)
    )


@pytest.mark.parametrize("keep_s", [0.0, -1.0, KEEP_RANGE_S.high + 1, 1e9, -1e9])
def test_a_time_to_keep_out_of_range_is_rejected(keep_s: float) -> None:
    policy = OnDisconnect(action=OnDisconnect.ACTION_DETACH, keep_for=duration(keep_s))
    assert refusal(request_of(1, on_disconnect=policy)) == f"keep_for is {keep_s:g} s, must be in (0, 3600]"


@pytest.mark.parametrize("action", [OnDisconnect.ACTION_UNSPECIFIED, OnDisconnect.ACTION_CANCEL])
def test_a_time_to_keep_that_would_be_ignored_is_rejected(action: OnDisconnect.Action.ValueType) -> None:
    policy = OnDisconnect(action=action, keep_for=duration(5))
    assert (
        refusal(request_of(1, on_disconnect=policy)) == "on_disconnect has keep_for, which only DETACH takes"
    )


def test_an_unknown_disconnect_action_is_rejected() -> None:
    message = request_of(1)
    message.on_disconnect.action = 3  # type: ignore[assignment]
    assert refusal(message) == "on_disconnect is 3, must be CANCEL or DETACH"


def test_only_tokenizer_work_goes_to_its_threads() -> None:
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
def test_an_id_other_than_uuid7_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        request_id_of(request_of(1, request_id=text))


def with_unknown_field(message: Message, number: int) -> None:
    """A request of a newer client, with an unknown varint field."""
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
    request.on_disconnect.action = OnDisconnect.ACTION_DETACH
    return request


@pytest.mark.parametrize(
    "place",
    [
        *("GenerateRequest", "SamplingParameters", "Conversation", "ChatMessage", "TokenIds"),
        *("OnDisconnect", "Choices"),
    ],
)
def test_an_ignored_field_is_rejected_at_any_depth(place: str) -> None:
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
    with pytest.raises(InvalidRequest, match=f"{place} has field 29, unknown"):
        decoder.decode(request.SerializeToString())
