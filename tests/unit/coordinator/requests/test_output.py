"""Tokens wait for their reader, in order, and the end comes last."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.requests.output import OutputBatch, OutputChannel
from coordinator.scheduling.sequence import FinishReason
from wire.errors import RequestCancelled


async def read(channel: OutputChannel) -> OutputBatch:
    async with asyncio.timeout(5):
        return await channel.read()


async def test_tokens_coalesce_until_they_are_read() -> None:
    channel = OutputChannel()
    for token in (1, 2, 3):
        channel.put(token, None)
    assert await read(channel) == OutputBatch((1, 2, 3), None)
    channel.put(4, None)
    channel.put(5, FinishReason.STOP)
    assert await read(channel) == OutputBatch((4, 5), FinishReason.STOP)


async def test_a_reader_waits_for_news() -> None:
    channel = OutputChannel()
    reader = asyncio.create_task(read(channel))
    await asyncio.sleep(0)
    assert not reader.done()
    channel.put(7, FinishReason.LENGTH)
    assert await reader == OutputBatch((7,), FinishReason.LENGTH)


async def test_what_was_put_before_the_error_is_still_delivered() -> None:
    channel = OutputChannel()
    channel.put(1, None)
    channel.fail(RequestCancelled("cancelled"))
    assert await read(channel) == OutputBatch((1,), None)
    with pytest.raises(RequestCancelled, match="cancelled"):
        await read(channel)


async def test_an_error_wakes_a_reader_that_waits() -> None:
    channel = OutputChannel()
    reader = asyncio.create_task(read(channel))
    await asyncio.sleep(0)
    channel.fail(RequestCancelled("cancelled"))
    with pytest.raises(RequestCancelled):
        await reader
