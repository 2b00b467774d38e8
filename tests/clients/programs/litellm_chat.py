"""Checks of the `litellm` package."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network

import litellm
import pytest
from checking import MODEL, URL, checks_of, run_checks

litellm.suppress_debug_info = True
NAME = f"hosted_vllm/{MODEL}"
HELLO = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


def ask(**more: Any) -> Any:
    arguments = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 12, "num_retries": 0}
    return litellm.completion(**{**arguments, **more}, api_base=URL + "v1", api_key="unused")


def check_stream_has_the_text_of_the_whole() -> None:
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens == 12


def check_openai_provider() -> None:
    assert ask(model=f"openai/{MODEL}").choices[0].message.content == ask().choices[0].message.content


def check_text_completion() -> None:
    body = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", temperature=0, max_tokens=4,
        api_base=URL + "v1", api_key="unused",
    )  # fmt: skip
    assert body.choices[0].text


def check_tools() -> None:
    for stream in (False, True):
        answer = ask(
            model=f"openai/{MODEL}",  # to hosted_vllm it sends schemas without additionalProperties
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            stream=stream,
        )
        choice = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments).keys() == {"city"}
        assert choice.finish_reason == "tool_calls"


def check_response_format() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    content = ask(response_format=form, max_tokens=200).choices[0].message.content
    assert json.loads(content).keys() == {"city"}


def check_context_window() -> None:
    """Routers fall back to a model with more context on this class."""
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(max_tokens=10**6)


def check_bad_request() -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(temperature=200)


def check_unknown_model() -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(model="hosted_vllm/other")


if __name__ == "__main__":
    run_checks(checks_of(globals()))
