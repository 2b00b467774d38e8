from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.harness.figure import NotMeasured
from bench.harness.openai_engine import OpenAiEngine
from web.server import HttpServer
from wire.addresses import Address

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

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    async def lines(num_tokens: int) -> AsyncIterator[bytes]:
        for message in messages(num_tokens):
            yield b"data: " + json.dumps(message).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def completions(request: Request) -> Response:
        asked = await request.json()
        assert asked["model"] == "small" and asked["stream"] and asked["ignore_eos"]
        assert all(3 <= token < 100 for token in asked["prompt"])
        return StreamingResponse(lines(asked["max_tokens"]))

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    running = HttpServer(Starlette(routes=routes), Address("127.0.0.1", 0), name="the test", hint="")
    await running.start()
    try:
        yield f"{running.url}v1"
    finally:
        await running.stop()


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
