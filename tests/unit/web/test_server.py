"""An HTTP server that stops leaves no connection open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from web.server import HttpServer
from wire.addresses import Address


async def send_for_ever(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})


@pytest.mark.parametrize("has_request", [False, True])
async def test_a_connection_that_arrives_while_it_stops_is_closed(
    monkeypatch: pytest.MonkeyPatch, *, has_request: bool
) -> None:
    server = HttpServer(send_for_ever, Address("127.0.0.1", 0), name="test", hint="none")
    await server.start()
    inner = server._server
    shut_down = inner.shutdown
    late: list[Any] = []

    async def connect_first(**options: Any) -> None:
        """As if the listening socket had accepted it just before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
        late.extend((reader, writer))
        if has_request:
            writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        while not (inner.server_state.tasks if has_request else inner.server_state.connections):
            await asyncio.sleep(0.01)
        await shut_down(**options)

    monkeypatch.setattr(inner, "shutdown", connect_first)
    async with asyncio.timeout(10):
        await server.stop()
        await asyncio.sleep(0)  # transports close in callbacks
    assert not inner.server_state.connections
    late[1].transport.abort()
