"""Writes that are started in the same turn of the event loop."""

from __future__ import annotations

import asyncio
import gc

import pytest

from wire.channels import StartedWrite


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
