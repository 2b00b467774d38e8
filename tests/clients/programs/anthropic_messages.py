"""Checks of the `anthropic` package."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from checking import FACTS, MODEL, URL, checks_of, run_checks

CLIENT = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0)
HELLO = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": HELLO,
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {**GREEDY, "max_tokens": 200, "tools": [WEATHER]}


def check_text_equals_that_of_grpc() -> None:
    body = CLIENT.messages.create(**GREEDY)
    assert (body.role, [block.type for block in body.content]) == ("assistant", ["text"])
    assert body.content[0].text == FACTS["text"]
    assert body.usage.output_tokens == FACTS["completion_tokens"]
    assert body.stop_reason in ("end_turn", "max_tokens")


def check_stream_equals_the_whole() -> None:
    with CLIENT.messages.stream(**GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    whole = CLIENT.messages.create(**GREEDY)
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def check_system_and_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert CLIENT.messages.create(**{**GREEDY, "messages": parts}).content[0].text == FACTS["text"]
    assert CLIENT.messages.create(**GREEDY, system=system).content


def check_stop_sequences() -> None:
    stop = FACTS["text"][len(FACTS["text"]) // 2 :][:4]
    body = CLIENT.messages.create(**GREEDY, stop_sequences=[stop])
    assert (body.stop_reason, body.stop_sequence) == ("stop_sequence", stop)
    assert body.content[0].text == FACTS["text"][: FACTS["text"].index(stop)]


def check_forced_tools() -> None:
    """A call, whole and streamed, and the answer to its result."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice["disable_parallel_tool_use"] = True
        whole = CLIENT.messages.create(**FORCED, tool_choice=choice)
        with CLIENT.messages.stream(**FORCED, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
        for body in (whole, streamed):
            assert body.stop_reason == "tool_use"
            (call,) = (block for block in body.content if block.type == "tool_use")
            assert call.name == "weather"
            assert call.input["city"] in ("Oslo", "Rome")
    messages = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    assert CLIENT.messages.create(**{**FORCED, "messages": messages, "max_tokens": 8}).role == "assistant"


def check_token_count() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=HELLO)
    usage = CLIENT.messages.create(**GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def check_errors() -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        CLIENT.messages.create(**{**GREEDY, "extra_body": {"temperature": 200}})
    assert wrong.value.body["type"] == "error"
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        CLIENT.messages.create(**{**GREEDY, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"


def check_models() -> None:
    assert MODEL in [model.id for model in CLIENT.models.list()]


if __name__ == "__main__":
    run_checks(checks_of(globals()))
