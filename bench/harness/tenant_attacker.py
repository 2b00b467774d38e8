"""A tenant that floods a gateway, or the coordinator behind it, until it is killed.

    python -m bench.harness.tenant_attacker ATTACK CONNECTIONS GATEWAY COORDINATOR KEY

Prints a line when it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from httpx2 import AsyncClient

from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.channels import TENANT_KEY
from wire.transport import PLAIN

TENANT = "flood"
TIMEOUT_S = 120.0
NUM_PROPERTIES = 3000
"""Optional ones: 90 KB of schema, which takes a second to compile and is refused then."""
TEXT = "once upon a time there was a small bird and it sang in the rain. " * 1200
"""80 KB: as much as a gateway tokenizes of a text that a model of 2,048 tokens has no room for."""
NUM_MESSAGES = 1000
PROMPT_TOKENS = NEW_TOKENS = 1900
ANSWER_TOKENS = 50
"""With 8 choices and 20 log-probabilities of each token: 600 KB of body to write."""
WORDS = ("bird", "rain", "sang", "small", "time", "upon")

Send = Callable[[int], Awaitable[None]]


def schema_body(number: int = 0) -> dict[str, Any]:
    """A chat with a schema that is another one for each number."""
    properties = {f"p{number}x{index}": {"type": "integer"} for index in range(NUM_PROPERTIES)}
    schema = {"type": "object", "properties": properties}
    return {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "flood", "schema": schema}},
    }


def body_of(attack: str, number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request of an attack over HTTP."""
    match attack:
        case "one schema":
            return "/v1/chat/completions", schema_body()
        case "schemas":
            return "/v1/chat/completions", schema_body(number)
        case "texts":
            return "/v1/completions", {"prompt": f"{number} {TEXT}", "max_tokens": 1}
        case "conversations":
            message = {"role": "user", "content": f"hello {number}"}
            return "/v1/chat/completions", {"messages": [message] * NUM_MESSAGES, "max_tokens": 1}
        case "prompts":
            return "/v1/completions", {"prompt": _prompt(number), "max_tokens": 1}
        case "outputs":
            more = {"max_tokens": NEW_TOKENS, "n": 8, "ignore_eos": True}
            return "/v1/completions", {"prompt": [3 + number % 1000], **more}
        case "answers":
            message = {"role": "user", "content": f"hello {number}"}
            more = {"max_tokens": ANSWER_TOKENS, "n": 8, "ignore_eos": True, "logprobs": True}
            return "/v1/chat/completions", {"messages": [message], "top_logprobs": 20, **more}
        case "patterns":
            pattern = f"({'|'.join(WORDS)}|{number}| ?[a-z]*){{200,400}}"
            return "/v1/completions", {"prompt": [3], "max_tokens": 300, "guided_regex": pattern, "n": 4}
        case "token texts":
            return "/tokenize", {"prompt": f"{number} {TEXT}", "return_token_strs": True}
        case "kept responses":
            return "/v1/responses", {"input": "hello", "max_output_tokens": 16, "store": True}
    raise ValueError(f"attack {attack!r}")


def _prompt(number: int) -> list[int]:
    return [3 + (number + index * index) % 1000 for index in range(PROMPT_TOKENS)]


async def _run(attack: str, num_connections: int, gateway: str, coordinator: str, key: str) -> None:
    numbers = itertools.count()

    async def flood(send: Send) -> None:
        while True:
            await send(next(numbers))

    async with (
        AsyncClient(base_url=f"http://{gateway}", timeout=TIMEOUT_S) as http,
        PLAIN.channel(coordinator) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def post(number: int) -> None:
            path, body = body_of(attack, number)
            await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

        async def tokenize(number: int) -> None:
            request = inference_pb2.TokenizeRequest(text=f"{number} {TEXT}")
            with contextlib.suppress(grpc.aio.AioRpcError):  # refused, as the flood may be
                await stub.Tokenize(request, metadata=((TENANT_KEY, TENANT),), timeout=TIMEOUT_S)

        print("begun", flush=True)
        send = tokenize if attack == "texts by gRPC" else post
        await asyncio.gather(*(flood(send) for _ in range(num_connections)))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
