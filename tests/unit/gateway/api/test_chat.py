"""`/v1/chat/completions`: templates, messages, log-probabilities, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.gateway.fake_upstream import Served, builtin_codec, events_of, serve
from text.chat_template import TemplateOptions
from text.tokenizer import ChatMessage

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
SIMPLE_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ extra }}{% endfor %}"


async def post(served: Served, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = await served.client.post(PATH, json={"messages": list(messages) or HELLO, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_the_body_of_an_answer() -> None:
    async with serve() as served:
        body = await post(served)
        assert body.pop("id") == f"chatcmpl-{served.request.request_id}"
        assert body.pop("created") > 0
        assert body.pop("usage")["total_tokens"] == 7
        assert body == {
            "object": "chat.completion",
            "model": "tiny",
            "system_fingerprint": "fp_abc",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " a bird sang", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
        }
        expected = builtin_codec().encode_conversation([ChatMessage("user", "hi")])
        assert list(served.request.token_ids.ids) == expected
        assert served.request.max_tokens == 256 - len(expected)


async def test_parts_of_text_are_joined_and_developer_is_system() -> None:
    async with serve() as served:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await post(served, {"role": "developer", "content": parts}, *HELLO)
        expected = [ChatMessage("system", "one\ntwo"), ChatMessage("user", "hi")]
        assert list(served.request.token_ids.ids) == builtin_codec().encode_conversation(expected)


async def test_the_final_message_can_be_continued() -> None:
    async with serve() as served:
        messages = [*HELLO, {"role": "assistant", "content": "Once"}]
        await post(served, *messages, continue_final_message=True)
        options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
        assert list(served.request.token_ids.ids) == builtin_codec().encode_messages(messages, options)


async def test_another_template_reads_variables_and_fields_of_messages() -> None:
    async with serve() as served:
        served.gateway.template = (
            SIMPLE_TEMPLATE + "{{ reasoning_effort }}{{ messages[0].tool_calls[0].function.arguments.x }}"
        )
        call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "deep"}'}}
        await post(
            served,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            chat_template_kwargs={"extra": "!"},
            reasoning_effort="low",
        )
        assert builtin_codec().decode(served.request.token_ids.ids) == "assistant:!lowdeep"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": 5}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": HELLO, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [{"role": "user"}, {"content": "no role"}]}, "messages[1].role"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert served.upstream.streams == []


async def test_logprobs_have_text_and_bytes_of_each_token() -> None:
    async with serve() as served:
        body = await post(served, logprobs=True, top_logprobs=1)
        first = body["choices"][0]["logprobs"]["content"][0]
        entry = {"token": " a", "logprob": -0.25, "bytes": [32, 97]}
        assert first == {**entry, "top_logprobs": [entry]}
        assert served.request.sampling.logprobs == 1


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async with serve() as served:
        events = await events_of(
            served, PATH, messages=HELLO, n=2, stream=True, logprobs=True, return_token_ids=True
        )
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["prompt_token_ids"] == list(served.request.token_ids.ids)
        for index in range(2):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in own) == " a bird sang"
            assert [choice["finish_reason"] for choice in own] == [None] * 4 + ["length"]
            tokens = [token for choice in own for token in choice.get("token_ids", [])]
            assert tokens == builtin_codec().encode(" a bird sang")
            assert sum(len(choice["logprobs"]["content"]) for choice in own[1:]) == 3


async def test_max_completion_tokens_wins() -> None:
    async with serve() as served:
        await post(served, max_tokens=5, max_completion_tokens=7)
        assert served.request.max_tokens == 7
