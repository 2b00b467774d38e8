"""Every request parameter has a keyword that sets its field; values that do not fit are rejected by name."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from stageline import Detach, GenerateOptions, InvalidRequest, Priority
from stageline.client.request import build_request, detokenize_request, tokenize_request
from stageline_rpc.v1 import inference_pb2
from wire.channels import MAX_MESSAGE_BYTES
from wire.ids import id_text, new_request_id

REQUEST_ID = id_text(new_request_id())
# The prompt, the group of sampling parameters, and `output`: a client always asks for text.
NO_KEYWORD = {"text", "token_ids", "conversation", "sampling", "output", "client_state"}
NO_FIELD = {"attach_secret", "timeout_s"}

SAMPLES: dict[str, tuple[object, Callable[[Any], object], object]] = {
    "temperature": (0.5, float, 0.5),
    "top_k": (7, int, 7),
    "top_p": (0.25, float, 0.25),
    "seed": (2**64 - 1, int, 2**64 - 1),
    "ignore_eos": (True, bool, True),
    "min_p": (0.125, float, 0.125),
    "typical_p": (0.75, float, 0.75),
    "repetition_penalty": (1.5, float, 1.5),
    "frequency_penalty": (-2, float, -2.0),
    "presence_penalty": (0, float, 0.0),
    "logit_bias": ({5: -1.5, 6: 2}, dict, {5: -1.5, 6: 2.0}),
    "allowed_token_ids": ({3}, list, [3]),
    "bad_words": (["one", "two"], list, ["one", "two"]),
    "bad_word_ids": ([[1, 2], (3,)], lambda words: [list(word.ids) for word in words], [[1, 2], [3]]),
    "min_tokens": (3, int, 3),
    "stop": (["a", "b"], list, ["a", "b"]),
    "stop_token_ids": (range(2), list, [0, 1]),
    "logprobs": (0, int, 0),
    "prompt_logprobs": (20, int, 20),
    "n": (2, int, 2),
    "echo": (True, bool, True),
    "skip_special_tokens": (False, bool, False),
    "json_schema": ({"type": "object"}, json.loads, {"type": "object"}),
    "regex": ("a+", str, "a+"),
    "choice": (["yes", "no"], lambda choices: list(choices.texts), ["yes", "no"]),
    "grammar": ("start: /a/", str, "start: /a/"),
    "request_id": (REQUEST_ID, str, REQUEST_ID),
    "max_tokens": (0, int, 0),
    "cache_salt": ("tenant", str, "tenant"),
    "prefix_cache": (False, bool, False),
    "priority": ("high", int, inference_pb2.PRIORITY_HIGH),
    "on_disconnect": (
        Detach(keep_s=2.5),
        lambda message: (message.action, message.keep_for.ToMicroseconds() / 1e6),
        (inference_pb2.OnDisconnect.ACTION_DETACH, 2.5),
    ),
}
FIELDS = [
    *(
        (inference_pb2.SamplingParameters, field.name)
        for field in inference_pb2.SamplingParameters.DESCRIPTOR.fields
    ),
    *(
        (inference_pb2.GenerateRequest, field.name)
        for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields
        if field.name not in NO_KEYWORD
    ),
]


def build(**options: Any) -> inference_pb2.GenerateRequest:
    return build_request("x", GenerateOptions(**options))


def is_set(message: Message, name: str) -> bool:
    return name in {field.name for field, _ in message.ListFields()}


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_keyword_reaches_its_field_and_no_other(kind: type[Message], name: str) -> None:
    value, read, expected = SAMPLES[name]
    request = build(**{name: value})
    message = request.sampling if kind is inference_pb2.SamplingParameters else request
    assert read(getattr(message, name)) == expected

    unset = {"text", "sampling", "request_id", name}
    assert {field.name for field, _ in request.ListFields()} <= unset
    assert {field.name for field, _ in request.sampling.ListFields()} <= {name}


def test_keywords_and_fields_match_one_to_one() -> None:
    assert set(GenerateOptions.__annotations__) == {name for _, name in FIELDS} | NO_FIELD


@pytest.mark.parametrize("name", sorted(GenerateOptions.__annotations__))
def test_none_is_unset(name: str) -> None:
    request = build(**{name: None})
    assert request.sampling == inference_pb2.SamplingParameters()
    assert {field.name for field, _ in request.ListFields()} == {"request_id", "text", "sampling"}


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "logprobs", "prompt_logprobs"])
def test_zero_is_sent_where_it_differs_from_unset(name: str) -> None:
    assert build(**{name: 0}).sampling.HasField(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "top_k is -1, must be in [0, 4294967295]"),
        ({"seed": 2**64}, "seed is 18446744073709551616, must be in [0, 18446744073709551615]"),
        ({"n": 1.5}, "n is of type float, must be an integer"),
        ({"min_tokens": True}, "min_tokens is of type bool, must be an integer"),
        ({"temperature": "hot"}, "temperature is of type str, must be a number"),
        ({"temperature": False}, "temperature is of type bool, must be a number"),
        ({"min_p": 1e300}, "min_p is beyond what a 32-bit float holds (3.403e+38)"),
        ({"min_p": 10**400}, "min_p is beyond what a 32-bit float holds (3.403e+38)"),
        ({"echo": 1}, "echo is of type int, must be True or False"),
        ({"stop": 3}, "stop is of type int, must be a list of texts"),
        ({"stop": ["a", 3]}, "stop is of type int, must be text"),
        ({"stop": "\ud800"}, "stop has a lone surrogate at character 0"),
        ({"bad_words": "word"}, "bad_words is of type str, must be a list of texts"),
        ({"choice": "yes"}, "choice is of type str, must be a list of texts"),
        ({"bad_word_ids": [3]}, "bad_word_ids is of type int, must be a list of token ids"),
        ({"stop_token_ids": [-3]}, "a token id of stop_token_ids is -3, must be in [0, 4294967295]"),
        ({"stop_token_ids": 3}, "stop_token_ids is of type int, must be a list of token ids"),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids is empty, which allows nothing: omit it to allow every token",
        ),
        ({"logit_bias": [(1, 2)]}, "logit_bias is of type list, must map token ids to numbers"),
        ({"logit_bias": {-1: 2.0}}, "a token id of logit_bias is -1, must be in [0, 4294967295]"),
        ({"logit_bias": {"5": 2.0}}, "a token id of logit_bias is of type str, must be an integer"),
        ({"logit_bias": {5: "x"}}, "logit_bias[5] is of type str, must be a number"),
        ({"json_schema": True}, "json_schema is of type bool, must be text"),
        (
            {"json_schema": {"const": float("nan")}},
            "json_schema cannot be written as JSON: Out of range float values are not JSON compliant",
        ),
        ({"priority": "urgent"}, "priority is 'urgent', must be one of low, normal, high"),
        ({"on_disconnect": "stay"}, "on_disconnect is 'stay', must be 'cancel', 'detach' or a Detach"),
        (
            {"on_disconnect": Detach(keep_s=math.inf)},
            "keep_s of on_disconnect is inf, must be a number of seconds",
        ),
        (
            {"on_disconnect": Detach(keep_s=math.nan)},
            "keep_s of on_disconnect is nan, must be a number of seconds",
        ),
        ({"on_disconnect": Detach(keep_s="x")}, "keep_s of on_disconnect is of type str, must be a number"),  # type: ignore[arg-type]
        ({"request_id": 5}, "request_id is of type int, must be text"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice exclude each other: choose one"),
        (
            {"json_schema": "{}", "grammar": "", "regex": "a"},
            "json_schema and regex and grammar exclude each other: choose one",
        ),
    ],
)
def test_values_outside_the_message_range_are_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_representable_values_are_left_to_the_server(value: float) -> None:
    assert build(temperature=value).sampling.HasField("temperature")


def test_a_single_stop_text_is_no_list_of_characters() -> None:
    assert list(build(stop="end").sampling.stop) == ["end"]


def test_a_schema_as_text_is_sent_as_it_is() -> None:
    assert build(json_schema='{ "type":"null" }').sampling.json_schema == '{ "type":"null" }'


@pytest.mark.parametrize("priority", list(Priority))
def test_every_priority_has_its_number(priority: Priority) -> None:
    assert inference_pb2.Priority.Name(build(priority=priority).priority) == f"PRIORITY_{priority.name}"


def test_detach_as_a_word_leaves_the_time_to_the_server() -> None:
    message = build(on_disconnect="detach").on_disconnect
    assert message.action == inference_pb2.OnDisconnect.ACTION_DETACH
    assert not message.HasField("keep_for")
    assert build(on_disconnect="cancel").on_disconnect.action == inference_pb2.OnDisconnect.ACTION_CANCEL


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        build(temprature=1.0)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (7, "the prompt is of type int, must be a list of chat messages"),
        ([], "the prompt is an empty list: it needs at least one chat message"),
        ([1, 2], "a chat message has exactly 'role' and 'content', this one is 1"),
        ("\ud800", "the prompt has a lone surrogate at character 0"),
        ("n\udce9", "the prompt has a byte 0xe9 that is not UTF-8 at character 1"),
        ("x" * MAX_MESSAGE_BYTES, "the request has .* bytes with its prompt, a message has at most"),
    ],
    ids=["number", "empty", "token ids", "surrogate", "byte", "large"],
)
def test_what_cannot_be_tokenized_is_rejected_before_it_is_sent(prompt: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        tokenize_request(prompt)


@pytest.mark.parametrize(
    ("ids", "skips", "problem"),
    [
        ("12", True, "token_ids is of type str, must be a list of token ids"),
        ([-1], True, "a token id of token_ids is -1, must be in"),
        ([1], 1, "skip_special_tokens is of type int, must be True or False"),
    ],
    ids=["text", "negative", "number"],
)
def test_what_are_no_token_ids_is_rejected_before_it_is_sent(ids: Any, skips: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        detokenize_request(ids, skip_special_tokens=skips)
