"""Bodies of HTTP requests that no gateway can serve, each costly to whoever reads it carelessly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BIG = 2_000_000


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body for a path."""

    path: str
    body: bytes


def _completion(**fields: Any) -> HostileBody:
    return HostileBody(COMPLETIONS, json.dumps({"prompt": "a", **fields}).encode())


def _chat(**fields: Any) -> HostileBody:
    messages = [{"role": "user", "content": "a"}]
    return HostileBody(CHAT, json.dumps({"messages": messages, **fields}).encode())


def _nested(depth: int, before: str, after: str) -> bytes:
    return f"{before}{'[' * depth}{']' * depth}{after}".encode()


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HOSTILE_BODIES: Mapping[str, HostileBody] = {
    "2 MB that are no JSON": HostileBody(COMPLETIONS, b"a" * BIG),
    "2 MB of spaces": HostileBody(COMPLETIONS, b" " * BIG),
    "a prompt of 2 MB": _completion(prompt="once upon a time " * (BIG // 17)),
    "a message of 2 MB": _chat(messages=[{"role": "user", "content": "once upon a time " * (BIG // 17)}]),
    "1,000,000 token ids": HostileBody(COMPLETIONS, b'{"prompt":[' + b"1," * (BIG // 2) + b"1]}"),
    "40,000 messages": _chat(messages=[{"role": "user", "content": "once upon"}] * 40_000),
    "20,000 tools": _chat(tools=[_TOOL] * 20_000),
    "100,000 open brackets": HostileBody(CHAT, b"[" * 100_000),
    "100,000 nested lists in a field": HostileBody(COMPLETIONS, _nested(100_000, '{"prompt":', "}")),
    "100,000 nested lists in an unknown field": HostileBody(
        COMPLETIONS, _nested(100_000, '{"prompt":"a","x":', "}")
    ),
    "10,000 stop strings": _completion(stop=[f"stop {number}" for number in range(10_000)]),
    "a stop string of 1 MB": _completion(stop="s" * 1_000_000),
    "100,000 unknown fields": _completion(**{f"field_{number}": 1 for number in range(100_000)}),
    "an unknown field with a name of 2 MB": _completion(**{"x" * BIG: 1}, stop=[""]),
    "a model name of 2 MB": _completion(model="m" * BIG),
    "invalid UTF-8": HostileBody(COMPLETIONS, b'{"prompt": "\xff\xfe\xfa"}'),
    "half a surrogate pair": HostileBody(COMPLETIONS, b'{"prompt": "\\ud800"}'),
    "a number of 4,500 digits": HostileBody(COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 4_500 + b"}"),
    "a list where a number is expected": _completion(max_tokens=[0] * 200_000),
    "100,000 biases of no token": _completion(logit_bias={f"x{number}": 1.0 for number in range(100_000)}),
}
