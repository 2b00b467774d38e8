"""Connections of payloads: a listener per worker, and one thread per connection at either end.

The threads move and hash bytes without the interpreter's lock, and pass the event loop one callback per
payload. Neither end has a time limit for a payload that the other end is slow to take: the deadline of the
step covers it, as on the gRPC stream.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import queue
import select
import socket
import ssl
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import xxhash

from wire.addresses import Address, counted_host
from wire.errors import StepFault
from wire.payloads import (
    GREETING_BYTES,
    GREETING_TIMEOUT_S,
    HEADER_BYTES,
    MAX_GREETINGS,
    PROOF_BYTES,
    ArrivedPayload,
    Bytes,
    OfferPause,
    PayloadInbox,
    PayloadKey,
    PayloadNotice,
    PayloadOffer,
    decode_header,
    encode_header,
    new_ticket,
    ticket_of,
)
from wire.peer_secrets import RefusedPeers

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 2 * 1024 * 1024
MIN_PIECE_BYTES = 128 * 1024
PIECES = 8
"""Pieces in which a payload is moved and hashed, within the limits: both ends work at the same time, and a
piece is in the processor's cache when it is hashed.
"""
MAX_PER_HOST = 4
"""As MAX_GREETINGS, from one host."""
MAX_UNTAKEN = 4
"""Complete payloads that wait for their frames; then nothing more is received."""
_ACCEPT_RETRY_S = 0.05
KEPT_BUFFERS = 4
"""Buffers kept for reuse per hop; more exist while steps hold more payloads."""
IDLE_S = 1.0
"""Time without a payload after which the kept buffers are returned to the system."""


_CLOSED = "the connection was closed"


class _Ended(Exception):
    """The peer closed the connection."""


class BufferPool:
    """Buffers of one size for received payloads, each reused once nothing refers to its last payload."""

    def __init__(self, size_bytes: int) -> None:
        self._type = ctypes.c_ubyte * size_bytes
        # Finalizers run in any thread and within any other call: of the queues, only this one allows it.
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def lease(self, size_bytes: int) -> memoryview:
        """Writable memory, which returns to the pool when the view and all views of it are gone."""
        try:
            memory = self._free.get_nowait()
        except queue.Empty:
            memory = mmap.mmap(-1, ctypes.sizeof(self._type))
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        owner = self._type.from_buffer(memory)
        weakref.finalize(owner, self._release, memory)
        return memoryview(owner).cast("B")[:size_bytes]

    def clear(self) -> None:
        """Return the kept buffers to the system."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait()

    def _release(self, memory: mmap.mmap) -> None:
        if self._free.qsize() < KEPT_BUFFERS:
            self._free.put(memory)


class _Connection:
    """A blocking socket, with or without TLS, that another thread may end."""

    def __init__(self, plain: socket.socket) -> None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain
        self._flags: int = socket.MSG_WAITALL

    def start_tls(self, context: ssl.SSLContext, *, server_name: str | None) -> None:
        """Shake hands. Raises OSError."""
        self._socket = context.wrap_socket(
            self._socket, server_side=server_name is None, server_hostname=server_name
        )
        self._flags = 0

    def is_readable_within(self, timeout_s: float) -> bool:
        """Wait for bytes or the end of the connection."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def set_deadline(self, at_s: float | None) -> None:
        """Limit the next calls. Raises TimeoutError when the deadline has passed."""
        if at_s is None:
            self._socket.settimeout(None)
        elif (left_s := at_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
        else:
            raise TimeoutError("timed out")

    def send(self, data: Bytes) -> None:
        self._socket.sendall(data)

    def fill(self, buffer: memoryview, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Receive exactly as many bytes as fit. Raises _Ended or OSError."""
        received = 0
        while received < len(buffer):
            count = self._socket.recv_into(buffer[received:], 0, self._flags)
            if not count:
                raise _Ended
            on_bytes(count)
            received += count

    def wake_at(self, num_bytes: int) -> None:
        """Wake the receiving thread when `num_bytes` have arrived; with TLS, at any number.

        By default the kernel wakes it for each segment, which takes longer than to copy it.
        """
        if self._flags:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def fill_by(self, buffer: memoryview, deadline_s: float) -> None:
        """As `fill`, until a moment: a peer that sends single bytes cannot extend it."""
        received = 0
        while received < len(buffer):
            self.set_deadline(deadline_s)
            count = self._socket.recv_into(buffer[received:])
            if not count:
                raise _Ended
            received += count

    def end(self) -> None:
        """End both directions, which ends calls of other threads; `close` frees the descriptor."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


class PayloadSender:
    """The sending end of one connection, and its thread."""

    def __init__(self, address: Address, key: PayloadKey, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.address = address
        self._key = key
        self._tls = tls
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        """Set, with the reason, when the connection breaks after it was open."""
        self._unnoticed: set[asyncio.Future[PayloadNotice]] = set()
        self._is_closed = False
        self._connection: _Connection | None = None
        self._orders: queue.SimpleQueue[tuple[Bytes, asyncio.Future[PayloadNotice]] | None]
        self._orders = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="payload-sender", daemon=True)

    async def open(self) -> None:
        """Connect and greet. Raises ConnectionError with the reason.

        The thread has no limit of its own for the resolution of a name, and one per address of the name.
        """
        if problem := _start(self._thread):
            raise ConnectionError(problem)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._opened
        except TimeoutError:
            self.close()
            raise ConnectionError("timed out") from None

    async def send(self, data: Bytes) -> PayloadNotice:
        """Send one payload; returns with its notice when the last piece is about to leave.

        Raises ConnectionError when the connection is broken or closed, also by `close` meanwhile. `data`
        must not change until the next call returns.
        """
        if self.failed.done():
            raise ConnectionError(self.failed.result())
        if self._is_closed:
            raise ConnectionError(_CLOSED)
        noticed: asyncio.Future[PayloadNotice] = self._loop.create_future()
        self._unnoticed.add(noticed)
        noticed.add_done_callback(self._unnoticed.discard)
        self._orders.put((data, noticed))
        return await noticed

    def close(self) -> None:
        """End the connection and fail calls of `send`; its thread ends by itself. Idempotent."""
        self._is_closed = True
        self._orders.put(None)
        if self._connection is not None:
            self._connection.end()
        for noticed in tuple(self._unnoticed):
            _fail(noticed, _CLOSED)

    def _run(self) -> None:
        try:
            connection = self._connect()
        except (OSError, ValueError, _Ended) as error:  # ValueError: no host has such a name
            self._tell(_fail, self._opened, _reason(error))
            return
        try:
            self._tell(_settle, self._opened, None)
            self._send_all(connection)
        finally:
            connection.close()

    def _connect(self) -> _Connection:
        address = self.address
        deadline_s = time.monotonic() + GREETING_TIMEOUT_S
        plain = socket.create_connection((address.host, address.port), timeout=GREETING_TIMEOUT_S)
        connection = self._connection = _Connection(plain)
        try:
            connection.set_deadline(deadline_s)
            if self._tls is not None:
                connection.start_tls(self._tls, server_name=address.host)
            connection.send(self._key.greeting())
            answer = memoryview(bytearray(PROOF_BYTES))
            connection.fill_by(answer, deadline_s)
            if not self._key.is_answer(bytes(answer)):
                raise ConnectionError("another process is at the address")
            connection.set_deadline(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _send_all(self, connection: _Connection) -> None:
        number = 0
        while (order := self._orders.get()) is not None:
            data, noticed = order
            number += 1
            try:
                self._send_one(connection, number, memoryview(data).cast("B"), noticed)
            except OSError as error:
                self._tell(self._fail_open, _reason(error))
                return
            del data, order

    def _send_one(
        self, connection: _Connection, number: int, data: memoryview, noticed: asyncio.Future[PayloadNotice]
    ) -> None:
        connection.send(encode_header(number, len(data)))
        digest, step = xxhash.xxh3_64(), _piece_bytes(len(data))
        for begin in range(0, len(data), step):
            piece = data[begin : begin + step]
            digest.update(piece)
            if begin + step >= len(data):
                self._tell(_settle, noticed, PayloadNotice(number, len(data), digest.intdigest()))
            connection.send(piece)

    def _fail_open(self, reason: str) -> None:
        """The connection broke: fail all orders, also those after the end of the thread."""
        _settle(self.failed, reason)
        for noticed in tuple(self._unnoticed):
            _fail(noticed, reason)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the event loop, unless it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


class PayloadReceiver:
    """The receiving end of one hop and epoch: expects one connection, then receives its payloads."""

    def __init__(self, key: PayloadKey, offer: PayloadOffer, *, max_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.key = key
        self.offer = offer
        self.inbox = PayloadInbox(progress=lambda: self._num_bytes, on_taken=self._note_taken)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._untaken = threading.Semaphore(MAX_UNTAKEN)
        self._connection: _Connection | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """The expected sender has connected."""
        return self._connection is not None

    def close(self) -> None:
        """End the connection; its thread ends by itself. Idempotent."""
        self._is_closed = True
        self._untaken.release()
        if self._connection is not None:
            self._connection.end()

    def receive(self, connection: _Connection) -> None:
        """Receive payloads until the connection ends; runs in the connection's thread."""
        self._connection = connection
        reason = "the sender closed the payload connection"
        try:
            if not self._is_closed:
                connection.send(self.key.answer())
                self._receive_all(connection)
        except StepFault as fault:
            self._tell(self.inbox.fail, fault)
        except _Ended:
            pass
        except OSError as error:
            reason = f"the payload connection broke: {_reason(error)}"
        self._tell(self.inbox.end, reason)

    def _receive_all(self, connection: _Connection) -> None:
        pool = BufferPool(self._max_bytes)
        header = memoryview(bytearray(HEADER_BYTES))
        number = 0
        while self._untaken.acquire() and not self._is_closed:
            number += 1
            if not connection.is_readable_within(IDLE_S):
                pool.clear()
            connection.fill(header)
            began_s = time.monotonic()
            size_bytes = decode_header(bytes(header), number=number, max_bytes=self._max_bytes)
            payload = self._receive_one(connection, number, pool.lease(size_bytes), began_s)
            self._tell(self.inbox.arrived, payload)
            del payload

    def _receive_one(
        self, connection: _Connection, number: int, buffer: memoryview, began_s: float
    ) -> ArrivedPayload:
        digest, step = xxhash.xxh3_64(), _piece_bytes(len(buffer))
        for begin in range(0, len(buffer), step):
            piece = buffer[begin : begin + step]
            # As many bytes must be to come when all but one of this piece are there.
            connection.wake_at(step if len(buffer) - begin >= 2 * step else 1)
            connection.fill(piece, self._count)
            digest.update(piece)
        notice = PayloadNotice(number, len(buffer), digest.intdigest())
        return ArrivedPayload(notice, buffer.toreadonly(), began_s)

    def _count(self, count: int) -> None:
        self._num_bytes += count

    def _note_taken(self) -> None:
        self._untaken.release()

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


class _Greetings:
    """Connections that greet, limited in number; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_host = Counter[str]()
        self._connections: set[_Connection] = set()

    def add(self, connection: _Connection, host: str) -> str:
        """Return why the connection is one too many, or "" after recording it."""
        host = counted_host(host)
        with self._lock:
            if self._by_host[host] >= MAX_PER_HOST:
                return (
                    f"{MAX_PER_HOST} connections of this host have not greeted, the limit is {MAX_PER_HOST}"
                )
            if len(self._connections) >= MAX_GREETINGS:
                return f"{MAX_GREETINGS} connections have not greeted, the limit is {MAX_GREETINGS}"
            self._by_host[host] += 1
            self._connections.add(connection)
            return ""

    def remove(self, connection: _Connection, host: str) -> None:
        host = counted_host(host)
        with self._lock:
            self._connections.discard(connection)
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def end_all(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.end()


_AS_BOUND = Address("", 0)


class PayloadListener:
    """Accepts payload connections of a worker on one port and passes each to the hop that expects it.

    Other connections are refused, counted and logged as `RefusedPeers` does.
    """

    def __init__(
        self, refused: RefusedPeers, tls: Callable[[], ssl.SSLContext | None] = lambda: None
    ) -> None:
        """`tls` is asked for each connection; None for plain text."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refused = refused
        self._tls = tls
        self._pause = OfferPause("hidden states travel over gRPC")
        self._listening: socket.socket | None = None
        self._offered = _AS_BOUND
        self._expected: dict[bytes, PayloadReceiver] = {}
        self._greetings = _Greetings()

    def listen(self, address: Address, *, offered: Address = _AS_BOUND) -> None:
        """Bind and accept. Raises OSError.

        Senders dial `offered`: without a host the one at which they reached the stage, with port 0 the
        bound port.
        """
        self._loop = asyncio.get_running_loop()
        listening = self._listening = _bound(address)
        self._offered = Address(offered.host, offered.port or listening.getsockname()[1])
        accepting = threading.Thread(
            target=self._accept_all, args=(listening,), name="payload-listener", daemon=True
        )
        if problem := _start(accepting):
            self.close()
            raise OSError(errno.EAGAIN, problem)

    def expect(self, *, epoch: int, secret: bytes, max_bytes: int) -> PayloadReceiver | None:
        """Expect one connection of this hop until it is forgotten; None without a port or when suspended."""
        if self._listening is None or self.reason_to_wait:
            return None
        key = PayloadKey(epoch, secret, new_ticket())
        offer = PayloadOffer(self._offered.host, self._offered.port, key.ticket)
        receiver = self._expected[key.ticket] = PayloadReceiver(key, offer, max_bytes=max_bytes)
        return receiver

    @property
    def reason_to_wait(self) -> str:
        """Why no connection is expected now, after `suspend`; empty otherwise."""
        return self._pause.reason

    def suspend(self) -> None:
        """Expect no connection for a while, after a fault of one. Idempotent."""
        self._pause.begin()

    def forget(self, receiver: PayloadReceiver) -> None:
        """End the receiver's connection, or expect none any longer. Idempotent."""
        self._expected.pop(receiver.key.ticket, None)
        receiver.close()

    def close(self) -> None:
        """Close the port and all connections without a receiver. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self._greetings.end_all()

    def _accept_all(self, listening: socket.socket) -> None:
        while self._listening is listening:
            try:
                plain, peer = listening.accept()
            except OSError:
                time.sleep(_ACCEPT_RETRY_S)  # out of file descriptors, or closed
                continue
            host, connection = peer[0], _Connection(plain)
            if problem := self._greetings.add(connection, host):
                connection.close()
                self._note(problem, host)
                continue
            serving = threading.Thread(
                target=self._serve, args=(connection, host), name="payload-receiver", daemon=True
            )
            if problem := _start(serving):
                self._greetings.remove(connection, host)
                connection.close()
                self._note(problem, host)

    def _serve(self, connection: _Connection, host: str) -> None:
        receiver, problem = None, "no valid greeting"
        try:
            receiver = self._greeted(connection)
        except _Ended:
            problem = "the connection ended before its greeting"
        except OSError as error:
            problem = f"no greeting: {_reason(error)}"
        finally:
            self._greetings.remove(connection, host)
        if receiver is not None:
            receiver.receive(connection)
        elif self._listening is not None:
            self._note(problem, host)
        connection.close()

    def _greeted(self, connection: _Connection) -> PayloadReceiver | None:
        """The receiver that expects this connection, which is then no longer expected."""
        deadline_s = time.monotonic() + GREETING_TIMEOUT_S
        connection.set_deadline(deadline_s)
        if (tls := self._tls()) is not None:
            connection.start_tls(tls, server_name=None)
        buffer = memoryview(bytearray(GREETING_BYTES))
        connection.fill_by(buffer, deadline_s)
        connection.set_deadline(None)
        greeting = bytes(buffer)
        receiver = self._expected.get(ticket_of(greeting))
        if receiver is None or not receiver.key.is_greeting(greeting):
            return None
        return self._expected.pop(receiver.key.ticket, None)

    def _note(self, problem: str, host: str) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(
                lambda: self._refused.note("a payload connection", problem, host=host)
            )


def _start(thread: threading.Thread) -> str:
    """Start a thread; return why the system started none, or ""."""
    try:
        thread.start()
    except RuntimeError as error:
        return f"no thread for it: {error}"
    return ""


def _piece_bytes(size_bytes: int) -> int:
    return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, size_bytes // PIECES))


def _bound(address: Address) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, sockaddr = found[0]
    is_dual = sockaddr[0] == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            sockaddr[:2], family=family, backlog=MAX_GREETINGS, dualstack_ipv6=is_dual
        )
    except OSError as error:
        # create_server appends the address to the system's text.
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None


def _reason(error: OSError | ValueError | _Ended) -> str:
    if isinstance(error, _Ended):
        return _CLOSED
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(ConnectionError(reason))
