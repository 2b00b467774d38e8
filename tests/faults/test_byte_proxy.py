"""The byte proxy injects the configured faults and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.byte_proxy import ByteProxy, Direction, Flip

TIMEOUT_S = 10.0
TEXT = bytes(range(256)) * 40


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """Address of an echo server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def _dial(proxy: ByteProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes = TEXT) -> bytes:
    writer.write(text)
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.readexactly(len(text))


async def test_bytes_pass_as_they_are_also_when_they_are_delayed(echo: str) -> None:
    async with ByteProxy(echo, seed=1) as proxy:
        connection = await _dial(proxy)
        assert await _echoed(*connection) == TEXT
        proxy.delay(0.01)
        assert await _echoed(*connection) == TEXT
        assert proxy.num_connections == 1
        connection[1].close()


async def test_a_cut_is_a_reset_and_the_next_connection_is_served(echo: str) -> None:
    async with ByteProxy(echo) as proxy:
        reader, writer = await _dial(proxy)
        await _echoed(reader, writer)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(TIMEOUT_S):
                await reader.read()
        writer.close()
        again = await _dial(proxy)
        assert await _echoed(*again) == TEXT
        again[1].close()


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_flip_changes_one_bit_of_the_named_bytes(echo: str, direction: Direction) -> None:
    async with ByteProxy(echo, seed=5) as proxy:
        connection = await _dial(proxy)
        flip = proxy.flip(direction, within_bytes=len(TEXT))
        falsified = await _echoed(*connection)
        assert flip.happened.is_set()
        different = [i for i, pair in enumerate(zip(falsified, TEXT, strict=True)) if len(set(pair)) == 2]
        assert len(different) == 1
        assert (falsified[different[0]] ^ TEXT[different[0]]).bit_count() == 1
        assert await _echoed(*connection) == TEXT
        connection[1].close()


def test_a_flip_counts_over_reads_and_its_place_follows_from_the_seed() -> None:
    places = [ByteProxy(seed=9).flip(Direction.FORTH, within_bytes=10_000).after_bytes for _ in range(2)]
    assert places[0] == places[1]
    flip = Flip(Direction.FORTH, after_bytes=5, bit=0)
    assert flip.apply(Direction.BACK, b"\0" * 9) == b"\0" * 9
    assert flip.apply(Direction.FORTH, b"\0" * 4) == b"\0" * 4
    assert flip.apply(Direction.FORTH, b"\0\0\0") == b"\0\1\0"
    assert flip.apply(Direction.FORTH, b"\0" * 9) == b"\0" * 9


async def test_a_stall_holds_bytes_back_and_loses_none(echo: str) -> None:
    async with ByteProxy(echo) as proxy:
        reader, writer = await _dial(proxy)
        await _echoed(reader, writer)
        proxy.stall()
        writer.write(TEXT)
        waiting = asyncio.create_task(reader.readexactly(len(TEXT)))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        proxy.flow()
        async with asyncio.timeout(TIMEOUT_S):
            assert await waiting == TEXT
        writer.close()


async def test_a_connection_waits_for_a_target(echo: str) -> None:
    async with ByteProxy() as proxy:
        reader, writer = await _dial(proxy)
        writer.write(TEXT)
        proxy.target = echo
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.readexactly(len(TEXT)) == TEXT
        writer.close()
