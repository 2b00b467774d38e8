"""Checks of the Responses API with the `openai` package, at two gateways."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from checking import FACTS, MODEL, URL, checks_of, run_checks
from pydantic import BaseModel

ONE, OTHER = (
    openai.OpenAI(base_url=f"{url}v1", api_key="unused", max_retries=0) for url in (URL, FACTS["other_url"])
)
EXPECTED = FACTS["expected"]
STORY = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 24}
LONG = {**STORY, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
SEEDED: dict[str, Any] = {"max_output_tokens": 128, "extra_body": {"seed": 5}}
WEATHER = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]


def check_text() -> None:
    body = ONE.responses.create(**STORY)
    assert body.output_text == EXPECTED["text"]
    assert body.usage.output_tokens == EXPECTED["completion_tokens"]
    assert OTHER.responses.retrieve(body.id) == body


def check_stream() -> None:
    with ONE.responses.stream(**STORY) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.incomplete"
    assert "".join(deltas) == events[-1].response.output_text == EXPECTED["text"]


def check_logprobs() -> None:
    body = ONE.responses.create(**STORY, include=["message.output_text.logprobs"], top_logprobs=2)
    rows = body.output[0].content[0].logprobs
    assert [row.logprob for row in rows] == pytest.approx(EXPECTED["logprobs"])
    assert {len(row.top_logprobs) for row in rows} == {2}


def check_parse() -> None:
    body = ONE.responses.parse(model=MODEL, input="Which animal?", text_format=Animal, **SEEDED)
    assert body.output_parsed.kind in ("cat", "dog")


def check_tools() -> None:
    more: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "parallel_tool_calls": False}
    with ONE.responses.stream(input="Weather?", tool_choice="required", **more, **SEEDED) as stream:
        for _ in stream:
            pass
        body = stream.get_final_response()
    call = next(item for item in body.output if item.type == "function_call")
    assert json.loads(call.arguments)["place"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = OTHER.responses.create(
        model=MODEL, input=[result], previous_response_id=body.id, max_output_tokens=8
    )
    assert again.previous_response_id == body.id
    items = OTHER.responses.input_items.list(again.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def check_background() -> None:
    events = []
    with ONE.responses.create(**LONG, background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.sequence_number == 20:
                break
    identity = events[0].response.id
    rest = list(OTHER.responses.retrieve(identity, stream=True, starting_after=20))
    assert rest == list(ONE.responses.retrieve(identity, stream=True))[21:]
    assert rest[-1].response.usage.output_tokens == 400


def check_cancel_and_delete() -> None:
    body = ONE.responses.create(**LONG, background=True)
    assert OTHER.responses.cancel(body.id).status == "cancelled"
    assert ONE.responses.retrieve(body.id).status == "cancelled"
    OTHER.responses.delete(body.id)
    with pytest.raises(openai.NotFoundError):
        ONE.responses.retrieve(body.id)


def check_errors() -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        ONE.responses.create(**STORY, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    assert wrong.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as unknown:
        ONE.responses.create(**STORY, previous_response_id="resp_unknown")
    assert unknown.value.code == "previous_response_not_found"


if __name__ == "__main__":
    run_checks(checks_of(globals()))
