"""Headers that browsers heed: on every response of a server, errors included."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from httpx2 import AsyncClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from certificates.files import TlsDirectory
from certificates.identity import Role
from tests.issued import Certificates
from web.server import HttpServer
from wire.addresses import parse_address
from wire.transport import Transport

EXPECTED = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HSTS = "Strict-Transport-Security"


async def text(request: Request) -> Response:
    return PlainTextResponse("text")


async def stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"part"
        yield b"part"

    return StreamingResponse(parts())


async def static(request: Request) -> Response:
    return PlainTextResponse("file", headers={"Cache-Control": "no-cache"})


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Fails in one path without an answer, as only a defect does."""
    if scope["path"] == "/defect":
        raise RuntimeError("defect")
    routes = [Route("/text", text), Route("/stream", stream), Route("/static", static)]
    await Starlette(routes=routes)(scope, receive, send)


@asynccontextmanager
async def served(*, listen: str = "127.0.0.1:0", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    server = HttpServer(application, parse_address(listen), name="a test", hint="none", tls=tls)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("text", "GET", 200),
        ("text", "HEAD", 200),
        ("stream", "GET", 200),
        ("nowhere", "GET", 404),
        ("text", "POST", 405),
        ("defect", "GET", 500),
    ],
)
async def test_every_response_has_the_headers(
    path: str, method: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with served() as url, AsyncClient() as http:
        response = await http.request(method, url + path)
    assert response.status_code == status
    expected = EXPECTED if path != "defect" else {**EXPECTED, "Cache-Control": None}
    assert {name: response.headers.get(name) for name in EXPECTED} == expected
    assert "camera=()" in response.headers["Permissions-Policy"]
    assert "Server" not in response.headers
    assert HSTS not in response.headers


async def test_a_response_that_may_be_kept_says_so() -> None:
    async with served() as url, AsyncClient() as http:
        assert (await http.get(url + "static")).headers.get_list("Cache-Control") == ["no-cache"]


@pytest.mark.parametrize(("listen", "has_hsts"), [("0.0.0.0:0", True), ("127.0.0.1:0", False)])
async def test_browsers_keep_to_https_beyond_this_host(tmp_path: Path, listen: str, has_hsts: bool) -> None:
    """On loopback they would keep every other server of the host's name from plain text."""
    directory = Certificates(tmp_path).of("head", Role.COORDINATOR)
    trusted = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    tls = Transport(TlsDirectory(directory)).http_context()
    async with served(listen=listen, tls=tls) as url, AsyncClient(verify=trusted) as http:
        headers = (await http.get(url + "text")).headers
    assert headers.get(HSTS) == ("max-age=31536000" if has_hsts else None)
