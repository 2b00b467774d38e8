"""Connections that a server keeps, closes and rejects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from wire import channels
from wire.channels import new_server
from wire.transport import PLAIN

DEADLINE_S = 120.0
METHOD = "/test.Test/Echo"


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def echo_server() -> AsyncIterator[str]:
    server = new_server()
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Echo": handler}),))
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def open_stream(channel: grpc.aio.Channel) -> Any:
    untyped: Any = channel
    call = untyped.stream_stream(METHOD)()
    async with asyncio.timeout(DEADLINE_S):
        await call.write(b"x")
        assert await call.read() == b"x"
    return call


async def test_an_idle_connection_is_closed_and_one_with_a_silent_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dict(channels.SERVER_OPTIONS)["grpc.max_connection_idle_ms"] == 300_000
    short = {**dict(channels.SERVER_OPTIONS), "grpc.max_connection_idle_ms": 200}
    monkeypatch.setattr(channels, "SERVER_OPTIONS", tuple(short.items()))
    async with echo_server() as address, PLAIN.channel(address) as used, PLAIN.channel(address) as idle:
        stream = await open_stream(used)
        (await open_stream(idle)).cancel()
        async with asyncio.timeout(DEADLINE_S):
            while (state := idle.get_state()) is grpc.ChannelConnectivity.READY:
                await idle.wait_for_state_change(state)
        async with asyncio.timeout(DEADLINE_S):  # idle for longer than the other connection
            await stream.write(b"y")
            assert await stream.read() == b"y"


async def test_connections_are_bounded_and_open_ones_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "max_connections", lambda: 2)
    async with echo_server() as address, PLAIN.channel(address) as first, PLAIN.channel(address) as second:
        streams = [await open_stream(first), await open_stream(second)]
        async with PLAIN.channel(address) as third:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await open_stream(third)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        for stream in streams:
            await stream.write(b"z")
            assert await asyncio.wait_for(stream.read(), DEADLINE_S) == b"z"
