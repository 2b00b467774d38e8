"""Surfaces of HTTP: requests to a gateway and to a coordinator's dashboard, as bytes on a connection."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tests.fuzz.background import Background, errors_logged
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import any_text, json_bytes, mutate_bytes, mutate_json, mutate_text
from tests.integration.test_mock_cluster import mock_cluster
from wire.addresses import Address, parse_address

_READ_S = 0.1
"""How long a connection without an answer is read: a stream, or a request that is not complete."""
_BUSY_S = 30.0
"""The same for a valid request, on a busy machine."""
_MAX_READ = 1 << 16
_PROMPT = [3, 14, 15]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CHAT = [{"role": "user", "content": "hi"}]
_BODIES: Sequence[tuple[str, Any]] = (
    ("/v1/completions", {"prompt": _PROMPT, "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "n": 2}),
    ("/v1/completions", {"prompt": [_PROMPT, _PROMPT], "max_tokens": 2, "stream": True, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": _CHAT, "max_tokens": 2, "tools": [_TOOL], "seed": 1}),
    ("/v1/messages", {"messages": _CHAT, "max_tokens": 2, "system": "s"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "text": {"format": {"type": "text"}}}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": True}),
    ("/detokenize", {"tokens": _PROMPT}),
)
_PATHS = (
    *("/v1/models", "/v1/models/mock", "/health", "/readyz", "/metrics", "/version", "/", "/static/chat.js"),
    *("/openapi.json", "/tokenizer_info", "/v1/responses/resp_abc", "/ping"),
)
_DASHBOARD_PATHS = (
    *("/", "/static/app.js", "/api/status", "/api/activity?after=3&since=5", "/api/traces?limit=3"),
    *("/api/traces/0189", "/metrics", "/healthz", "/readyz", "/login"),
)
_DASHBOARD_POSTS = (
    *("/api/token", "/api/requests/01890000-0000-7000-8000-000000000000/cancel"),
    *("/api/workers/nobody/drain", "/login", "/logout"),
)
_HEADERS = (
    *("Authorization: Bearer x", "Content-Encoding: gzip", "Transfer-Encoding: chunked", "Cookie: a=b"),
    *("Expect: 100-continue", "Range: bytes=0-1", "If-None-Match: *", "X-Request-Id: 1", "Accept: text/html"),
    *("Connection: upgrade", "Upgrade: websocket", "Origin: http://evil", "Content-Type: text/plain"),
    *("Content-Length: 5", "Host: other", "traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
)


def make_gateway(random: Random) -> bytes:
    if random.random() < 0.25:
        return _request(random, "GET", random.choice(_PATHS), b"")
    path, body = random.choice(_BODIES)
    if random.random() < 0.85:
        return _request(random, "POST", path, json_bytes(mutate_json(body, random), random))
    return _request(random, "POST", path, json.dumps(body).encode())


def make_dashboard(random: Random) -> bytes:
    if random.random() < 0.6:
        return _request(random, "GET", random.choice(_DASHBOARD_PATHS), b"")
    body = random.choice((b"", b"{}", b'{"key":"sk-sl-x"}', b"key=sk-sl-x", b"\xff" * 20, b"[" * 3000))
    return _request(random, "POST", random.choice(_DASHBOARD_POSTS), body)


def _request(random: Random, method: str, path: str, body: bytes) -> bytes:
    if random.random() < 0.15:
        method = random.choice(("PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "x", "GET", "POST"))
    if random.random() < 0.25:
        path = "/" + mutate_text(path[1:], random).replace(" ", "%20").replace("\n", "")[:3000]
    headers = [
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    for _ in range(random.choice((0, 0, 1, 3))):
        line = random.choice(_HEADERS) if random.random() < 0.7 else f"X-Any: {any_text(random)[:200]}"
        headers.insert(random.randrange(len(headers)), line)
    if random.random() < 0.1:
        headers = [mutate_text(line, random) if random.random() < 0.3 else line for line in headers]
    head = "\r\n".join((f"{method} {path} HTTP/1.1", *headers)).encode(errors="replace")
    data = head + b"\r\n\r\n" + body
    return mutate_bytes(data, random) if random.random() < 0.15 else data


@asynccontextmanager
async def _gateway() -> AsyncIterator[Address]:
    async with mock_cluster(1) as cluster:
        server = GatewayServer(
            GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0"), template=None
        )
        await server.start()
        try:
            yield parse_address(str(server.address))
        finally:
            await server.stop()


@asynccontextmanager
async def _dashboard() -> AsyncIterator[Address]:
    async with mock_cluster(1, http="127.0.0.1:0") as cluster:
        dashboard = cluster.server.dashboard
        assert dashboard is not None
        yield parse_address(urlsplit(dashboard.url).netloc)


def _opener(serving: Callable[[], Any], healthy: bytes) -> Callable[[], Any]:
    @contextmanager
    def opened() -> Iterator[Opened]:
        background = Background()
        with errors_logged() as errors, background.entered(serving) as address:

            def examine(data: bytes) -> str:
                ended = background.run(exchange(address, data))
                errors.check()
                return ended

            def check() -> None:
                request = b"GET " + healthy + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
                if (status := background.run(exchange(address, request, silence_s=_BUSY_S))) != "200":
                    raise Broken(f"a valid request: {status}")
                errors.check()

            yield Opened(examine, check, (os.getpid(),))
        background.close()

    return opened


async def exchange(
    address: Address, data: bytes, tls: ssl.SSLContext | None = None, *, silence_s: float = _READ_S
) -> str:
    """Send bytes to an HTTP server, and return the status of its answer, "waiting" if none begins within
    `silence_s`. Raises Broken for 500.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    answer = b""
    try:
        writer.write(data)
        async with asyncio.timeout(None) as patience:
            while len(answer) < _MAX_READ:
                patience.reschedule(asyncio.get_running_loop().time() + silence_s)
                part = await reader.read(_MAX_READ)
                answer += part
                if not part:
                    break
    except TimeoutError:
        if not answer:
            return "waiting"
    except ConnectionError:
        return "reset"
    finally:
        writer.close()
    return _status(answer)


def _status(answer: bytes) -> str:
    if not answer:
        return "closed"
    if not answer.startswith(b"HTTP/1.1 "):
        raise Broken(f"an answer that is not HTTP: {answer[:100]!r}")
    status = answer[9:12].decode()
    if status == "500":
        raise Broken(f"500: {answer[-300:]!r}")
    return status


SURFACES = (
    Surface(name="gateway-http", share=10, make=make_gateway, opened=_opener(_gateway, b"/health")),
    Surface(name="dashboard-http", share=5, make=make_dashboard, opened=_opener(_dashboard, b"/healthz")),
)
