"""Payloads in memory that two ends share: copies, slots, refusals, and nothing left behind."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.wire.payload_hops import DEADLINE_S, EPOCH, MemoryHop, closing, opening, until
from wire import payload_memory, shared_segment
from wire.errors import StepFault, StepFaultKind
from wire.memory_listener import MemoryListener
from wire.payload_memory import (
    MAX_HELD,
    MAX_UNRETURNED,
    MemoryReceiver,
    MemorySender,
    host_id,
    memory_domain,
)
from wire.payloads import ArrivedPayload, Bytes, PayloadNotice
from wire.peer_secrets import RefusedPeers
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS, hop_slot_bytes

LIMIT = MemoryHop.limit


def hop() -> AbstractAsyncContextManager[MemoryHop]:
    return closing(MemoryHop())


def opened(to: MemoryHop) -> AbstractAsyncContextManager[MemorySender]:
    return opening(to.sender())


def segments() -> list[str]:
    """Segments that this process has mapped or open."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(file))
        except FileNotFoundError:
            continue  # of this listing itself
    return [found for found in (*maps, *files) if "stageline-payloads" in found]


async def passed(sender: MemorySender, data: Bytes) -> PayloadNotice:
    notice = await asyncio.wait_for(sender.send(data), DEADLINE_S)
    assert notice is not None
    return notice


async def test_no_segment_is_left_behind() -> None:
    gc.collect()
    before = segments()
    async with hop() as to, opened(to) as sender:
        assert len(segments()) >= len(before) + 2
        await to.receiver.take(await passed(sender, bytes(LIMIT)))
    gc.collect()
    assert segments() == before


async def test_a_small_payload_is_copied() -> None:
    async with hop() as to, opened(to) as sender:
        first = await to.receiver.take(await passed(sender, b"first"))
        for _ in range(NUM_HOP_SLOTS):
            await to.receiver.take(await passed(sender, b"later"))
        assert first.data == b"first"


async def test_large_payloads_that_are_used_keep_their_slots_and_the_others_are_copied() -> None:
    data = [bytes([number]) * LIMIT for number in range(3 * NUM_HOP_SLOTS)]
    async with hop() as to, opened(to) as sender:
        used = [await to.receiver.take(await passed(sender, each)) for each in data]
        assert len(to.receiver._held) == MAX_HELD
        assert [payload.data for payload in used] == data
        part = memoryview(used[0].data)[1:]
        used.clear()
        gc.collect()
        # A part of the first payload is still referenced.
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS - 1)
        assert to.receiver._held == {1}
        assert bytes(part) == data[0][1:]
        del part
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)


async def test_a_sender_is_never_stuck_between_small_and_used_payloads() -> None:
    async with hop() as to, opened(to) as sender:
        used = [await to.receiver.take(await passed(sender, bytes(LIMIT))) for _ in range(MAX_HELD)]
        for number in range(3 * NUM_HOP_SLOTS):
            payload = await to.receiver.take(await passed(sender, bytes([number])))
            assert payload.data == bytes([number])
        assert all(payload.data == bytes(LIMIT) for payload in used)


async def test_a_slot_is_returned_on_the_event_loop_whatever_thread_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop owns the socket: it may close it at any time."""
    threads: list[threading.Thread] = []
    returned = MemoryReceiver._return

    def noted(receiver: MemoryReceiver, *numbers: int) -> None:
        threads.append(threading.current_thread())
        returned(receiver, *numbers)

    monkeypatch.setattr(MemoryReceiver, "_return", noted)
    async with hop() as to, opened(to) as sender:
        used = [await to.receiver.take(await passed(sender, bytes(LIMIT)))]
        await asyncio.to_thread(used.clear)
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)
    assert threads == [threading.current_thread()]


def test_a_payload_may_be_released_after_the_event_loop_has_ended() -> None:
    gc.collect()
    before = segments()
    used: list[ArrivedPayload] = []

    async def take_one() -> None:
        async with hop() as to, opened(to) as sender:
            used.append(await to.receiver.take(await passed(sender, bytes(LIMIT))))

    asyncio.run(take_one())
    used.clear()  # an error in it would be unraisable, and fail the test
    gc.collect()
    assert segments() == before


async def test_a_used_payload_outlives_the_hop() -> None:
    gc.collect()
    before = segments()
    async with hop() as to, opened(to) as sender:
        payload = await to.receiver.take(await passed(sender, b"x" * LIMIT))
    assert payload.data == b"x" * LIMIT
    del payload
    gc.collect()
    assert segments() == before


async def test_a_sender_waits_until_a_slot_is_returned() -> None:
    async with hop() as to, opened(to) as sender:
        notices = [await passed(sender, bytes([number])) for number in range(NUM_HOP_SLOTS)]
        waiting = asyncio.create_task(sender.send(b"x"))
        for number in range(MAX_UNRETURNED):
            await asyncio.sleep(0.02)
            assert not waiting.done()
            assert (await to.receiver.take(notices[number])).data == bytes([number])
        notice = await asyncio.wait_for(waiting, DEADLINE_S)
        assert notice is not None and notice.number == NUM_HOP_SLOTS + 1
        for number in range(MAX_UNRETURNED, NUM_HOP_SLOTS):
            assert (await to.receiver.take(notices[number])).data == bytes([number])
        assert (await to.receiver.take(notice)).data == b"x"


async def test_a_larger_payload_belongs_into_the_frame() -> None:
    async with hop() as to, opened(to) as sender:
        too_large = to.receiver.offer.slot_bytes - HOP_DATA_OFFSET + 1
        assert await sender.send(bytes(too_large)) is None
        assert (await passed(sender, b"x")).number == 1


async def test_a_receiver_that_ends_fails_waiting_senders() -> None:
    async with hop() as to, opened(to) as sender:
        for _ in range(NUM_HOP_SLOTS):
            await passed(sender, b"x")
        waiting = asyncio.create_task(sender.send(b"x"))
        await asyncio.sleep(0)
        to.listener.forget(to.receiver)
        with pytest.raises(ConnectionError, match="the connection was closed"):
            await asyncio.wait_for(waiting, DEADLINE_S)
        with pytest.raises(ConnectionError, match="the connection was closed"):
            await sender.send(b"x")


async def test_a_sender_that_has_gone_before_the_answer_opens_nothing() -> None:
    async with hop() as to:
        sender = MemorySender(to.receiver.offer, to.receiver.key)
        sender._connect()
        sender.close()
        await until(lambda: to.num_refused == 1)
        assert not to.receiver.is_open


async def test_what_was_written_can_be_taken_when_the_sender_has_gone() -> None:
    async with hop() as to:
        async with opened(to) as sender:
            notice = await passed(sender, b"last")
        assert (await to.receiver.take(notice)).data == b"last"


@pytest.mark.parametrize(
    ("stamp", "kind", "message"),
    [
        (
            (EPOCH, 5, 4),
            StepFaultKind.UNDECODABLE,
            "no slot holds payload 1 of epoch 7, but",
        ),
        (
            (6, 1, 4),
            StepFaultKind.UNDECODABLE,
            "0 of epoch 0, 0 of epoch 0, 1 of epoch 6",
        ),
        ((0, 0, 0), StepFaultKind.UNDECODABLE, "no slot holds payload 1 of epoch 7"),
        ((EPOCH, 1, 3), StepFaultKind.SHAPE, "payload 1 has 3 bytes in its slot, the frame says 4"),
    ],
    ids=["overwritten", "stale", "unfinished", "size"],
)
async def test_a_slot_with_another_payload_is_a_fault(
    stamp: tuple[int, int, int], kind: StepFaultKind, message: str
) -> None:
    async with hop() as to, opened(to) as sender:
        notice = await passed(sender, b"data")
        assert sender._segment is not None
        shared_segment._STAMP.pack_into(sender._segment.slot(sender._written[1]), 0, *stamp, 0)
        with pytest.raises(StepFault, match=message) as raised:
            await to.receiver.take(notice)
        assert raised.value.kind is kind


async def test_a_slot_that_is_overwritten_meanwhile_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hop() as to, opened(to) as sender:
        notice = await passed(sender, bytes(LIMIT))
        segment = sender._segment
        assert segment is not None
        digest = shared_segment.hashed

        def overwrite(data: memoryview) -> int:
            checksum = digest(data)
            segment.write(sender._written[1], EPOCH, 2, b"later")
            return checksum

        monkeypatch.setattr(payload_memory, "hashed", overwrite)
        with pytest.raises(StepFault, match="no slot holds payload 1 of epoch 7"):
            await to.receiver.take(notice)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda n: replace(n, number=2), StepFaultKind.UNDECODABLE, "names payload 2, the next is 1"),
        (lambda n: replace(n, checksum=1), StepFaultKind.CHECKSUM, "checksum of payload 1"),
        (lambda n: replace(n, size_bytes=0), StepFaultKind.SHAPE, "has 0 bytes"),
        (lambda n: replace(n, size_bytes=LIMIT + 1), StepFaultKind.SHAPE, f"the limit is {LIMIT}"),
    ],
    ids=["order", "checksum", "empty", "too large"],
)
async def test_a_frame_that_names_another_payload_is_a_fault(
    change: Callable[[PayloadNotice], PayloadNotice], kind: StepFaultKind, message: str
) -> None:
    async with hop() as to, opened(to) as sender:
        notice = change(await passed(sender, b"data"))
        with pytest.raises(StepFault, match=message) as raised:
            await to.receiver.take(notice)
        assert raised.value.kind is kind


async def test_a_payload_that_was_taken_cannot_be_named_again() -> None:
    async with hop() as to, opened(to) as sender:
        notice = await passed(sender, b"data")
        await to.receiver.take(notice)
        with pytest.raises(StepFault, match="names payload 1, the next is 2"):
            await to.receiver.take(notice)


async def test_the_size_of_a_segment_cannot_change() -> None:
    descriptor = shared_segment.new_segment(hop_slot_bytes(1))
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _memfd(size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("stageline-payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


_WHOLE = NUM_HOP_SLOTS * hop_slot_bytes(LIMIT)


@pytest.mark.parametrize(
    ("new_segment", "problem"),
    [
        (lambda: _memfd(_WHOLE, 0), "the size of the segment is not sealed"),
        (lambda: _memfd(_WHOLE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "is not sealed"),
        (lambda: _memfd(4096, shared_segment._FIXED_SIZE), f"has 4096 bytes, expected {_WHOLE}"),
        (lambda: os.open("/dev/null", os.O_RDONLY), "Invalid argument"),
    ],
    ids=["unsealed", "shrinkable", "truncated", "no segment"],
)
async def test_another_segment_is_refused_before_the_epoch(
    new_segment: Callable[[], int], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hop() as to:
        descriptor = new_segment()
        with to.connect() as connection:
            socket.send_fds(connection, [to.receiver.key.greeting()], [descriptor])
            os.close(descriptor)
            await until(lambda: to.num_refused == 1)
            assert connection.recv(1) == b""
        assert not to.receiver.is_open
    assert problem in caplog.text


@pytest.mark.parametrize(
    "greeting",
    [b"", b"short", bytes(65)],
    ids=["empty", "short", "long"],
)
async def test_greetings_of_another_size_are_refused(greeting: bytes) -> None:
    async with hop() as to:
        with to.connect() as connection:
            connection.send(greeting)
            await until(lambda: to.num_refused == 1)
        assert not to.receiver.is_open
        async with opened(to):
            assert to.receiver.is_open


async def test_a_greeting_without_a_segment_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with hop() as to:
        with to.connect() as connection:
            connection.send(to.receiver.key.greeting())
            await until(lambda: to.num_refused == 1)
    assert "no segment with the greeting" in caplog.text


async def test_senders_of_other_users_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with hop() as to:
        user = os.geteuid()
        with to.connect() as connection:
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
            await until(lambda: to.num_refused == 1)
            assert connection.recv(1) == b""
        with pytest.raises(ConnectionError, match=f"next stage runs as user {user}, this worker as user"):
            await MemorySender(to.receiver.offer, to.receiver.key).open()
    assert f"the sender runs as user {user}, this worker as user {user + 1}" in caplog.text


@pytest.mark.parametrize("slot_bytes", [0, 1 << 62], ids=["none", "huge"])
async def test_an_offer_of_impossible_slots_is_not_taken(slot_bytes: int) -> None:
    gc.collect()
    before = segments()
    async with hop() as to:
        with pytest.raises(ConnectionError):
            await MemorySender(replace(to.receiver.offer, slot_bytes=slot_bytes), to.receiver.key).open()
    assert segments() == before


@pytest.mark.parametrize("message", [b"\5", bytes(8), b"\2" + bytes(7), b"\1" + bytes(8)])
async def test_a_receiver_that_returns_what_it_does_not_have_breaks_the_hop(message: bytes) -> None:
    async with hop() as to, opened(to) as sender:
        await passed(sender, b"x")
        connection = to.receiver._socket
        assert connection is not None
        connection.send(message)
        await until(lambda: sender._broken != "")
        with pytest.raises(ConnectionError):
            await sender.send(b"x")


async def test_without_file_descriptors_a_sender_is_accepted_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with hop() as to:
        listening = to.listener._listening
        assert listening is not None

        class Full:
            def accept(self) -> None:
                raise OSError(24, "Too many open files")

            def fileno(self) -> int:
                assert listening is not None
                return listening.fileno()

        monkeypatch.setattr(to.listener, "_listening", Full())
        opening = asyncio.create_task(MemorySender(to.receiver.offer, to.receiver.key).open())
        await until(lambda: "cannot accept a sender of shared memory: Too many open files" in caplog.text)
        monkeypatch.setattr(to.listener, "_listening", listening)
        await asyncio.wait_for(opening, DEADLINE_S)
        assert to.receiver.is_open


async def test_a_system_without_boot_id_shares_no_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(payload_memory, "_BOOT_ID", tmp_path / "missing")
    host_id.cache_clear()
    try:
        with pytest.raises(OSError, match="needs Linux with /proc"):
            MemoryListener(RefusedPeers(time.monotonic)).listen()
    finally:
        host_id.cache_clear()


def test_sockets_are_in_reach_within_one_network_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory_domain.cache_clear()
    own = memory_domain()
    assert len(own) == 32 and own != host_id()
    monkeypatch.setattr(payload_memory, "_NETWORK", tmp_path)
    memory_domain.cache_clear()
    assert len(memory_domain()) == 32 and memory_domain() != own
    monkeypatch.setattr(payload_memory, "_NETWORK", tmp_path / "missing")
    memory_domain.cache_clear()
    assert memory_domain() == ""
    memory_domain.cache_clear()


def test_the_host_id_is_of_this_boot_and_does_not_show_it() -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len(host_id()) == 32
    assert boot_id.replace("-", "") != host_id()


@pytest.mark.parametrize("size_bytes", [1, LIMIT])
async def test_a_taken_payload_is_read_only(size_bytes: int) -> None:
    async with hop() as to, opened(to) as sender:
        payload = await to.receiver.take(await passed(sender, bytes(size_bytes)))
        with pytest.raises(TypeError, match="read-only"):
            memoryview(payload.data)[:1] = b"x"  # type: ignore[index]


async def test_a_payload_in_a_lent_slot_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hop() as to, opened(to) as sender:
        lent = sender.lend(1)
        assert lent is not None and len(lent) >= LIMIT
        lent[:LIMIT] = os.urandom(LIMIT)
        with monkeypatch.context() as patch:
            patch.setattr(shared_segment, "copy_hashed", None)
            notice = await passed(sender, lent[:LIMIT])
        assert notice.checksum == shared_segment.hashed(lent[:LIMIT])
        assert (await to.receiver.take(notice)).data == bytes(lent[:LIMIT])


async def test_a_lent_slot_is_free_when_it_is_returned_and_not_referenced() -> None:
    async with hop() as to, opened(to) as sender:
        for is_referenced_longer in (True, False):
            lent = sender.lend(1)
            assert lent is not None and len(sender._free) == NUM_HOP_SLOTS - 1
            payload = await to.receiver.take(await passed(sender, lent[:LIMIT]))
            if is_referenced_longer:
                del payload
                await until(lambda: not sender._written)
                assert len(sender._free) == NUM_HOP_SLOTS - 1
                del lent
            else:
                del lent
                await until(lambda: not sender._lent)
                assert len(sender._free) == NUM_HOP_SLOTS - 1
                del payload
            await until(lambda: len(sender._free) == NUM_HOP_SLOTS)


async def test_a_slot_that_was_lent_for_nothing_is_free_again() -> None:
    async with hop() as to, opened(to) as sender:
        lent = [sender.lend(1) for _ in range(NUM_HOP_SLOTS)]
        assert sender.lend(1) is None
        waiting = asyncio.create_task(sender.send(b"x"))
        await asyncio.sleep(0)
        await asyncio.to_thread(lent.pop)
        notice = await asyncio.wait_for(waiting, DEADLINE_S)
        assert notice is not None
        assert (await to.receiver.take(notice)).data == b"x"


async def test_a_part_of_a_lent_slot_and_a_second_payload_of_it_are_copied() -> None:
    async with hop() as to, opened(to) as sender:
        lent = sender.lend(1)
        assert lent is not None
        lent[:8] = b"01234567"
        notices = [await passed(sender, part) for part in (lent[1:8], lent[:4], lent[:5])]
        for expected, notice in zip((b"1234567", b"0123", b"01234"), notices, strict=True):
            assert (await to.receiver.take(notice)).data == expected


async def test_a_broken_hop_lends_nothing() -> None:
    async with hop() as to, opened(to) as sender:
        assert sender.lend(1) is not None
        to.listener.forget(to.receiver)
        await until(lambda: sender._broken != "")
        assert sender.lend(1) is None
