"""Requests to a gateway's HTTP API, with the output of the gRPC client for the same request."""

from __future__ import annotations

from typing import Any

from stageline import Client, Completion

TEXT = "Once upon a time"
STORY = [{"role": "user", "content": "Tell me a story."}]
SAMPLED = {"seed": 7, "temperature": 0.8, "max_tokens": 12}
GREEDY = {"temperature": 0, "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}

# Prompt and parameters of both clients; then those that only one has, or calls differently: HTTP, gRPC.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "greedy": (TEXT, GREEDY, {}, {}),
    "sampled": (TEXT, SAMPLED, {}, {}),
    "three choices": (TEXT, {**SAMPLED, "n": 3}, {}, {}),
    "token ids": ([387, 389, 272], SAMPLED, {}, {}),
    "top_p": (TEXT, {**SAMPLED, "top_p": 0.5}, {}, {}),
    "top_k": (TEXT, {**SAMPLED, "top_k": 3}, {}, {}),
    "min_p": (TEXT, {**SAMPLED, "min_p": 0.2}, {}, {}),
    "typical_p": (TEXT, {**SAMPLED, "typical_p": 0.5}, {}, {}),
    "repetition_penalty": (TEXT, {**GREEDY, "repetition_penalty": 1.5}, {}, {}),
    "frequency_penalty": (TEXT, {**GREEDY, "frequency_penalty": 1.5}, {}, {}),
    "presence_penalty": (TEXT, {**GREEDY, "presence_penalty": 1.5}, {}, {}),
    "logit_bias": (TEXT, GREEDY, {"logit_bias": {"300": 90}}, {"logit_bias": {300: 90}}),
    "allowed_token_ids": (TEXT, {**SAMPLED, "allowed_token_ids": [300, 301, 302]}, {}, {}),
    "bad_words": (TEXT, {**GREEDY, "bad_words": [" there", " was"]}, {}, {}),
    "min_tokens": (TEXT, {**GREEDY, "stop_token_ids": list(range(4, 400, 3)), "min_tokens": 6}, {}, {}),
    "stop_token_ids": (TEXT, {**GREEDY, "stop_token_ids": list(range(4, 400, 3))}, {}, {}),
    "ignore_eos": (
        TEXT,
        {**GREEDY, "ignore_eos": True, "skip_special_tokens": False},
        {"logit_bias": {"0": 90}},
        {"logit_bias": {0: 90}},
    ),
    "stop": (TEXT, {**GREEDY, "stop": ["ed", "a l"]}, {}, {}),
    "logprobs": ("The bird", {**GREEDY, "logprobs": 2}, {}, {}),
    "echo with logprobs": ("The bird", {**GREEDY, "logprobs": 1, "echo": True}, {}, {}),
    "regex": (TEXT, SAMPLED, {"structured_outputs": {"regex": "[a-f]{5}"}}, {"regex": "[a-f]{5}"}),
    "choice": (TEXT, SAMPLED, {"guided_choice": ["cat", "dog"]}, {"choice": ["cat", "dog"]}),
    "grammar": (
        TEXT,
        SAMPLED,
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"grammar": 'start: "yes" | "no"'},
    ),
    "chat": (STORY, GREEDY, {}, {}),
    "three chats": (STORY, {**SAMPLED, "n": 3}, {}, {}),
    "chat with logprobs": (STORY, GREEDY, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    "chat of a schema": (STORY, GREEDY, {"response_format": STRICT}, {"json_schema": SCHEMA}),
}


async def make_cases(client: Client) -> list[dict[str, Any]]:
    """Each case with its HTTP body, but for the model, and what is expected of its choices."""
    return [await _case(client, name) for name in CASES]


async def _case(client: Client, name: str) -> dict[str, Any]:
    prompt, both, http, grpc = CASES[name]
    is_chat = prompt is STORY
    completions = await client.complete(prompt, **both, **grpc)
    return {
        "name": name,
        "is_chat": is_chat,
        "body": {
            "messages" if is_chat else "prompt": prompt,
            "return_token_ids": True,
            **both,
            **http,
        },
        "completion_tokens": sum(completion.usage.completion_tokens for completion in completions),
        "expected": [_expected(completion) for completion in completions],
    }


def _expected(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": [row.logprob for row in completion.logprobs or ()],
    }
