"""`/v1/responses`: input items, events that any gateway writes again, background, cancel and delete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from gateway.api.responses.stored import MAX_STATE_BYTES
from stageline_rpc.v1 import inference_pb2
from tests.unit.gateway.fake_upstream import (
    SECRET,
    STOP,
    Item,
    Served,
    Tokens,
    answer,
    builtin_codec,
    failure,
    serve,
)

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}
THOUGHTFUL = (
    "<think>where is it</think>Let me look, caf\u00e9.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.place }}>{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
)


async def create(served: Served, **body: Any) -> Any:
    response = await served.client.post(PATH, json={"input": "Once", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events(served: Served, url: str = PATH, **body: Any) -> list[dict[str, Any]]:
    """Events of a new response, or without a body of an old one; checks their order."""
    if body:
        response = await served.client.post(url, json={"input": "Once", "stream": True, **body})
    else:
        response = await served.client.get(url)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    numbers = [event["sequence_number"] for event in found]
    assert numbers == [numbers[0] + offset for offset in range(len(numbers))]
    return found


def prompt_of(served: Served) -> str:
    return builtin_codec().decode(served.request.token_ids.ids, skip_special_tokens=False)


def error_of(response: Any) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_a_response_has_its_output_and_its_fields() -> None:
    async with serve(answer(" a bird sang", reason=STOP)) as served:
        body = await create(served, instructions="Be short.", metadata={"a": "b"}, temperature=0.5, user="u")
        assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
        [message] = body["output"]
        assert message["content"] == [
            {"type": "output_text", "text": " a bird sang", "annotations": [], "logprobs": []}
        ]
        assert message["role"] == "assistant" and message["status"] == "completed"
        assert body["usage"] == {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens": len(builtin_codec().encode(" a bird sang")),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 3 + len(builtin_codec().encode(" a bird sang")),
            "stageline": {"restarts": 1},
        }
        given = {name: body[name] for name in ("instructions", "metadata", "temperature", "user", "store")}
        assert given == {
            "instructions": "Be short.",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "user": "u",
            "store": True,
        }
        assert "<|system|>Be short.<|end|>" in prompt_of(served)
        assert served.request.on_disconnect.keep_for.seconds == 600


async def test_an_output_that_is_cut_is_incomplete() -> None:
    async with serve() as served:
        body = await create(served, max_output_tokens=4)
        assert served.request.max_tokens == 4
        assert (body["status"], body["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert body["output"][0]["status"] == "incomplete"


async def test_events_of_reasoning_text_and_calls() -> None:
    async with serve(answer(THOUGHTFUL, reason=STOP), **PARSERS) as served:
        found = await events(served, tools=[WEATHER])
        kinds = [event["type"].removeprefix("response.") for event in found]
        without_deltas = [kind for kind in kinds if not kind.endswith(".delta")]
        assert without_deltas == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
            "output_item.done",
            "output_item.added", "content_part.added", "output_text.done", "content_part.done",
            "output_item.done",
            "output_item.added", "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        for kind, text in (
            ("reasoning_text", "where is it"),
            ("output_text", "Let me look, caf\u00e9."),
            ("function_call_arguments", '{"place": "Oslo"}'),
        ):
            deltas = [event["delta"] for event in found if event["type"] == f"response.{kind}.delta"]
            assert "".join(deltas) == text
            assert len(deltas) > 1
        reasoning, message, call = found[-1]["response"]["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "where is it"}]
        assert message["content"][0]["text"] == "Let me look, caf\u00e9."
        assert (call["name"], call["arguments"]) == ("weather", '{"place": "Oslo"}')
        assert len({reasoning["id"], message["id"], call["id"]}) == 3
        assert found[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
        for event in found:
            if "output_index" in event and "item_id" in event:
                assert event["item_id"] == found[-1]["response"]["output"][event["output_index"]]["id"]


@pytest.mark.parametrize("background", [False, True])
async def test_another_gateway_writes_the_same_bytes_from_any_event_on(background: bool) -> None:
    script = answer(THOUGHTFUL, reason=STOP)
    async with serve(script, **PARSERS) as one, serve(beside=one, **PARSERS) as other:
        more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "background": background}
        body = {"input": "Once", "stream": True, "tools": [WEATHER], **more}
        whole = (await one.client.post(PATH, json=body)).text
        found = events_of(whole)
        identity = found[0]["response"]["id"]
        assert (await other.client.get(f"{PATH}/{identity}?stream=true")).text == whole
        parts = whole.split("\n\n")
        for number in range(len(found)):
            rest = await other.client.get(f"{PATH}/{identity}?stream=true&starting_after={number}")
            assert rest.text == "\n\n".join(parts[number + 1 :]), number
        again = (await other.client.get(f"{PATH}/{identity}")).json()
        assert again == found[-1]["response"]
        rows = [
            row
            for event in found
            if event["type"] == "response.output_text.delta"
            for row in event["logprobs"]
        ]
        assert rows and rows == again["output"][1]["content"][0]["logprobs"]
        assert all(len(row["top_logprobs"]) == 1 for row in rows)
        assert all(observer.detached.is_set() for observer in one.upstream.observers)


async def test_numbers_of_events_do_not_depend_on_portions_of_tokens() -> None:
    async with serve(answer(" a bird sang", reason=STOP)) as served:
        found = await events(served, background=True)
        identity = found[0]["response"]["id"]
        for progress in range(len(served.upstream.streams[0].items)):
            served.upstream.progress = progress
            assert await events(served, f"{PATH}/{identity}?stream=true") == found


async def test_a_response_of_the_background_returns_at_once_and_goes_on() -> None:
    async with serve(answer(" a bird sang", reason=STOP)) as served:
        served.upstream.gate.clear()
        body = await create(served, background=True)
        assert (body["status"], body["output"], body["background"]) == ("queued", [], True)
        stream = served.upstream.streams[0]
        assert stream.detached.is_set() and not stream.cancelled.is_set()
        served.upstream.gate.set()
        for progress, status in ((0, "queued"), (2, "in_progress"), (None, "completed")):
            served.upstream.progress = progress
            now = (await served.client.get(f"{PATH}/{body['id']}")).json()
            assert now["status"] == status
        assert now["output"][0]["content"][0]["text"].strip() == "a bird sang"


@pytest.mark.parametrize("background", [False, True])
async def test_a_client_that_leaves_cancels_unless_it_asked_for_the_background(background: bool) -> None:
    async with serve(over_tcp=True) as served:
        served.upstream.end_gate.clear()
        body = {"input": "Once", "stream": True, "background": background}
        async with served.client.stream("POST", PATH, json=body) as response:
            await anext(response.aiter_lines())
        stream = served.upstream.streams[0]
        async with asyncio.timeout(10):
            await (served.upstream.observers[0].detached if background else stream.cancelled).wait()
        assert (stream.detached.is_set(), stream.cancelled.is_set()) == (background, not background)


async def test_cancelling_keeps_the_output_until_then() -> None:
    async with serve(answer(" a bird sang", reason=STOP)) as served:
        body = await create(served, background=True)
        served.upstream.progress = 2
        url = f"{PATH}/{body['id']}"
        cancelled = (await served.client.post(f"{url}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["status"] == "incomplete"
        assert " a bird sang".strip().startswith(cancelled["output"][0]["content"][0]["text"].strip())
        assert (await served.client.post(f"{url}/cancel")).json() == cancelled
        assert (await served.client.get(url)).json() == cancelled
        last = (await events(served, f"{url}?stream=true"))[-1]
        assert (last["type"], last["response"]) == ("response.failed", cancelled)


async def test_only_the_background_is_cancelled() -> None:
    async with serve() as served:
        body = await create(served)
        status, param, _ = error_of(await served.client.post(f"{PATH}/{body['id']}/cancel"))
        assert (status, param) == (400, "background")
        assert not any(observer.cancelled.is_set() for observer in served.upstream.observers)


@pytest.mark.parametrize("progress", [None, 1])
async def test_a_deleted_response_is_gone(progress: int | None) -> None:
    async with serve() as served:
        body = await create(served, background=True)
        served.upstream.progress = progress
        url = f"{PATH}/{body['id']}"
        deleted = (await served.client.delete(url)).json()
        assert deleted == {"id": body["id"], "object": "response", "deleted": True}
        for response in (await served.client.get(url), await served.client.delete(url)):
            assert response.status_code == 404


async def test_every_wrong_id_gets_the_same_answer() -> None:
    async with serve() as served:
        real = (await create(served))["id"]
        unstored = (await create(served, store=False))["id"]
        assert len(unstored) == len("resp_") + 32
        request = served.upstream.streams[0].request
        plain = inference_pb2.GenerateRequest()
        plain.CopyFrom(request)
        plain.request_id = "01a206f5-bbfe-7f98-a9f0-9ed17b4dd824"
        await served.upstream.submit(plain, deadline_s=None, traceparent="")
        forged = f"resp_01a206f5bbfe7f98a9f09ed17b4dd824{SECRET}"
        assert (await served.client.get(f"{PATH}/{forged}")).status_code == 200
        written = json.loads(request.client_state)
        for key, value in (
            ("version", 2), ("prompt_tail", [-1]), ("prompt_tail", [2**40]),
            ("request", {"tools": [{"type": 5}]}), ("model", None),
            ("request", {"text": {"format": {"type": "json_schema"}}}),
        ):  # fmt: skip
            served.upstream.streams[-1].request.client_state = json.dumps({**written, key: value}).encode()
            assert (await served.client.get(f"{PATH}/{forged}")).status_code == 404
        served.upstream.streams[-1].request.client_state = b'{"no": "response"}'
        wrong = (
            "resp_", "x", unstored, real[:-1], f"{real[:-1]}-", f"{real}x", real[:-2],
            real.upper(), f"resp_{'0' * 32}{SECRET}", forged, f"resp_{real[5:37]}{'x' * 43}",
        )  # fmt: skip
        bodies = set()
        for identity in wrong:
            for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"),
                                   ("GET", "?stream=true")):  # fmt: skip
                if identity == forged and method == "DELETE":
                    continue  # its secret is right
                response = await served.client.request(method, f"{PATH}/{identity}{suffix}")
                assert response.status_code == 404, (identity, method, suffix)
                bodies.add(response.text)
        assert len(bodies) == 1


async def test_a_conversation_goes_on_from_the_previous_response() -> None:
    async with serve(answer(THOUGHTFUL, reason=STOP), **PARSERS) as served:
        served.gateway.template = TEMPLATE
        first = await create(served, tools=[WEATHER], instructions="Be short.")
        call_id = first["output"][2]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        second = await create(served, input=[result], previous_response_id=first["id"])
        expected = "[user] Once[assistant] where is itLet me look, caf\u00e9.<weather Oslo>[tool] rain"
        assert prompt_of(served).endswith(expected)
        assert "Be short" not in prompt_of(served)
        await create(served, input="More", previous_response_id=second["id"])
        assert expected in prompt_of(served) and prompt_of(served).endswith("[user] More")
        listed = (await served.client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()
        assert [item["type"] for item in listed["data"]] == [
            "message", "reasoning", "message", "function_call", "function_call_output",
        ]  # fmt: skip
        page = (await served.client.get(f"{PATH}/{second['id']}/input_items?limit=2")).json()
        assert [item["type"] for item in page["data"]] == ["function_call_output", "function_call"]
        assert page["has_more"] is True
        last = page["last_id"]
        rest = (await served.client.get(f"{PATH}/{second['id']}/input_items?after={last}")).json()
        assert [item["type"] for item in rest["data"]] == ["message", "reasoning", "message"]
        served.upstream.progress = 1
        unfinished = await served.client.post(PATH, json={"input": "x", "previous_response_id": first["id"]})
        assert error_of(unfinished)[:2] == (400, "previous_response_id")
        unknown = await served.client.post(PATH, json={"input": "x", "previous_response_id": "resp_x"})
        assert unknown.json()["error"]["code"] == "previous_response_not_found"


async def test_items_become_messages() -> None:
    async with serve(**PARSERS) as served:
        served.gateway.template = TEMPLATE
        items = [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": kind, "text": "t"} for kind in ("input_text", "text")]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm "}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"place": "Oslo"}'},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "text", "text": "rain"}]},
            {"role": "assistant", "content": "d"},
        ]  # fmt: skip
        await create(served, input=items, tools=[WEATHER])
        assert prompt_of(served).endswith(
            "[system] Rules.[user] t\nt[assistant] hm c<weather Oslo>[tool] rain[assistant] d(weather)"
        )


async def test_forms_of_the_text_are_grammars() -> None:
    async with serve() as served:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        body = await create(
            served, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
        )
        assert json.loads(served.request.sampling.json_schema) == schema
        assert body["text"]["format"]["schema"] == schema
        await create(served, text={"format": {"type": "json_object"}})
        assert json.loads(served.request.sampling.json_schema) == {"type": "object"}
        await create(served, text={"format": {"type": "text"}, "verbosity": "medium"})
        assert served.request.sampling.WhichOneof("structured_output") is None


REFUSALS: Sequence[tuple[dict[str, Any], str]] = (
    ({"input": None}, "input"),
    ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ({"input": []}, "input"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["everything"]}, "include[0]"),
    ({"background": True, "store": False}, "background"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"temperature": 500}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 4000}, "max_output_tokens"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"instructions": "x" * 600, "metadata": {str(n): "\x01" * 512 for n in range(16)}}, "input"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSALS, ids=[f"{n}-{p}" for n, (_, p) in enumerate(REFUSALS)])
async def test_a_field_that_cannot_be_served_is_named(body: dict[str, Any], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"input": "Once", **body})
        assert error_of(response)[:2] == (400, param)
        assert not served.upstream.streams


async def test_fields_without_effect_are_accepted_by_a_list() -> None:
    async with serve() as served:
        accepted = {
            "truncation": "disabled", "service_tier": "auto", "max_tool_calls": 3, "prompt_cache_key": "k",
            "safety_identifier": "s", "include": ["reasoning.encrypted_content"], "stream": True,
            "reasoning": {"summary": "auto"}, "stream_options": {"include_obfuscation": False},
            "unheard_of": 1,
        }  # fmt: skip
        response = await served.client.post(PATH, json={"input": "Once", **accepted})
        assert response.headers["x-stageline-ignored"] == "unheard_of"
        last = events_of(response.text)[-1]["response"]
        assert (last["prompt_cache_key"], last["service_tier"]) == ("k", "default")


async def test_unknown_fields_are_not_kept() -> None:
    async with serve() as served:
        body = {"input": "Once", "foo": "x" * 300_000, "user": {"name": "me"}, "safety_identifier": "s"}
        response = await served.client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        assert (response.json()["user"], response.json()["safety_identifier"]) == (None, "s")
        assert len(served.request.client_state) < 2000
        again = await served.client.get(f"{PATH}/{response.json()['id']}")
        assert (again.json()["user"], again.json()["safety_identifier"]) == (None, "s")


async def test_numbers_that_only_python_can_write_come_back() -> None:
    async with serve() as served:
        tool = {**WEATHER, "parameters": {"type": "object", "maxProperties": 2**70}}
        items = [{"role": "user", "content": "Once", "note": 2**70}]
        body = await create(served, tools=[tool], input=items)
        assert body["tools"] == [tool]
        found = await events(served, f"{PATH}/{body['id']}?stream=true")
        assert found[-1]["response"] == body
        listed = (await served.client.get(f"{PATH}/{body['id']}/input_items")).json()
        assert listed["data"][0]["note"] == 2**70


async def test_a_stored_response_is_limited_and_long_input_is_not_kept() -> None:
    async with serve() as served:
        tools = [{**WEATHER, "description": "x" * MAX_STATE_BYTES}]
        response = await served.client.post(PATH, json={"input": "Once", "tools": tools})
        status, param, text = error_of(response)
        assert (status, param) == (400, "store")
        assert f"the limit is {MAX_STATE_BYTES}" in text
        assert (await create(served, tools=tools, store=False))["status"] == "incomplete"
        assert served.request.client_state == b""
        notes = [{"type": "reasoning", "summary": [], "note": "x" * MAX_STATE_BYTES}]
        body = await create(served, input=[*notes, {"role": "user", "content": "Once"}])
        assert len(served.request.client_state) < MAX_STATE_BYTES
        assert (await served.client.get(f"{PATH}/{body['id']}")).json() == body
        assert (await served.client.get(f"{PATH}/{body['id']}/input_items")).status_code == 404


def failing(error: Item) -> Any:
    def items(request: inference_pb2.GenerateRequest) -> list[Item]:
        return [Tokens(0, 0, builtin_codec().encode(" a bird")), error]

    return items


async def test_a_response_that_fails_has_its_error() -> None:
    async with serve(failing(failure(grpc.StatusCode.ABORTED, "STEP_FAILED"))) as served:
        found = await events(served, background=True)
        assert found[-1]["type"] == "response.failed"
        response = found[-1]["response"]
        assert (response["status"], response["error"]) == (
            "failed",
            {"code": "server_error", "message": "it failed"},
        )
        assert response["output"][0]["content"][0]["text"].strip() == "a bird"
        assert (await served.client.get(f"{PATH}/{response['id']}")).json() == response
        waited = await served.client.post(PATH, json={"input": "Once"})
        assert (waited.status_code, waited.json()["error"]["message"]) == (500, "it failed")


async def test_a_stream_without_a_coordinator_ends_so_that_another_continues_it() -> None:
    lost = failure(grpc.StatusCode.UNAVAILABLE, "CLUSTER_UNAVAILABLE")
    lost.may_continue = True
    async with serve(failing(lost)) as served:
        response = await served.client.post(PATH, json={"input": "Once", "stream": True, "background": True})
        *before, last = [json.loads(part.split("data: ")[1]) for part in response.text.split("\n\n")[:-1]]
        assert (last["type"], last["code"], last["message"]) == ("error", "unavailable", "it failed")
        assert last["sequence_number"] == before[-1]["sequence_number"]
        identity = before[0]["response"]["id"]
        served.upstream.progress = 2
        assert (await served.client.get(f"{PATH}/{identity}")).json()["status"] == "in_progress"
        served.upstream.progress = None
        assert (await served.client.get(f"{PATH}/{identity}")).status_code == 503


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?starting_after=3", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=1", "stream"),
        ("/input_items?order=up", "order"),
        ("/input_items?limit=0", "limit"),
    ],
)
async def test_wrong_queries_are_refused(path: str, param: str) -> None:
    async with serve() as served:
        identity = (await create(served))["id"]
        assert error_of(await served.client.get(f"{PATH}/{identity}{path}"))[:2] == (400, param)


async def test_a_model_without_a_tokenizer_has_no_responses() -> None:
    async with serve(has_text=False) as served:
        assert error_of(await served.client.post(PATH, json={"input": "Once"}))[:2] == (400, "input")


BUILT_IN = [{"type": "web_search"}, WEATHER, {"type": "namespace", "name": "agents", "tools": [WEATHER]}]
"""As Codex offers them."""
NAMED = "tools[0] (web_search), tools[2] (namespace agents)"


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", "none", {"type": "function", "name": "weather"}]
)
async def test_tools_that_are_no_functions_are_left_out_and_named(choice: object) -> None:
    async with serve(tool_parser="hermes") as served:
        served.gateway.template = TEMPLATE
        body = {"input": "Once", "tools": BUILT_IN, "tool_choice": choice}
        response = await served.client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-stageline-ignored"] == NAMED
        assert response.json()["tools"] == BUILT_IN
        assert prompt_of(served).count("(weather)") == (choice != "none")
        streamed = await served.client.post(PATH, json={**body, "stream": True})
        assert streamed.headers["x-stageline-ignored"] == NAMED
        counted = await served.client.post(f"{PATH}/input_tokens", json=body)
        assert counted.headers["x-stageline-ignored"] == NAMED


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "web_search"}, "tools[0] (web_search)"),
        ({"type": "function", "name": "agents"}, "tools[2] (namespace agents)"),
        ({"type": "allowed_tools", "mode": "required", "tools": BUILT_IN[:1]}, "tools[0] (web_search)"),
        ({"type": "file_search"}, "a tool of type 'file_search'"),
    ],
)
async def test_a_choice_that_demands_another_tool_is_refused_by_type_and_name(
    choice: object, named: str
) -> None:
    async with serve() as served:
        body = {"input": "Once", "tools": BUILT_IN, "tool_choice": choice}
        status, param, text = error_of(await served.client.post(PATH, json=body))
        assert (status, param) == (400, "tool_choice")
        assert text == f"tool_choice demands {named}: only functions are served"


async def test_the_names_of_many_ignored_tools_fit_a_header() -> None:
    async with serve() as served:
        tools = [{"type": f"kind-{number:0100d}"} for number in range(1000)]
        response = await served.client.post(PATH, json={"input": "Once", "tools": tools})
        header = response.headers["x-stageline-ignored"]
        assert len(header) < 4096 and header.endswith(", 968 more")


async def test_wishes_without_effect_are_named() -> None:
    async with serve() as served:
        body = {"input": "Once", "text": {"verbosity": "low"}, "include": ["web_search_call.action.sources"]}
        response = await served.client.post(PATH, json=body)
        named = "include[0] (web_search_call.action.sources), text.verbosity"
        assert (response.status_code, response.headers["x-stageline-ignored"]) == (200, named)
        assert response.json()["text"]["verbosity"] == "medium"
    async with serve(strict_fields=True) as served:
        for more, param in (
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
            ({"tools": BUILT_IN}, "tools[0]"),
        ):
            response = await served.client.post(PATH, json={"input": "Once", **more})
            assert error_of(response)[:2] == (400, param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_form_of_the_text_has_no_effect_where_a_call_is_forced(choice: object) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    async with serve(tool_parser="hermes") as served:
        body = await create(served, tools=[WEATHER], tool_choice=choice, text=form)
        with_form = served.request.sampling.grammar
        await create(served, tools=[WEATHER], tool_choice=choice)
        assert with_form == served.request.sampling.grammar != ""
        assert body["text"]["format"]["schema"] == {"type": "object"}


LONG_TEXT = "long " * 200_000
STRICT = {**WEATHER, "strict": True, "parameters": {"type": "object", "not": {}}}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": LONG_TEXT}, "input", "input has 1000000 bytes"),
        ({"input": []}, "input", "input is empty"),
        ({"max_output_tokens": 4000}, "max_output_tokens", "and max_output_tokens is 4000"),
        (
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex",
            "text.format and guided_regex exclude each other",
        ),
        ({"tools": [STRICT]}, "tools[0].parameters", "strict tool"),
    ],
)
async def test_errors_have_the_names_of_the_clients_fields(
    body: dict[str, Any], param: str, text: str
) -> None:
    async with serve(tool_parser="hermes") as served:
        response = await served.client.post(PATH, json={"input": "Once", **body})
        assert error_of(response)[:2] == (400, param)
        assert text in error_of(response)[2]


async def test_what_the_coordinator_refuses_has_the_name_of_the_clients_field() -> None:
    async with serve() as served:
        for field, own, body in (
            ("json_schema", "text.format", {"text": {"format": {"type": "json_object"}}}),
            ("prompt", "input", {}),
            ("grammar", "tools", {"tools": [WEATHER], "tool_choice": "required"}),
        ):
            refusal = failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            refusal.field, refusal.message = field, f"{field}: the {field} is wrong"
            served.upstream.refusal = refusal
            response = await served.client.post(PATH, json={"input": "Once", **body})
            assert error_of(response) == (400, own, f"{own}: the {field} is wrong")
