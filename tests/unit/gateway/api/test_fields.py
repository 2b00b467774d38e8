"""Every field takes effect, is accepted by a list, is refused by name, or is reported as ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.api.chat import ChatRequest
from gateway.api.completions import CompletionRequest
from gateway.api.fields import ACCEPTED, REFUSED
from gateway.api.sampling import GenerationFields
from gateway.upstream.contract import ModelInfo, UpstreamFailure
from stageline_rpc.v1 import inference_pb2
from tests.unit.gateway.fake_upstream import MODEL, serve
from wire.sampling import SAMPLING_NUMBERS, SamplingNumber

PATH = "/v1/completions"
ANY_OBJECT = '{"type": "object"}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": -1}, {}),
        ({"min_p": 0.25}, {"min_p": 0.25}),
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"n": 3}, {"n": 3}),
        ({"presence_penalty": 1}, {"presence_penalty": 1.0}),
        ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"5": 2, "7": -100}}, {"logit_bias": {5: 2.0, 7: -100.0}}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"allowed_token_ids": [3, 4]}, {"allowed_token_ids": [3, 4]}),
        ({"bad_words": ["cat"]}, {"bad_words": ["cat"]}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": ANY_OBJECT}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": SCHEMA_TEXT},
        ),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, {"json_schema": SCHEMA_TEXT}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": ANY_OBJECT}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            {"choice": inference_pb2.Choices(texts=["a", "b"])},
        ),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA_TEXT}),
        ({"guided_regex": "b"}, {"regex": "b"}),
        ({"guided_choice": ["c"]}, {"choice": inference_pb2.Choices(texts=["c"])}),
        ({"guided_grammar": 'start: "d"'}, {"grammar": 'start: "d"'}),
    ],
)
async def test_sampling_fields_reach_the_coordinator(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert response.status_code == 200, response.text
        expected = inference_pb2.SamplingParameters(**{"n": 1, "temperature": 1.0, **sampling})
        assert served.request.sampling == expected
        assert "x-stageline-ignored" not in response.headers


async def test_the_checkpoints_generation_config_sets_defaults() -> None:
    async with serve() as served:
        config = {"temperature": 0.5, "top_k": 20, "top_p": 0.75}
        served.upstream.model = ModelInfo(
            name="tiny", fingerprint="", vocab_size=2048, max_sequence_tokens=256, generation_config=config
        )
        for body, expected in (
            ({}, {"temperature": 0.5, "top_k": 20, "top_p": 0.75}),
            ({"temperature": 0, "top_k": -1, "top_p": 1}, {"temperature": 0.0, "top_p": 1.0}),
        ):
            await served.client.post(PATH, json={"prompt": "a", **body})
            assert served.request.sampling == inference_pb2.SamplingParameters(n=1, **expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"priority": -3}, {"priority": inference_pb2.PRIORITY_HIGH}),
        ({"priority": 9}, {"priority": inference_pb2.PRIORITY_LOW}),
        ({"cache_salt": "s"}, {"cache_salt": "s"}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        (
            {"request_id": "0190a0b0-0000-7000-8000-000000000001"},
            {"request_id": "0190a0b0-0000-7000-8000-000000000001"},
        ),
        (
            {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2},
            {"token_ids": inference_pb2.TokenIds(ids=[2, 3])},
        ),
        (
            {"prompt": list(range(300)), "truncate_prompt_tokens": -1, "max_tokens": 6},
            {"token_ids": inference_pb2.TokenIds(ids=range(50, 300))},
        ),
    ],
)
async def test_other_fields_reach_the_coordinator(body: dict[str, Any], expected: dict[str, Any]) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert response.status_code == 200, response.text
        for name, value in expected.items():
            assert getattr(served.request, name) == value


async def test_without_skipping_special_tokens_have_text() -> None:
    from tests.unit.gateway.fake_upstream import EOS, Tokens, end_of

    async with serve(lambda _: [Tokens(0, 0, [EOS]), end_of(0, 1)]) as served:
        for skip, text in ((True, ""), (False, "<|endoftext|>")):
            response = await served.client.post(PATH, json={"prompt": "a", "skip_special_tokens": skip})
            assert response.json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 101}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
async def test_values_out_of_range_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers["x-should-retry"] == "false"
        assert served.upstream.streams == []


@pytest.mark.parametrize(
    ("body", "field", "message", "param", "shown"),
    [
        (
            {},
            "stop_token_ids",
            "stop_token_ids has token id 9",
            "stop_token_ids",
            "stop_token_ids has token id 9",
        ),
        ({}, "prompt", "the prompt has no tokens", "prompt", "the prompt has no tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "json_schema",
            "json_schema: too deep",
            "response_format",
            "response_format: too deep",
        ),
        ({"guided_regex": "a"}, "regex", "regex: empty", "guided_regex", "guided_regex: empty"),
        (
            {"guided_regex": "a", "ignore_eos": True},
            "ignore_eos",
            "ignore_eos excludes structured output",
            "ignore_eos",
            "ignore_eos excludes structured output",
        ),
    ],
)
async def test_what_the_coordinator_refuses_has_the_name_of_the_field(
    body: dict[str, Any], field: str, message: str, param: str, shown: str
) -> None:
    async with serve() as served:
        served.upstream.refusal = UpstreamFailure(
            message, status=grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_REQUEST", field=field
        )
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["message"]) == (param, shown)


async def test_a_token_that_is_none_is_named() -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": [-1, 5]})
        assert response.json()["error"]["message"] == "prompt has token id -1, must be in [0, 2047]"


@pytest.mark.parametrize(("keep", "num_tokens"), [(100, 100), (-1, 240)])
async def test_a_truncated_prompt_leaves_the_default_room(keep: int, num_tokens: int) -> None:
    async with serve() as served:
        body = {"prompt": [1] * 300, "truncate_prompt_tokens": keep}
        response = await served.client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        assert (len(served.request.token_ids.ids), served.request.max_tokens) == (num_tokens, 16)


@pytest.mark.parametrize("name", list(REFUSED))
async def test_fields_that_would_change_the_output_are_refused(name: str) -> None:
    async with serve() as served:
        for value in (None, *REFUSED[name].neutral):
            response = await served.client.post(PATH, json={"prompt": "a", name: value})
            assert response.status_code == 200, response.text
            assert "x-stageline-ignored" not in response.headers
        response = await served.client.post(PATH, json={"prompt": "a", name: {"of": "effect"}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_fields_without_effect_are_accepted_in_strict_mode_too() -> None:
    async with serve(strict_fields=True) as served:
        body = dict.fromkeys(ACCEPTED, "anything")
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert response.status_code == 200, response.text


async def test_unknown_fields_are_named_and_counted_or_refused() -> None:
    body = {"prompt": "a", "colour": "red", "gr\u00f6\u00dfe\n": 1}
    async with serve() as served:
        response = await served.client.post(PATH, json=body)
        assert response.headers["x-stageline-ignored"] == r"colour, 'gr\xf6\xdfe\n'"
        metrics = (await served.client.get("/metrics")).text
        assert "stageline_gateway_ignored_fields_total 2.0" in metrics
    async with serve(strict_fields=True) as served:
        response = await served.client.post(PATH, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "colour")


def test_the_documents_list_every_field_without_effect_and_every_refused_one() -> None:
    document = (Path(__file__).parents[4] / "docs" / "gateway.md").read_text()
    assert [name for name in (*ACCEPTED, *REFUSED) if f"`{name}`" not in document] == []


def test_no_field_has_two_meanings() -> None:
    listed = ACCEPTED.keys() | REFUSED.keys()
    assert not ACCEPTED.keys() & REFUSED.keys()
    assert not CompletionRequest.model_fields.keys() & listed
    assert ChatRequest.model_fields.keys() & listed == {"tools", "tool_choice", "parallel_tool_calls"}


def test_the_fake_model_is_the_one_that_limits_are_tested_with() -> None:
    assert (MODEL.vocab_size, MODEL.max_sequence_tokens) == (2048, 256)


@pytest.mark.parametrize("number", SAMPLING_NUMBERS, ids=lambda number: number.name)
def test_each_number_of_sampling_is_a_field_of_every_request_that_generates(number: SamplingNumber) -> None:
    field = GenerationFields.model_fields[number.name]
    assert (field.annotation, field.default) == (float | None, None)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'},
        {"structured_outputs": {"regex": "[0-9]"}, "guided_regex": "[0-9]"},
        {"structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"]},
        {"structured_outputs": {"json": SCHEMA}, "guided_json": json.dumps(SCHEMA)},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "guided_json": SCHEMA,
        },
    ],
)
async def test_equal_forms_under_several_names_are_one(body: dict[str, Any]) -> None:
    async with serve() as served:
        for given in (body, dict([next(iter(body.items()))])):
            response = await served.client.post(PATH, json={"prompt": "a", **given})
            assert response.status_code == 200, response.text
        both, one = (stream.request.sampling for stream in served.upstream.streams)
        assert both == one and both.WhichOneof("structured_output") is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_grammar": "a"}, "guided_grammar"),
        ({"structured_outputs": {"json": True}, "guided_json": {"minimum": 1}}, "guided_json"),
        (
            {"structured_outputs": {"json": SCHEMA}, "guided_json": "{" * 2000},
            "guided_json",
        ),
        (
            {
                "guided_json": SCHEMA,
                "structured_outputs": {"json": {**SCHEMA, "properties": {"a": {}, "b": {}}}},
            },
            "guided_json",
        ),
    ],
)
async def test_different_forms_exclude_each_other(body: dict[str, Any], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": "a", **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "exclude each other" in response.json()["error"]["message"]


async def test_a_wish_for_the_style_is_named_as_ignored() -> None:
    async with serve() as served:
        messages = [{"role": "user", "content": "hi"}]
        for verbosity, named in (("low", "verbosity"), ("high", "verbosity"), ("medium", None), (None, None)):
            body = {"messages": messages, "verbosity": verbosity}
            response = await served.client.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.headers.get("x-stageline-ignored")) == (200, named)


async def test_every_path_with_a_body_names_what_it_ignored() -> None:
    async with serve() as served:
        messages = [{"role": "user", "content": "hi"}]
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses/input_tokens", {"input": "a"}),
        ):
            response = await served.client.post(path, json={**body, "colour": "red"})
            assert (response.status_code, response.headers.get("x-stageline-ignored")) == (200, "colour"), (
                path
            )
