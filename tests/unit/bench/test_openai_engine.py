from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.harness.figure import NotMeasured
from bench.harness.openai_engine import OpenAiEngine

Messages = Callable[[int], list[dict[str, object]]]


def counted(num_tokens: int) -> list[dict[str, object]]:
    """Two tokens in each message but the last, counted."""
    ends = [*range(2, num_tokens, 2), num_tokens]
    return [{"choices": [{"text": ""}], "usage": {"completion_tokens": end}} for end in ends]


def uncounted(num_tokens: int) -> list[dict[str, object]]:
    """A token in each message, counted at the end."""
    messages: list[dict[str, object]] = [{"choices": [{"text": "a"}]} for _ in range(num_tokens)]
    return [*messages, {"choices": [], "usage": {"completion_tokens": num_tokens}}]


@asynccontextmanager
async def server(messages: Messages) -> AsyncIterator[str]:
    """An OpenAI-compatible server that answers with `messages` of as many tokens as requested."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        assert asked["model"] == "small" and asked["stream"] and asked["ignore_eos"]
        assert all(3 <= token < 100 for token in asked["prompt"])
        response = web.StreamResponse()
        await response.prepare(request)
        for message in messages(asked["max_tokens"]):
            await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as running:
        yield str(running.make_url("/v1"))


@pytest.mark.parametrize("messages", [counted, uncounted])
async def test_each_token_has_an_arrival(messages: Messages) -> None:
    async with server(messages) as url, OpenAiEngine(url, vocab_size=100) as engine:
        streams = await engine.generate_all(3, prompt_tokens=20, max_tokens=5)
    assert [len(stream.arrivals_s) for stream in streams] == [5, 5, 5]
    for stream in streams:
        assert [stream.sent_s, *stream.arrivals_s] == sorted([stream.sent_s, *stream.arrivals_s])


async def test_an_answer_that_is_too_short_is_not_measured() -> None:
    short = server(lambda num_tokens: counted(num_tokens - 1))
    async with short as url, OpenAiEngine(url, vocab_size=100) as engine:
        with pytest.raises(NotMeasured, match="4 tokens, asked for 5"):
            await engine.generate_all(2, prompt_tokens=20, max_tokens=5)


async def test_a_server_that_is_not_there_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match="lists no models"):
        async with OpenAiEngine("http://127.0.0.1:9", vocab_size=100):
            pass
