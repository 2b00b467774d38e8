"""What holds of payloads on both ways, connections and shared memory: they are whole, and of one sender."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import xxhash

from tests.unit.wire.payload_hops import (
    DEADLINE_S,
    EPOCH,
    SECRET,
    Hop,
    MemoryHop,
    SocketHop,
    closing,
    end_of,
    opening,
    until,
)
from wire import payloads
from wire.memory_listener import MemoryListener
from wire.payload_memory import INLINE_BYTES, MemorySender
from wire.payload_sockets import MIN_PIECE_BYTES, PayloadListener, PayloadSender
from wire.payloads import PROOF_BYTES, PayloadKey, PayloadNotice
from wire.peer_secrets import RefusedPeers
from wire.shared_segment import PIECE_BYTES
from wire.staging import NUM_HOP_SLOTS

WAYS = pytest.mark.parametrize("way", [SocketHop, MemoryHop], ids=["connection", "shared memory"])
SIZES = [
    *((SocketHop, size) for size in (1, MIN_PIECE_BYTES, MIN_PIECE_BYTES + 1, SocketHop.limit)),
    *((MemoryHop, size) for size in (1, INLINE_BYTES, INLINE_BYTES + 1, PIECE_BYTES + 1, MemoryHop.limit)),
]


async def sent(sender: PayloadSender | MemorySender, data: bytes) -> PayloadNotice:
    notice = await asyncio.wait_for(sender.send(data), DEADLINE_S)
    assert notice is not None
    return notice


@pytest.mark.parametrize(("way", "size_bytes"), SIZES)
async def test_a_payload_arrives_whole_with_its_checksum(way: type[Hop], size_bytes: int) -> None:
    async with closing(way()) as to, opening(to.sender()) as sender:
        for number in range(1, 2 * NUM_HOP_SLOTS + 1):
            data = os.urandom(size_bytes)
            notice = await sent(sender, data)
            assert notice == PayloadNotice(number, size_bytes, xxhash.xxh3_64_intdigest(data))
            payload = await to.take(notice)
            assert payload.data == data
            assert payload.began_s <= time.monotonic()
    assert to.num_refused == 0


@WAYS
@pytest.mark.parametrize("what", ["epoch", "secret", "ticket", "bytes"])
async def test_a_wrong_greeting_is_refused_and_the_right_one_still_passes(way: type[Hop], what: str) -> None:
    async with closing(way()) as to:
        wrong = {
            "epoch": PayloadKey(EPOCH + 1, SECRET, to.key.ticket).greeting(),
            "secret": PayloadKey(EPOCH, b"x" * 32, to.key.ticket).greeting(),
            "ticket": PayloadKey(EPOCH, SECRET, b"x" * 16).greeting(),
            "bytes": b"GET / HTTP/1.1\r\n" * 4,
        }[what]
        with to.connect() as stranger:
            to.greet(stranger, wrong)
            assert await end_of(stranger) == b""
        await until(lambda: to.num_refused == 1)
        assert not to.is_open
        async with opening(to.sender()) as sender:
            assert (await to.take(await sent(sender, b"abc"))).data == b"abc"


@WAYS
async def test_a_greeting_is_accepted_once(way: type[Hop]) -> None:
    async with closing(way()) as to, opening(to.sender()):
        with to.connect() as second:
            to.greet(second, to.key.greeting())
            assert await end_of(second) == b""
        await until(lambda: to.num_refused == 1)


@WAYS
async def test_a_late_greeting_is_refused(way: type[Hop]) -> None:
    async with closing(way()) as to:
        to.forget()
        with pytest.raises(ConnectionError, match=r"closed|reset"):
            await to.sender().open()
        await until(lambda: to.num_refused == 1)


@WAYS
async def test_connections_that_do_not_greet_are_limited_and_end(
    way: type[Hop], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with closing(way()) as to:
        with monkeypatch.context() as patch:
            patch.setattr(way.listening, "GREETING_TIMEOUT_S", 1.0)
            silent = [to.connect() for _ in range(way.max_silent)]
            await until(lambda: to.num_silent == way.max_silent)
            with to.connect() as refused:
                assert await end_of(refused) == b""
            await until(lambda: to.num_refused == 1)
            for connection in silent:
                assert await end_of(connection) == b""
                connection.close()
            await until(lambda: to.num_refused == 1 + way.max_silent)
        async with opening(to.sender()):
            assert to.is_open


@WAYS
async def test_a_sender_that_meets_another_process_does_not_send(way: type[Hop]) -> None:
    async with closing(way()) as to:
        impostor, sender = to.impostor()
        with impostor:
            opened = asyncio.create_task(sender.open())
            connection = (await asyncio.to_thread(impostor.accept))[0]
            with connection:
                connection.sendall(b"x" * PROOF_BYTES)
                with pytest.raises(ConnectionError, match="another process is at the"):
                    await opened


@WAYS
async def test_a_sender_gives_up_when_nothing_answers(
    way: type[Hop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way.sending, "GREETING_TIMEOUT_S", 0.2)
    async with closing(way()) as to:
        silent, sender = to.impostor()
        with silent, pytest.raises(ConnectionError, match="timed out"):
            await sender.open()


@WAYS
async def test_a_suspended_listener_offers_nothing_for_a_while(
    way: type[Hop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_RETRY_S", 0.5)
    async with closing(way()) as to:

        def offers() -> bool:
            return to.listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=1) is not None

        to.listener.suspend()
        assert not offers()
        await until(offers)


@pytest.mark.parametrize("kind", [PayloadListener, MemoryListener])
async def test_nothing_is_offered_by_a_listener_that_does_not_listen(
    kind: type[PayloadListener | MemoryListener],
) -> None:
    listener = kind(RefusedPeers(time.monotonic))
    assert listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=1) is None
    listener.close()
