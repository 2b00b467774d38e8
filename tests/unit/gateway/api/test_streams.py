"""Connections: clients that leave, silence, identity of requests, health beside slow work."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gateway.api import sse
from tests.unit.gateway.fake_upstream import answer, events_of, serve

PATH = "/v1/completions"
DEADLINE_S = 10.0


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"prompt": ["a", "b"]}])
async def test_a_client_that_leaves_cancels_its_request(body: dict[str, Any]) -> None:
    async with serve(over_tcp=True) as served:
        served.upstream.gate.clear()
        posting = asyncio.create_task(served.client.post(PATH, json={"prompt": "a", **body}))
        async with asyncio.timeout(DEADLINE_S):
            while len(served.upstream.streams) < len(body.get("prompt", "a")):
                await asyncio.sleep(0.005)
            posting.cancel()
            await asyncio.gather(*(stream.cancelled.wait() for stream in served.upstream.streams))
            await served.gateway.metrics.idle()


async def test_a_request_that_ended_is_not_cancelled() -> None:
    async with serve() as served:
        for body in ({}, {"stream": True}, {"stop": "bird"}):
            await served.client.post(PATH, json={"prompt": "a", **body})
            assert not served.upstream.streams[-1].cancelled.is_set()


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    async with serve() as served:
        served.upstream.gate.clear()
        asyncio.get_running_loop().call_later(0.1, served.upstream.gate.set)
        response = await served.client.post(PATH, json={"prompt": "a", "stream": True})
        frames = [frame for frame in response.text.split("\n\n") if frame]
        assert frames.count(": keep-alive") >= 2
        assert frames.index(": keep-alive") == 0
        assert frames[-1] == "data: [DONE]"


async def test_headers_of_a_stream() -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": "a", "stream": True, "colour": 1})
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-stageline-ignored"] == "colour"
        assert response.headers["x-request-id"] == served.request.request_id
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_the_id_of_the_client_is_kept_and_a_uuid_is_the_requests_own() -> None:
    uuid = "0190a0b0-0000-7000-8000-000000000001"
    async with serve() as served:
        for label, is_own in ((uuid, True), ("trace-17", False), ("a" * 300, False), ("", False)):
            response = await served.client.post(PATH, json={"prompt": "a"}, headers={"x-request-id": label})
            expected = label[:256] or served.request.request_id
            assert response.headers["x-request-id"] == expected
            assert (served.request.request_id == label) == is_own


async def test_a_valid_traceparent_goes_on() -> None:
    valid = f"00-{'a' * 32}-{'b' * 16}-01"
    async with serve() as served:
        for header, expected in ((valid, valid), ("00-x-y-01", "")):
            await served.client.post(PATH, json={"prompt": "a"}, headers={"traceparent": header})
            assert served.upstream.traceparents[-1] == expected


async def test_many_requests_at_once() -> None:
    text = " a bird sang of the sea and the moon"
    async with serve(answer(text)) as served:

        async def streamed() -> str:
            events = await events_of(served, PATH, prompt="a", stream=True)
            return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

        async def whole() -> str:
            response = await served.client.post(PATH, json={"prompt": "a"})
            return str(response.json()["choices"][0]["text"])

        texts = await asyncio.gather(*(streamed() if number % 2 else whole() for number in range(20)))
        assert texts == [text] * 20


async def test_health_answers_while_prompts_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served:
        began = asyncio.Event()
        loop = asyncio.get_running_loop()
        codec = served.gateway.codec
        assert codec is not None
        encode = codec.encode

        def slow(text: str, **named: Any) -> list[int]:
            loop.call_soon_threadsafe(began.set)
            time.sleep(0.3)
            return encode(text, **named)

        monkeypatch.setattr(codec, "encode", slow)
        posting = asyncio.create_task(served.client.post(PATH, json={"prompt": "a"}))
        await began.wait()
        response = await served.client.get("/health")
        assert response.status_code == 200
        assert not posting.done()
        assert (await posting).status_code == 200
