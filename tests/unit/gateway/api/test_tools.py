"""Tools and reasoning of `/v1/chat/completions`: what is asked of the model, and how its answers are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from builtin_model import MODEL_DIRECTORY
from tests.unit.gateway.fake_upstream import STOP, Served, answer, builtin_codec, events_of, serve
from text.tokenizer import TextCodec

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}
CITY = {"city": "Oslo", "days": 2}
ANSWERS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "mistral": 'Let me see.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
    '{"name": "clock", "arguments": {}}]',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; '
    '{"name": "clock", "parameters": {}}',
}
"""Two calls, where possible after a text."""


async def post(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post(PATH, json={"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(served: Served, **body: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return each choice's message, put together as clients do, with its finish reason; and the usage."""
    events = await events_of(
        served,
        PATH,
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        **{"tools": TOOLS, **body},
    )
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        found = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": []})
        delta = choice["delta"]
        found["content"] += delta.get("content", "")
        found["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(found["calls"]):
                assert part["id"]
                assert part["type"] == "function"
                found["calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            found["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        found["finish_reason"] = choice["finish_reason"] or found.get("finish_reason")
    return choices, chunks[-1]["usage"]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("family", ANSWERS)
async def test_calls_are_the_same_whole_and_streamed(family: str) -> None:
    async with serve(answer(ANSWERS[family], reason=STOP), tool_parser=family) as served:
        whole = await post(served, n=2)
        stream, _ = await streamed(served, n=2)
        for index, choice in enumerate(whole["choices"]):
            message = choice["message"]
            assert calls_of(message) == [("weather", CITY), ("clock", {})]
            assert message["content"] == (None if family == "llama3_json" else "Let me see.")
            assert choice["finish_reason"] == stream[index]["finish_reason"] == "tool_calls"
            assert stream[index]["content"] == (message["content"] or "")
            names = [(call["name"], json.loads(call["arguments"])) for call in stream[index]["calls"]]
            assert names == calls_of(message)
        ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 4


async def test_without_tools_calls_are_text() -> None:
    text = ANSWERS["hermes"]
    for body in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        async with serve(answer(text, reason=STOP), tool_parser="hermes") as served:
            choice = (await post(served, **body))["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
            assert "tool_calls" not in choice["message"]


async def test_the_template_reads_tools_calls_and_results() -> None:
    async with serve(tool_parser="hermes") as served:
        served.gateway.template = (
            "{% for t in tools %}{{ t.function.name }};{% endfor %}"
            "{% for m in messages %}{{ m.name }}{{ m.content }}"
            "{% for c in m.tool_calls %}{{ c.function.arguments.zone }}{% endfor %};{% endfor %}"
        )
        call = {"id": "c1", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
        await post(
            served,
            messages=[
                *HELLO,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            ],
        )
        prompt = builtin_codec().decode(served.request.token_ids.ids)
        assert prompt == "weather;clock;hi;UTC;clocknoon;"


@pytest.mark.parametrize(
    ("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")]
)
async def test_the_finish_reason_follows_what_was_parsed(choice: object, finish_reason: str) -> None:
    async with serve(answer(ANSWERS["hermes"], reason=STOP), tool_parser="hermes") as served:
        assert (await post(served, tool_choice=choice))["choices"][0]["finish_reason"] == finish_reason
        assert bool(served.request.sampling.grammar) == (choice != "auto")
        stream, _ = await streamed(served, tool_choice=choice)
        assert stream[0]["finish_reason"] == finish_reason
    half = ANSWERS["hermes"].partition("days")[0]
    async with serve(answer(half), tool_parser="hermes") as served:
        assert (await post(served, tool_choice=choice))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["<tool", '<tool_call>\n{"na', '<tool_call>\n{"name": "weather", "argu'])
async def test_a_demanded_call_that_is_cut_off_is_no_text(text: str) -> None:
    async with serve(answer(text), tool_parser="hermes") as served:
        (choice,) = (await post(served, tool_choice="required"))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        (choice,) = (await post(served))["choices"]
        assert choice["message"]["content"] == text


async def test_a_strict_tool_is_a_grammar_and_names_what_cannot_be_enforced() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    async with serve(tool_parser="hermes") as served:
        await post(served, tools=[CLOCK, strict])
        assert "weather" in served.request.sampling.grammar
        schema = {"type": "object", "properties": {"x": {"type": "string", "not": {"const": "a"}}}}
        bad = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": schema}}
        response = await served.client.post(PATH, json={"messages": HELLO, "tools": [CLOCK, bad]})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")


async def test_tools_whose_schemas_have_no_room_in_a_grammar_are_refused() -> None:
    schema = {"type": "object", "description": "x" * 140_000}
    big = {"type": "function", "function": {"name": "big", "parameters": schema}}
    async with serve(tool_parser="hermes") as served:
        body = {"messages": HELLO, "tools": [big], "tool_choice": "required"}
        response = await served.client.post(PATH, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools")
        assert "the limit is 131072" in error["message"]


async def test_one_call_where_parallel_calls_are_not_wanted() -> None:
    async with serve(answer(ANSWERS["hermes"], reason=STOP), tool_parser="hermes") as served:
        whole = await post(served, parallel_tool_calls=False)
        assert calls_of(whole["choices"][0]["message"]) == [("weather", CITY)]
        stream, _ = await streamed(served, parallel_tool_calls=False)
        assert [call["name"] for call in stream[0]["calls"]] == ["weather"]


async def test_reasoning_has_two_names_and_is_counted() -> None:
    text = "<think>\nA bird?\n</think>\n\nYes."
    async with serve(answer(text, reason=STOP), reasoning_parser="think") as served:
        body = await post(served, tools=None)
        message, usage = body["choices"][0]["message"], body["usage"]
        assert message["reasoning"] == message["reasoning_content"] == "A bird?"
        assert message["content"] == "Yes."
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_reasoning < usage["completion_tokens"]
        stream, stream_usage = await streamed(served, tools=None)
        assert (stream[0]["reasoning"], stream[0]["content"]) == ("A bird?", "Yes.")
        assert stream_usage["completion_tokens_details"]["reasoning_tokens"] == num_reasoning
        hidden = await post(served, tools=None, include_reasoning=False)
        assert "reasoning" not in hidden["choices"][0]["message"]
        assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning


async def test_reasoning_that_the_prompt_has_opened() -> None:
    async with serve(answer("A bird?</think>Yes.", reason=STOP), reasoning_parser="think") as served:
        served.gateway.template = "{{ messages[0].content }}<think>\n"
        message = (await post(served, tools=None))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("A bird?", "Yes.")


async def test_a_form_of_the_answer_leaves_room_for_calls_and_reasoning() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with serve(tool_parser="hermes", reasoning_parser="think") as served:
        await post(served, response_format=form)
        grammar = served.request.sampling.grammar
        assert "answer: json | " in grammar
        assert grammar.startswith('start: ("<think>" think SPACE)? answer')
        await post(served, response_format=form, tools=None)
        assert "answer: json\n" in served.request.sampling.grammar
    async with serve(tool_parser="hermes") as served:
        await post(served, response_format=form, tools=None)
        assert json.loads(served.request.sampling.json_schema) == SCHEMA


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_reasoning_that_the_prompt_has_closed_is_no_part_of_a_formed_answer(tools: object) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    thinking = "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
    async with serve(tool_parser="hermes", reasoning_parser="think") as served:
        served.gateway.template = "{{ messages[0].content }}" + thinking
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        await post(served, response_format=form, tools=tools, **off)
        sampling = served.request.sampling
        assert "think" not in sampling.grammar
        assert tools is not None or json.loads(sampling.json_schema) == SCHEMA
        await post(served, response_format=form, tools=tools)
        assert served.request.sampling.grammar.startswith("start: think SPACE answer")
        await post(served, tool_choice="required", **off)
        assert "think" not in served.request.sampling.grammar


async def test_reasoning_does_not_begin_within_an_answer_that_is_continued() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    begun = [*HELLO, {"role": "assistant", "content": "Here:"}]
    async with serve(reasoning_parser="think") as served:
        await post(served, messages=begun, tools=None, response_format=form, continue_final_message=True)
        assert json.loads(served.request.sampling.json_schema) == SCHEMA


async def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIRECTORY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|end|>"]})
    codec = TextCodec(tokenizer)
    text = f"{ANSWERS['hermes']}<|end|>"
    async with serve(answer(text, reason=STOP, codec=codec), tool_parser="hermes") as served:
        served.gateway.codec = codec
        choice = (await post(served))["choices"][0]
        assert calls_of(choice["message"]) == [("weather", CITY), ("clock", {})]
        assert choice["message"]["content"] == "Let me see."
        plain = (await post(served, tools=None))["choices"][0]["message"]["content"]
        assert "<" not in plain
        shown = await post(served, tools=None, skip_special_tokens=False)
        assert shown["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with serve(tool_parser="hermes") as served:
        response = await served.client.post(PATH, json={"messages": HELLO, "tools": TOOLS, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert served.upstream.streams == []


async def test_completions_have_no_tools() -> None:
    async with serve() as served:
        response = await served.client.post("/v1/completions", json={"prompt": "hi", "tools": TOOLS})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_tools_that_are_no_functions_are_left_out_and_named() -> None:
    custom = {"type": "custom", "custom": {"name": "patch"}}
    async with serve(tool_parser="hermes") as served:
        body = {"messages": HELLO, "tools": [custom, *TOOLS]}
        response = await served.client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-stageline-ignored"] == "tools[0] (custom patch)"
        demanded = await served.client.post(PATH, json={**body, "tool_choice": custom})
        error = demanded.json()["error"]
        assert (demanded.status_code, error["param"]) == (400, "tool_choice")
        assert error["message"] == "tool_choice demands tools[0] (custom patch): only functions are served"


async def test_the_index_of_a_schema_counts_tools_that_are_left_out() -> None:
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    async with serve(tool_parser="hermes") as served:
        tools = [{"type": "retrieval"}, {"type": "function", "function": strict}]
        response = await served.client.post(PATH, json={"messages": HELLO, "tools": tools})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "a+"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
    ],
)
async def test_a_form_of_the_text_has_no_effect_where_a_call_is_forced(form: dict[str, Any]) -> None:
    async with serve(tool_parser="hermes") as served:
        forced = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
        grammars = []
        for more in ({}, form):
            response = await served.client.post(PATH, json={**forced, **more})
            assert response.status_code == 200, response.text
            grammars.append(served.request.sampling.grammar)
        assert grammars[0] == grammars[1] != ""


async def test_a_form_beside_calls_that_may_be_made_is_refused() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    async with serve(tool_parser="hermes") as served:
        body = {"messages": HELLO, "tools": [strict], "guided_regex": "a+"}
        response = await served.client.post(PATH, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")
