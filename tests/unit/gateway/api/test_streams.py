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


def raw_request(version: str, **body: Any) -> bytes:
    data = json.dumps({"prompt": "a", "stream": True, **body}).encode()
    lines = (f"POST {PATH} HTTP/{version}", "host: a", "connection: close", f"content-length: {len(data)}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + data


async def raw_response(port: int, version: str) -> tuple[bytes, bytes]:
    """Return head and body of a streamed response, as they are on the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(version))
    async with asyncio.timeout(DEADLINE_S):
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), body


def without_chunks(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        num_bytes = int(size, 16)
        parts.append(rest[:num_bytes])
        assert rest[num_bytes:].startswith(b"\r\n")
        body = rest[num_bytes + 2 :]
    assert parts.pop() == b""
    return b"".join(parts)


def text_of(stream: str) -> str:
    events = [frame.removeprefix("data: ") for frame in stream.split("\n\n") if frame]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def test_parts_are_chunks_of_the_response_or_its_bytes_for_old_clients() -> None:
    text = " a bird sang" * 50
    async with serve(answer(text), over_tcp=True) as served:
        port = int(str(served.client.base_url.port))
        head, chunks = await raw_response(port, "1.1")
        old_head, old = await raw_response(port, "1.0")
        known = (await served.client.post(PATH, json={"prompt": "a", "stream": True})).text
    assert b"transfer-encoding: chunked" in head
    assert b"transfer-encoding" not in old_head
    assert [text_of(found) for found in (without_chunks(chunks).decode(), old.decode(), known)] == [text] * 3


async def test_the_output_of_a_client_that_reads_late_is_whole() -> None:
    text = " a bird sang" * 4000
    async with serve(answer(text), over_tcp=True) as served:
        port = int(str(served.client.base_url.port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(raw_request("1.1", return_token_ids=True))
        async with asyncio.timeout(60):
            while not served.upstream.streams or not served.upstream.streams[0].end:
                await asyncio.sleep(0.01)
            _, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
    assert text_of(without_chunks(body).decode()) == text
