"""Conversations of every API reach templates of every kind whole, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.fake_upstream import STOP, Served, answer, builtin_codec, serve

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITHOUT_RESULTS = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ITEMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for key, value in c.function.arguments | items %}{{ key }}{{ value }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
ONE_TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
USER = {"role": "user", "content": "hi"}
SYSTEM, LATE = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [SYSTEM, LATE, USER]},
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": "Be kind."}, USER],
    },
    "/v1/messages": {"system": "Be brief.", "messages": [LATE, USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"system": "Be brief.", "messages": [LATE, USER]},
    "/tokenize": {"messages": [SYSTEM, LATE, USER]},
}
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"zone": '}}
RESULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ]
    },
    "/v1/responses": {
        "input": [
            USER,
            {"type": "function_call", "call_id": "c", "name": "clock", "arguments": '{"zone": '},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ]
    },
    "/v1/messages": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "clock", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
        ],
        "max_tokens": 5,
    },
}


async def prompt_of(served: Served, path: str, body: dict[str, Any]) -> str:
    """The prompt of a request; its number of tokens where the API tells no more."""
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    if path.endswith("count_tokens"):
        return str(response.json()["input_tokens"])
    ids = response.json()["tokens"] if path == "/tokenize" else list(served.request.token_ids.ids)
    return builtin_codec().decode(ids)


@pytest.mark.parametrize("path", BODIES)
async def test_system_messages_are_merged_for_a_strict_template(path: str) -> None:
    async with serve(answer("Yes.", reason=STOP)) as served:
        served.gateway.template = STRICT
        expected = "<system>Be brief.\n\nBe kind.<user>hi"
        found = await prompt_of(served, path, BODIES[path])
        assert found in (expected, str(len(builtin_codec().encode(expected, add_special_tokens=False))))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_template_of_parts_gets_parts(path: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    kinds = "input_text" if path == "/v1/responses" else "text"
    parts = [{**part, "type": kinds} for part in ONE_TWO]
    joined = "one\ntwo;" if path in ("/v1/responses", "/v1/messages") else "one;two;"
    async with serve(answer("Yes.", reason=STOP)) as served:
        served.gateway.template = PARTS
        more = {"max_tokens": 5} if path == "/v1/messages" else {}
        body = {field: [USER, {"role": "user", "content": parts}], **more}
        assert await prompt_of(served, path, body) == f"<user>hi;<user>{joined}"


@pytest.mark.parametrize("path", RESULTS)
async def test_a_result_that_the_template_leaves_out_is_refused(path: str) -> None:
    async with serve() as served:
        served.gateway.template = WITHOUT_RESULTS
        response = await served.client.post(path, json=RESULTS[path])
        assert response.status_code == 400
        text = response.json()["error"]["message"]
        assert "the text of message 3 (role 'tool') does not reach the prompt" in text
        assert served.upstream.streams == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_call_whose_arguments_were_cut_is_named(path: str) -> None:
    async with serve() as served:
        served.gateway.template = ITEMS
        response = await served.client.post(path, json=RESULTS[path])
        assert response.status_code == 400
        assert (
            "arguments '{\"zone\": ' of the call 'clock' in message 2" in response.json()["error"]["message"]
        )


async def test_arguments_of_null_are_an_empty_object() -> None:
    async with serve() as served:
        served.gateway.template = ITEMS
        call = {"id": "c", "function": {"name": "clock", "arguments": "null"}}
        body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        assert await prompt_of(served, "/v1/chat/completions", body) == "<user>hi<assistant>"
