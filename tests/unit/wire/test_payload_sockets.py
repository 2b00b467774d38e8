"""Connections of payloads, over TCP on this machine."""

import asyncio
import gc
import os
import socket
import ssl
import threading
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import xxhash

from tests.unit.wire.payload_hops import (
    DEADLINE_S,
    EPOCH,
    SECRET,
    SocketHop,
    closing,
    opening,
    threads,
    until,
)
from wire import payload_sockets, payloads
from wire.addresses import Address
from wire.errors import StepFault, StepFaultKind
from wire.payload_sockets import (
    MAX_PER_HOST,
    MAX_UNTAKEN,
    BufferPool,
    PayloadListener,
    PayloadSender,
)
from wire.payloads import PayloadKey, PayloadNotice, encode_header
from wire.peer_secrets import RefusedPeers

CERTIFICATE = Path(__file__).parents[2] / "data" / "localhost.pem"
LIMIT = SocketHop.limit


def hop(tls: ssl.SSLContext | None = None) -> AbstractAsyncContextManager[SocketHop]:
    return closing(SocketHop(tls))


def opened(to: SocketHop, tls: ssl.SSLContext | None = None) -> AbstractAsyncContextManager[PayloadSender]:
    return opening(PayloadSender(to.address, to.key, tls))


async def test_payloads_travel_over_tls() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(CERTIFICATE)
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    data = os.urandom(LIMIT - 5)
    async with hop(serving) as to, opened(to, trusting) as sender:
        assert (await to.receiver.inbox.take(await sender.send(data))).data == data
    assert to.num_refused == 0


async def test_a_plain_sender_is_refused_by_a_listener_with_tls() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(CERTIFICATE)
    async with hop(serving) as to:
        with pytest.raises(ConnectionError):
            async with opened(to):
                pass
        await until(lambda: to.num_refused == 1)


async def test_buffers_are_reused_only_when_nothing_refers_to_them() -> None:
    pool = BufferPool(100)
    first = pool.lease(10)
    first[:] = b"a" * 10
    kept = first[2:4].toreadonly()
    del first
    second = pool.lease(100)
    second[:] = b"b" * 100
    assert kept == b"aa"
    del kept
    again = pool.lease(10)
    assert again == b"a" * 10, "the memory of the first one"
    assert second == b"b" * 100


async def test_received_payloads_share_a_buffer_once_released() -> None:
    async with hop() as to, opened(to) as sender:
        addresses = []
        for _ in range(4):
            payload = await to.receiver.inbox.take(await sender.send(b"x" * 100))
            addresses.append(_address(payload.data))
            del payload
            gc.collect()
        # The receiver may lease the next buffer before the previous payload is released.
        assert len(set(addresses)) <= 2


async def test_a_hop_has_as_many_buffers_as_payloads_at_once() -> None:
    async with hop() as to, opened(to) as sender:
        before = _mapped_kib()
        for _ in range(6):
            held = [await to.receiver.inbox.take(await sender.send(b"x" * LIMIT)) for _ in range(2)]
            # The receiver holds a third one until its callback is done.
            assert _mapped_kib() <= before + 3 * LIMIT // 1024
            del held


@pytest.mark.parametrize("has_tls", [False, True])
async def test_an_idle_hop_returns_its_buffers(monkeypatch: pytest.MonkeyPatch, has_tls: bool) -> None:
    monkeypatch.setattr(payload_sockets, "IDLE_S", 0.2)
    serving = trusting = None
    if has_tls:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(CERTIFICATE)
        trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with hop(serving) as to, opened(to, trusting) as sender:
        before = _mapped_kib()
        for _ in range(3):
            payload = await to.receiver.inbox.take(await sender.send(b"x" * LIMIT))
            assert _mapped_kib() >= before + LIMIT // 1024
            del payload
            await until(lambda: _mapped_kib() < before + LIMIT // 1024)


def _mapped_kib() -> int:
    """Size of the anonymous shared mappings of this process: the buffers."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "/dev/zero" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges) // 1024


async def test_nothing_more_is_received_while_payloads_wait_for_their_frames() -> None:
    data = os.urandom(LIMIT)
    async with hop() as to, opened(to) as sender:
        sending = asyncio.create_task(_send_many(sender, data, 40))
        await until(lambda: len(to.receiver.inbox._arrived) == MAX_UNTAKEN)
        await asyncio.sleep(0.05)
        assert len(to.receiver.inbox._arrived) == MAX_UNTAKEN and not sending.done()
        checksum = xxhash.xxh3_64_intdigest(data)
        for number in range(1, 41):
            await to.receiver.inbox.take(PayloadNotice(number, LIMIT, checksum))
        await sending


async def test_single_bytes_do_not_extend_the_time_to_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_sockets, "GREETING_TIMEOUT_S", 0.3)
    async with hop() as to:
        with to.connect() as slow:
            slow.settimeout(0.05)
            for _ in range(len(to.key.greeting()) - 1):
                try:
                    slow.sendall(b"x")
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("the connection outlived the time to greet")
        await until(lambda: to.num_refused == 1)


async def test_a_sender_to_a_port_without_a_listener_is_refused() -> None:
    with pytest.raises(ConnectionError, match="refused"):
        await PayloadSender(Address("127.0.0.1", silent_port()), PayloadKey(EPOCH, SECRET, b"t" * 16)).open()


@pytest.mark.parametrize("host", ["gpu..a", "a" * 64])
async def test_a_name_that_no_host_can_have_is_an_error_at_once(host: str) -> None:
    with pytest.raises(ConnectionError, match="label"):
        async with asyncio.timeout(DEADLINE_S):
            await PayloadSender(Address(host, 1), PayloadKey(EPOCH, SECRET, b"t" * 16)).open()


async def test_a_slow_resolution_of_the_name_does_not_extend_the_time_to_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload_sockets, "GREETING_TIMEOUT_S", 0.2)
    is_resolved = threading.Event()

    def resolve(address: object, timeout: float) -> socket.socket:
        assert is_resolved.wait(DEADLINE_S)
        raise OSError("name or service not known")

    monkeypatch.setattr(socket, "create_connection", resolve)
    sender = PayloadSender(Address("gpu-a", 1), PayloadKey(EPOCH, SECRET, b"t" * 16))
    try:
        with pytest.raises(ConnectionError, match="timed out"):
            async with asyncio.timeout(DEADLINE_S):
                await sender.open()
    finally:
        is_resolved.set()
    await until(lambda: not threads())


def silent_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("header", "kind"),
    [(encode_header(2, 3), StepFaultKind.UNDECODABLE), (encode_header(1, LIMIT + 1), StepFaultKind.SHAPE)],
    ids=["number", "size"],
)
async def test_a_damaged_header_is_a_fault_at_once(header: bytes, kind: StepFaultKind) -> None:
    async with hop() as to:
        with to.connect() as connection:
            connection.sendall(to.key.greeting() + header)
            fault = await asyncio.wait_for(to.receiver.inbox.damaged, DEADLINE_S)
        assert fault.kind is kind


async def test_an_early_end_is_a_fault_of_the_frame_that_waits() -> None:
    async with hop() as to:
        with to.connect() as connection:
            connection.sendall(to.key.greeting() + encode_header(1, 100) + b"x" * 99)
        with pytest.raises(StepFault) as raised:
            await to.receiver.inbox.take(PayloadNotice(1, 100, 0))
        assert raised.value.kind is StepFaultKind.NEIGHBOUR
        assert not to.receiver.inbox.damaged.done()


async def test_a_payload_that_stops_on_its_way_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_TIMEOUT_S", 0.1)
    async with hop() as to:
        with to.connect() as connection:
            connection.sendall(to.key.greeting() + encode_header(1, 100) + b"x" * 99)
            with pytest.raises(StepFault, match="no byte for"):
                await to.receiver.inbox.take(PayloadNotice(1, 100, 0))


async def test_a_broken_connection_fails_the_payload_that_is_sent_and_later_ones() -> None:
    async with hop() as to, opened(to) as sender:
        to.listener.forget(to.receiver)
        with pytest.raises(ConnectionError):
            await _send_many(sender, os.urandom(LIMIT), 20)
        await sender.failed
        with pytest.raises(ConnectionError):
            await sender.send(b"x")


async def test_a_payload_ordered_before_the_end_is_known_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hop() as to, opened(to) as sender:
        assert sender._connection is not None
        has_returned = threading.Event()

        def send(data: bytes) -> None:
            if data == b"x":  # the only piece, whose notice is out
                assert has_returned.wait(DEADLINE_S)
                raise OSError("Connection reset by peer")

        monkeypatch.setattr(sender._connection, "send", send)
        await sender.send(b"x")
        has_returned.set()
        sender._thread.join(DEADLINE_S)  # the event loop does not see the failure before the next send
        assert not sender.failed.done()
        with pytest.raises(ConnectionError, match="reset"):
            async with asyncio.timeout(DEADLINE_S):
                await sender.send(b"x")


async def test_closing_ends_a_send_that_the_receiver_does_not_take() -> None:
    async with hop() as to:
        async with opened(to) as sender:
            sending = asyncio.create_task(_send_many(sender, os.urandom(LIMIT), 40))
            await until(lambda: len(to.receiver.inbox._arrived) == MAX_UNTAKEN)
        with pytest.raises(ConnectionError):
            await sending


async def test_a_send_after_the_close_is_an_error() -> None:
    async with hop() as to, opened(to) as sender:
        await to.receiver.inbox.take(await sender.send(b"abc"))
        sender.close()
        with pytest.raises(ConnectionError, match="was closed"):
            async with asyncio.timeout(DEADLINE_S):
                await sender.send(b"x")


@pytest.mark.parametrize("offered", [Address("10.0.0.7", 0), Address("", 7499), Address("10.0.0.7", 7499)])
async def test_the_offer_has_what_senders_are_to_dial(offered: Address) -> None:
    listener = PayloadListener(RefusedPeers(time.monotonic))
    listener.listen(address := Address("127.0.0.1", silent_port()), offered=offered)
    receiver = listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=LIMIT)
    listener.close()
    assert receiver is not None
    assert (receiver.offer.host, receiver.offer.port) == (offered.host, offered.port or address.port)


async def _send_many(sender: PayloadSender, data: bytes, num_payloads: int) -> None:
    for _ in range(num_payloads):
        await sender.send(data)


def _address(data: object) -> int:
    import numpy as np

    assert isinstance(data, memoryview)
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def without_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the system refuse threads of this name."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


async def test_a_sender_without_a_thread_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hop() as to:
        without_threads(monkeypatch, "payload-sender")
        with pytest.raises(ConnectionError, match="no thread for it: can't start new thread"):
            await PayloadSender(to.address, to.key).open()


async def test_a_listener_without_a_thread_is_not_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch, "payload-listener")
    listener = PayloadListener(RefusedPeers(time.monotonic))
    with pytest.raises(OSError, match="no thread for it: can't start new thread"):
        listener.listen(address := Address("127.0.0.1", silent_port()))
    assert listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=LIMIT) is None
    with socket.socket() as probe:
        assert probe.connect_ex((address.host, address.port)) != 0


async def test_a_connection_without_a_thread_is_refused_and_the_next_one_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hop() as to:
        with monkeypatch.context() as patch:
            without_threads(patch, "payload-receiver")
            for _ in range(MAX_PER_HOST + 1):
                with pytest.raises(ConnectionError, match=r"closed|reset"):
                    await PayloadSender(to.address, to.key).open()
        await until(lambda: to.num_refused == MAX_PER_HOST + 1)
        async with opened(to) as sender:
            assert (await to.receiver.inbox.take(await sender.send(b"abc"))).data == b"abc"


async def test_an_address_in_use_is_an_error_that_names_the_cause_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="Address already in use") as raised:
            PayloadListener(RefusedPeers(time.monotonic)).listen(address)
    assert raised.value.strerror == "Address already in use"
