"""Checks of the `openai` package against a gateway; run by the Python of its own environment.

python openai_python.py URL CASES.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

URL, CASES = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
CLIENT = openai.OpenAI(base_url=URL + "v1", api_key="unused", max_retries=0)
HELLO = [{"role": "user", "content": "Tell me a story."}]


def create(case: dict[str, Any], **more: Any) -> Any:
    """Call the endpoint of a case."""
    arguments = {"model": CASES["model"], "extra_body": {"return_token_ids": True}} | case["arguments"] | more
    endpoint = CLIENT.chat.completions if case["is_chat"] else CLIENT.completions
    return endpoint.create(**arguments)  # type: ignore[call-overload]


def check_equal_to_grpc(case: dict[str, Any]) -> None:
    """Text, ids, log-probabilities and reasons of every choice are those of the gRPC client."""
    body = create(case)
    assert len(body.choices) == len(case["expected"])
    for choice, expected in zip(body.choices, case["expected"], strict=True):
        assert (choice.message.content if case["is_chat"] else choice.text) == expected["text"]
        assert choice.token_ids == expected["token_ids"]
        assert choice.finish_reason == expected["finish_reason"]
        if expected["logprobs"]:
            assert logprobs_of(choice, is_chat=case["is_chat"]) == pytest.approx(expected["logprobs"])
    assert body.usage.completion_tokens == sum(choice["completion_tokens"] for choice in case["expected"])


def check_stream_equal_to_grpc(case: dict[str, Any]) -> None:
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
    assert usage.completion_tokens == sum(choice["completion_tokens"] for choice in case["expected"])


def logprobs_of(choice: Any, *, is_chat: bool) -> list[float]:
    if is_chat:
        return [entry.logprob for entry in choice.logprobs.content]
    return list(choice.logprobs.token_logprobs)


def check_models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [CASES["model"]]
    assert CLIENT.models.retrieve(CASES["model"]).owned_by == "stageline"


def check_errors() -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        CLIENT.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        CLIENT.completions.create(model=CASES["model"], prompt="a", temperature=200)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unmatched:
        CLIENT.completions.create(
            model=CASES["model"], prompt="a", extra_body={"structured_outputs": {"regex": "("}}
        )
    assert unmatched.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        CLIENT.chat.completions.create(model=CASES["model"], messages=HELLO, max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"


def check_structured_output() -> None:
    schema = {"type": "string", "enum": ["cat", "dog"]}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    body = CLIENT.chat.completions.create(
        model=CASES["model"], messages=HELLO, response_format=form, temperature=0, max_tokens=64
    )
    assert json.loads(body.choices[0].message.content) in schema["enum"]


def check_stop_strings() -> None:
    case = next(case for case in CASES["cases"] if not case["is_chat"])
    text = case["expected"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    body = create(case, stop=[stop], n=1)
    assert body.choices[0].text == text[: text.index(stop)]
    assert (body.choices[0].finish_reason, body.choices[0].stop_reason) == ("stop", stop)


def check_raw_response() -> None:
    raw = CLIENT.completions.with_raw_response.create(
        model=CASES["model"], prompt="a", extra_body={"colour": "red"}
    )
    assert raw.headers["x-stageline-ignored"] == "colour"
    assert raw.request_id
    assert raw.parse().id == f"cmpl-{raw.request_id}"


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for case in CASES["cases"]:
        yield f"{case['name']}", lambda case=case: check_equal_to_grpc(case)
        yield f"{case['name']}, streamed", lambda case=case: check_stream_equal_to_grpc(case)
    for name, check in globals().items():
        if name.startswith("check_") and not check.__code__.co_argcount:
            yield name, check


if __name__ == "__main__":
    for name, check in checks():
        check()
        print(f"passed: {name}", flush=True)
