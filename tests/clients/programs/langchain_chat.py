"""Checks of the `langchain-openai` package."""

from __future__ import annotations

from typing import Literal

import openai
import pydantic
import pytest
from checking import MODEL, URL, checks_of, run_checks
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

CHAT = ChatOpenAI(
    model=MODEL, base_url=URL + "v1", api_key="unused", temperature=0, max_tokens=200, max_retries=0
)
HELLO = [HumanMessage("Tell me a story.")]


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    is_tame: bool


@tool
def weather(day: Literal["today", "tomorrow"]) -> str:
    """Tell the weather of a day."""
    return "rain"


def check_stream_has_the_text_of_the_whole() -> None:
    chat = CHAT.model_copy(update={"max_tokens": 12})
    whole = chat.invoke(HELLO)
    chunks = list(chat.stream(HELLO, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content != ""
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == whole.usage_metadata["output_tokens"] == 12
    assert usage[-1]["input_tokens"] == whole.usage_metadata["input_tokens"]


def check_batch() -> None:
    chat = CHAT.model_copy(update={"max_tokens": 4})
    assert len({message.content for message in chat.batch([HELLO] * 4)}) == 1


def check_structured_output_of_a_schema() -> None:
    assert isinstance(CHAT.with_structured_output(Animal, method="json_schema").invoke(HELLO), Animal)


def check_structured_output_of_a_function() -> None:
    """The tool that the answer must call is named."""
    found = CHAT.with_structured_output(Animal, method="function_calling", strict=True).invoke(HELLO)
    assert isinstance(found, Animal)


def check_bound_tools() -> None:
    """A call, whole and streamed, and the model's answer to its result."""
    bound = CHAT.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    whole = bound.invoke(HELLO)
    streamed = None
    for chunk in bound.stream(HELLO):
        streamed = chunk if streamed is None else streamed + chunk
    for message in (whole, streamed):
        assert isinstance(message, AIMessage)
        (call,) = message.tool_calls
        assert call["name"] == "weather"
        assert call["args"]["day"] in ("today", "tomorrow")
    result = weather.invoke(whole.tool_calls[0])
    assert isinstance(result, ToolMessage)
    chat = CHAT.model_copy(update={"max_tokens": 8}).bind_tools([weather])
    assert isinstance(chat.invoke([*HELLO, whole, result]), AIMessage)


def check_logprobs() -> None:
    message = CHAT.model_copy(update={"max_tokens": 4}).bind(logprobs=True, top_logprobs=2).invoke(HELLO)
    rows = message.response_metadata["logprobs"]["content"]
    assert [len(row["top_logprobs"]) for row in rows] == [2] * 4


def check_completions() -> None:
    complete = OpenAI(model=MODEL, base_url=URL + "v1", api_key="unused", temperature=0, max_tokens=4)
    assert complete.invoke("Once upon") == "".join(complete.stream("Once upon")) != ""


def check_context_length() -> None:
    with pytest.raises(openai.BadRequestError) as error:
        CHAT.model_copy(update={"max_tokens": 10**6}).invoke(HELLO)
    assert error.value.code == "context_length_exceeded"


if __name__ == "__main__":
    run_checks(checks_of(globals()))
