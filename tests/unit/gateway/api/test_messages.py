"""`/v1/messages`: blocks in, blocks and events out, errors in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from tests.unit.gateway.fake_upstream import LENGTH, STOP, Served, answer, builtin_codec, failure, serve
from wire.ids import parse_request_id

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": "weather",
        "description": "Tells it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SHOWN = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}|{% endfor %}"
    "{{ enable_thinking }}"
)


async def post(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post(PATH, json={"max_tokens": 20, "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is the type in its data."""
    response = await served.client.post(
        f"{PATH}?beta=true", json={"max_tokens": 20, "messages": HELLO, "stream": True, **body}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in filter(None, response.text.split("\n\n")):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events of a stream."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[-1] == {"type": "message_stop"}
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[2:-1]:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(message["content"]), False)
                message["content"].append(event["content_block"])
                is_open = True
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert (event["index"], is_open) == (len(message["content"]) - 1, True)
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_the_body_of_a_message() -> None:
    async with serve() as served:
        body = await post(served, system="Be brief.")
        request_id = parse_request_id(served.request.request_id)
        assert body["usage"].pop("stageline")["restarts"] == 1
        assert body == {
            "id": f"msg_{request_id.hex()}",
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": " a bird sang"}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(served.request.token_ids.ids) - 2,
                "cache_read_input_tokens": 2,
                "cache_creation_input_tokens": 0,
                "output_tokens": 3,
            },
        }
        assert served.request.max_tokens == 20


@pytest.mark.parametrize(
    ("text", "kinds", "stop_reason"),
    [
        ("A bird sang.", ["text"], "end_turn"),
        (f"Let me see.{CALL}", ["text", "tool_use"], "tool_use"),
        (
            f"<think>Rain?</think>I ask.{CALL}\n{CALL}",
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
    ],
)
async def test_blocks_are_the_same_whole_and_streamed(text: str, kinds: list[str], stop_reason: str) -> None:
    script = answer(text, reason=STOP)
    async with serve(script, tool_parser="hermes", reasoning_parser="think") as served:
        whole = await post(served, tools=TOOLS, max_tokens=100)
        assert [block["type"] for block in whole["content"]] == kinds
        assert whole["stop_reason"] == stop_reason
        for block in whole["content"]:
            if block["type"] == "tool_use":
                assert (block["name"], block["input"]) == ("weather", {"city": "Oslo"})
        told = put_together(await streamed(served, tools=TOOLS, max_tokens=100))
        for message in (whole, told):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
        assert told == whole


@pytest.mark.parametrize("nested", ["[" * 300 + "]" * 300, '"\\ud83d"'])
async def test_a_call_with_any_arguments_is_served(nested: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {{"city": {nested}}}}}</tool_call>'
    async with serve(answer(text, reason=STOP), tool_parser="hermes") as served:
        (block,) = (await post(served, tools=TOOLS, max_tokens=200))["content"]
        assert (block["name"], block["input"]) == ("weather", {} if "[" in nested else {"city": "\ufffd"})


async def test_a_stop_sequence_is_named() -> None:
    async with serve(answer(" a bird sang here", reason=LENGTH)) as served:
        for told in (
            await post(served, stop_sequences=[" sang"]),
            put_together(await streamed(served, stop_sequences=[" sang"])),
        ):
            assert told["content"] == [{"type": "text", "text": " a bird"}]
            assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", " sang")


async def test_blocks_become_messages_of_the_template() -> None:
    async with serve(tool_parser="hermes") as served:
        served.gateway.template = SHOWN
        call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]}
        text = {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}
        await post(
            served,
            system=[{"type": "text", "text": "Be brief."}],
            messages=[
                {
                    "role": "human",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, call]},
                {"role": "user", "content": [result, text]},
            ],
            tools=TOOLS,
            thinking={"type": "disabled"},
        )
        assert builtin_codec().decode(served.request.token_ids.ids) == (
            "weather;system=Be brief.|user=one\ntwo|assistant=(Oslo)|tool=rain|user=so?|False"
        )


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    async with serve() as served:
        messages = [*HELLO, {"role": "assistant", "content": "Once"}]
        await post(served, messages=messages)
        prompt = builtin_codec().decode(served.request.token_ids.ids, skip_special_tokens=False)
        assert prompt.endswith("Once")


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True),
    ],
)
async def test_tool_choices(choice: dict[str, Any], has_grammar: bool) -> None:
    async with serve(answer(CALL, reason=STOP), tool_parser="hermes") as served:
        body = await post(served, tools=TOOLS, tool_choice=choice, max_tokens=100)
        assert bool(served.request.sampling.grammar) == has_grammar
        assert body["stop_reason"] == ("end_turn" if choice["type"] == "none" else "tool_use")


async def test_an_output_format_is_a_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    async with serve() as served:
        await post(served, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert json.loads(served.request.sampling.json_schema) == schema


async def test_tokens_are_counted_as_they_are_sent() -> None:
    async with serve() as served:
        await post(served, system="Be brief.")
        response = await served.client.post(
            f"{PATH}/count_tokens", json={"model": "tiny", "messages": HELLO, "system": "Be brief."}
        )
        assert response.json() == {"input_tokens": len(served.request.token_ids.ids)}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "document"}]}, "system[0] is of type 'document'"),
        ({"tools": [{"name": "bash"}]}, "tools[0] has no input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": ["any"]}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "'nobody'"),
        ({"n": 2}, "n is not supported"),
        ({"stop": "x"}, "use stop_sequences"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": {}}]}]},
            "messages[0].content[0].name",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], text: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"max_tokens": 5, "messages": HELLO, **body})
        assert response.status_code == 400, response.text
        found = response.json()
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
        assert text in found["error"]["message"]
        assert served.upstream.streams == []


async def test_errors_have_the_names_the_shape_and_the_id_of_anthropic() -> None:
    async with serve() as served:
        body = {"max_tokens": 5, "messages": HELLO, "stop_sequences": [""]}
        response = await served.client.post(PATH, json=body, headers={"x-request-id": "mine"})
        assert response.json()["error"]["param"] == "stop_sequences"
        assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
        for response in (await served.client.get(PATH), await served.client.post(f"{PATH}/none")):
            assert response.status_code in (404, 405)
            assert response.json()["type"] == "error"
            assert response.headers["request-id"]


async def test_fields_of_anthropic_are_accepted_and_unknown_ones_named() -> None:
    async with serve() as served:
        response = await served.client.post(
            PATH,
            json={
                "max_tokens": 5,
                "messages": HELLO,
                "metadata": {"user_id": "u"},
                "cache_control": {"type": "ephemeral"},
                "context_management": {"edits": []},
                "colour": "red",
            },
            headers={"x-api-key": "any", "anthropic-version": "2023-06-01"},
        )
        assert response.status_code == 200, response.text
        assert response.headers["x-stageline-ignored"] == "colour"
        assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("status", "http_status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 529, "overloaded_error"),
        (grpc.StatusCode.UNAVAILABLE, 503, "api_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
        (grpc.StatusCode.INTERNAL, 500, "api_error"),
    ],
)
async def test_failures_before_and_within_a_stream(
    status: grpc.StatusCode, http_status: int, kind: str
) -> None:
    async with serve() as served:
        served.upstream.refusal = failure(status, retry_after_s=2.0)
        response = await served.client.post(PATH, json={"max_tokens": 5, "messages": HELLO})
        assert (response.status_code, response.json()["error"]["type"]) == (http_status, kind)
        assert response.headers.get("retry-after") == ("2" if http_status in (503, 529) else None)
    async with serve(lambda _: [failure(status)]) as served:
        events = await streamed(served)
        assert [event["type"] for event in events] == ["message_start", "ping", "error"]
        assert events[-1]["error"]["type"] == kind


async def test_an_unknown_model_is_not_found() -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"model": "x", "max_tokens": 5, "messages": HELLO})
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_tools_of_the_server_are_left_out_and_named() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    shell = {"type": "bash_20250124", "name": "bash"}
    body = {"max_tokens": 5, "messages": HELLO, "tools": [search, *TOOLS, shell]}
    named = f"tools[0] (web_search_20250305 web_search), tools[{len(TOOLS) + 1}] (bash_20250124 bash)"
    async with serve(tool_parser="hermes") as served:
        for path in (PATH, f"{PATH}/count_tokens"):
            response = await served.client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-stageline-ignored"] == named
        demanded = {**body, "tool_choice": {"type": "tool", "name": "web_search"}}
        response = await served.client.post(PATH, json=demanded)
        text = "tool_choice demands tools[0] (web_search_20250305 web_search): only functions are served"
        assert (response.status_code, response.json()["error"]["message"]) == (400, text)
        alone = {**body, "tools": [search], "tool_choice": {"type": "any"}}
        response = await served.client.post(PATH, json=alone)
        assert (response.status_code, response.json()["error"]["message"]) == (400, text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 200}, "stop_sequences"),
        (
            {
                "tools": [{"name": "f", "strict": True, "input_schema": {"type": "object", "not": {}}}],
            },
            "tools[0].input_schema",
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
                "guided_regex": "a",
            },
            "guided_regex",
        ),
    ],
)
async def test_errors_have_the_names_of_the_clients_fields(body: dict[str, Any], param: str) -> None:
    async with serve(tool_parser="hermes") as served:
        response = await served.client.post(PATH, json={"max_tokens": 5, "messages": HELLO, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "stop has" not in error["message"] and "response_format" not in error["message"]
