"""Writes that are started in the same turn of the event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from wire.channels import OrderedWrites, StartedWrite, new_server
from wire.transport import PLAIN


class Stream:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, *, num_waits: int = 1) -> None:
        self.seen.append("began")
        try:
            for _ in range(num_waits):
                await self.sent
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        self.seen.append("done")


async def test_a_write_begins_at_once_and_ends_where_it_is_awaited() -> None:
    stream = Stream()
    write = StartedWrite(stream.write(num_waits=2))
    assert stream.seen == ["began"]
    asyncio.get_running_loop().call_soon(stream.sent.set_result, None)
    await write
    assert stream.seen == ["began", "done"]


async def test_a_write_that_ended_before_it_is_awaited() -> None:
    stream = Stream()
    write = StartedWrite(stream.write())
    stream.sent.set_result(None)
    await asyncio.sleep(0)
    await write
    await StartedWrite(stream.write(num_waits=0))
    assert stream.seen == ["began", "done", "began", "done"]


async def test_an_error_of_a_write_is_raised_where_it_is_awaited() -> None:
    async def refused() -> None:
        raise asyncio.InvalidStateError("the call is over")

    write = StartedWrite(refused())
    with pytest.raises(asyncio.InvalidStateError, match="over"):
        await write
    stream = Stream()
    write = StartedWrite(stream.write())
    stream.sent.set_exception(ConnectionError("broken"))
    with pytest.raises(ConnectionError, match="broken"):
        await write


async def test_a_cancelled_writer_cancels_the_write() -> None:
    stream = Stream()

    async def writer() -> None:
        await StartedWrite(stream.write())

    task = asyncio.create_task(writer())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.seen == ["began", "cancelled"]


async def test_a_failed_write_that_nothing_awaits_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A stream that ends leaves such writes behind."""
    stream = Stream()
    write = StartedWrite(stream.write())
    stream.sent.set_exception(ConnectionError("broken"))
    await asyncio.sleep(0)
    del write, stream
    gc.collect()
    assert caplog.records == []


async def _accept_then_abort(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await anext(messages)
    yield b"accepted"
    await anext(messages)
    await context.abort(grpc.StatusCode.ABORTED, "the epoch is over")


class Aborting(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(_accept_then_abort)


async def test_writes_that_race_the_end_of_the_call_have_the_status_of_the_receiver() -> None:
    server = new_server()
    server.add_generic_rpc_handlers((Aborting(),))
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        for size_bytes in (100, 100_000) * 10:
            assert await _status_of_racing_writes(f"127.0.0.1:{port}", bytes(size_bytes)) == (
                grpc.StatusCode.ABORTED,
                "the epoch is over",
            )
    finally:
        await server.stop(None)


async def _status_of_racing_writes(address: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """Status of a call whose sender writes on while the receiver ends it."""
    async with PLAIN.channel(address) as channel:
        call: Any = channel.stream_stream("/stage/Forward")()
        await call.write(message)
        await call.read()
        writes = OrderedWrites()
        writing = asyncio.create_task(writes.run(call))
        while not writing.done():
            writes.put(message)
            await asyncio.sleep(0)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await writing
        return await call.code(), await call.details()
