"""Checks of the `openai` package."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import defaultdict
from functools import partial
from typing import Any, Literal

import openai
import pydantic
import pytest
from checking import FACTS, MODEL, URL, checks_of, run_checks

CLIENT = openai.OpenAI(base_url=URL + "v1", api_key="unused", max_retries=0)
HELLO = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


def create(case: dict[str, Any], **more: Any) -> Any:
    """Call the endpoint of a case; fields that the package does not know go beside its own."""
    endpoint = CLIENT.chat.completions if case["is_chat"] else CLIENT.completions
    known = inspect.signature(endpoint.create).parameters
    body = {"model": MODEL, **case["body"], **more}
    extra = {name: value for name, value in body.items() if name not in known}
    return endpoint.create(**{name: body[name] for name in body.keys() - extra.keys()}, extra_body=extra)


def equals_grpc(case: dict[str, Any]) -> None:
    """Text, ids, log-probabilities and reasons of every choice are those of the gRPC client."""
    body = create(case)
    assert len(body.choices) == len(case["expected"])
    for choice, expected in zip(body.choices, case["expected"], strict=True):
        assert (choice.message.content if case["is_chat"] else choice.text) == expected["text"]
        assert choice.token_ids == expected["token_ids"]
        assert choice.finish_reason == expected["finish_reason"]
        if expected["logprobs"]:
            assert logprobs_of(choice, is_chat=case["is_chat"]) == pytest.approx(expected["logprobs"])
    assert body.usage.completion_tokens == case["completion_tokens"]


def stream_equals_grpc(case: dict[str, Any]) -> None:
    texts, tokens = defaultdict(str), defaultdict(list)
    reasons, logprobs, usage = {}, defaultdict(list), None
    for chunk in create(case, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content or "") if case["is_chat"] else choice.text
            tokens[choice.index] += getattr(choice, "token_ids", None) or []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs[choice.index] += logprobs_of(choice, is_chat=case["is_chat"])
    for index, expected in enumerate(case["expected"]):
        assert texts[index] == expected["text"]
        assert tokens[index] == expected["token_ids"]
        assert reasons[index] == expected["finish_reason"]
        if expected["logprobs"]:
            assert logprobs[index] == pytest.approx(expected["logprobs"])
    assert usage.completion_tokens == case["completion_tokens"]


def logprobs_of(choice: Any, *, is_chat: bool) -> list[float]:
    if is_chat:
        return [entry.logprob for entry in choice.logprobs.content]
    return list(choice.logprobs.token_logprobs)


def check_models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).owned_by == "stageline"


def check_unknown_model() -> None:
    with pytest.raises(openai.NotFoundError) as error:
        CLIENT.completions.create(model="other", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def check_unknown_path() -> None:
    with pytest.raises(openai.NotFoundError) as error:
        CLIENT.embeddings.create(model=MODEL, input="a")
    assert error.value.type == "not_found_error"


def check_values_out_of_range() -> None:
    with pytest.raises(openai.BadRequestError) as error:
        CLIENT.completions.create(model=MODEL, prompt="a", temperature=200)
    assert error.value.param == "temperature"
    assert error.value.response.headers["x-should-retry"] == "false"


def check_refused_fields() -> None:
    with pytest.raises(openai.BadRequestError) as error:
        CLIENT.completions.create(model=MODEL, prompt="a", suffix="b")
    assert error.value.param == "suffix"


def check_bad_grammar() -> None:
    with pytest.raises(openai.BadRequestError) as error:
        CLIENT.completions.create(model=MODEL, prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    assert error.value.type == "invalid_request_error"


def check_context_length() -> None:
    with pytest.raises(openai.BadRequestError) as error:
        CLIENT.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10**6)
    assert error.value.code == "context_length_exceeded"


def check_conflict_is_not_retried() -> None:
    """A request id in use: the package retries 409 unless it is told not to."""
    headers = {"x-request-id": "018f0000-0000-7000-8000-000000000001"}
    retrying = CLIENT.with_options(max_retries=2)
    with CLIENT.completions.create(
        model=MODEL, prompt="a", max_tokens=1000, stream=True, extra_headers=headers,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as error:
            retrying.completions.create(model=MODEL, prompt="a", extra_headers=headers)
    assert error.value.response.headers["x-should-retry"] == "false"
    assert error.value.response.request.headers["x-stainless-retry-count"] == "0"


def check_json_object() -> None:
    body = CLIENT.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        response_format={"type": "json_object"},
        seed=3,
        temperature=1,
        max_tokens=40,
    )
    choice = body.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_tame: bool


def check_parse() -> None:
    body = CLIENT.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Animal, temperature=0, max_tokens=200
    )
    assert isinstance(body.choices[0].message.parsed, Animal)


def check_parse_of_a_stream() -> None:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Animal, temperature=0, max_tokens=200
    ) as stream:
        events = list(stream)
        found = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(found, Animal)
    assert "content.done" in {event.type for event in events}


def check_forced_tool() -> None:
    for stream in (False, True):
        message, reason = answer_with_tools(stream=stream, tool_choice="required")
        assert reason == "tool_calls"
        (call,) = message["tool_calls"][:1]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]).keys() == {"city"}
        assert call["id"]


def check_named_tool() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for stream in (False, True):
        message, reason = answer_with_tools(stream=stream, tool_choice=named)
        assert reason == "stop"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def check_tools_not_wanted() -> None:
    message, reason = answer_with_tools(stream=False, tool_choice="none")
    assert not message.get("tool_calls")
    assert reason in ("stop", "length")


def check_tool_results() -> None:
    message, _ = answer_with_tools(stream=False, tool_choice="required")
    call = message["tool_calls"][0]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    body = CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)
    assert body.choices[0].finish_reason in ("stop", "length")


def answer_with_tools(*, stream: bool, **more: Any) -> tuple[dict[str, Any], str]:
    """The message, with which the package puts a stream together, and the finish reason."""
    arguments = {
        "model": MODEL, "messages": HELLO, "tools": [WEATHER], "parallel_tool_calls": False,
        "temperature": 0, "max_tokens": 200, **more,
    }  # fmt: skip
    if not stream:
        choice = CLIENT.chat.completions.create(**arguments).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    with CLIENT.chat.completions.stream(**arguments) as events:
        choice = events.until_done().get_final_completion().choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def check_stop_strings() -> None:
    case = next(case for case in FACTS["cases"] if case["name"] == "greedy")
    text = case["expected"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    body = create(case, stop=[stop])
    assert body.choices[0].text == text[: text.index(stop)]
    assert (body.choices[0].finish_reason, body.choices[0].stop_reason) == ("stop", stop)


def check_raw_response() -> None:
    raw = CLIENT.completions.with_raw_response.create(model=MODEL, prompt="a", extra_body={"colour": "red"})
    assert raw.headers["x-stageline-ignored"] == "colour"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.request_id
    assert raw.parse().id == f"cmpl-{raw.request_id}"


def check_raw_stream() -> None:
    with CLIENT.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, stream=True, max_tokens=4
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["cache-control"] == "no-store"
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def check_usage() -> None:
    usage = CLIENT.completions.create(model=MODEL, prompt="a", max_tokens=4, temperature=0).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert usage.stageline["first_token_s"] > 0


async def ask_at_once() -> list[str]:
    async with openai.AsyncOpenAI(base_url=URL + "v1", api_key="unused") as client:
        bodies = await asyncio.gather(
            *(client.completions.create(model=MODEL, prompt="a", max_tokens=8, seed=1) for _ in range(8))
        )
    return [body.choices[0].text for body in bodies]


def check_asynchronous_client() -> None:
    import asyncio

    assert len(set(asyncio.run(ask_at_once()))) == 1


if __name__ == "__main__":
    cases = [
        (f"{case['name']}, {how}", partial(check, case))
        for case in FACTS["cases"]
        for how, check in (("whole", equals_grpc), ("streamed", stream_equals_grpc))
    ]
    run_checks([*cases, *checks_of(globals())])
