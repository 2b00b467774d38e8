"""Payloads of a hop in memory that its two processes share, where they run on one host.

The sender creates a segment of slots (memfd), seals its size, and passes it with its greeting over a Unix
socket. It writes a payload into a free slot; the frame on the gRPC stream names the payload, and
decides order and contents. The receiver uses the payload where it is, or copies it, and returns the slot by a
message on the socket. A segment has no name: the kernel frees it with the last of the two processes, however
they end.
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from wire.errors import StepFault, StepFaultKind
from wire.payload_sockets import BufferPool
from wire.payloads import (
    GREETING_BYTES,
    GREETING_TIMEOUT_S,
    MAX_GREETINGS,
    PROOF_BYTES,
    ArrivedPayload,
    Bytes,
    OfferPause,
    PayloadKey,
    PayloadNotice,
    check_payload,
    new_ticket,
    ticket_of,
)
from wire.peer_secrets import RefusedPeers
from wire.shared_segment import PageLocker, SharedSegment, bytes_of, copy_hashed, hashed, new_segment
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS, PAGE_BYTES, hop_slot_bytes

log = logging.getLogger(__name__)

MAX_HELD = 4
"""Payloads that a receiver uses where they are; others are copied, so that their slots are returned."""
MAX_UNRETURNED = NUM_HOP_SLOTS - MAX_HELD
"""Small payloads that were copied and are returned in one message, which wakes the sender once."""
INLINE_BYTES = 128 * 1024
"""Larger payloads are moved in a thread: to wake one takes as long as to copy these."""

ACCEPT_RETRY_S = 0.05
"""Pause without file descriptors."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_RETURNED = struct.Struct("<Q")
_MAX_MESSAGE_BYTES = PROOF_BYTES + 1
_PEER = struct.Struct("3i")
_CLOSED = "the connection was closed"

T = TypeVar("T")


@cache
def host_id() -> str:
    """The same in all processes under this kernel since it started; empty where the system tells no such id.

    Equal ids make it likely that two processes can share memory; a passed segment proves it.
    """
    try:
        boot_id = _BOOT_ID.read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"stageline host " + boot_id).hexdigest()[:32]


@cache
def memory_domain() -> str:
    """The same in all processes that can reach each other's sockets: `host_id` and network namespace."""
    try:
        network = _NETWORK.stat().st_ino
    except OSError:
        return ""
    return hashlib.sha256(f"stageline memory {host_id()} {network}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """Where a stage takes the segment of one hop and epoch, valid for one connection."""

    host_id: str
    socket: str
    ticket: bytes = field(repr=False)
    slot_bytes: int


class _Mover:
    """Copies and hashes payloads: small ones at once, large ones in a thread, while the event loop runs."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, size_bytes: int, move: Callable[[], T]) -> T:
        if size_bytes <= INLINE_BYTES:
            return move()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="payload-memory")
        return await asyncio.get_running_loop().run_in_executor(self._thread, move)

    def end(self) -> None:
        """Let the thread end by itself. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


class MemorySender:
    """The sending end of one hop and epoch."""

    def __init__(self, offer: MemoryOffer, key: PayloadKey) -> None:
        self.offer = offer
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._segment: SharedSegment | None = None
        self._mover = _Mover()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._num_sent = 0
        self._free = list(range(NUM_HOP_SLOTS))
        self._written: dict[int, int] = {}
        self._lent: set[int] = set()
        self._broken = ""
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Pass the segment on. Raises ConnectionError with the reason."""
        try:
            self._connect()
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._opened
        except TimeoutError:
            self.close()
            raise ConnectionError("timed out") from None
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise ConnectionError(_reason(error)) from None

    async def lock(self, locker: PageLocker) -> None:
        """Page-lock the segment. Raises OSError with the reason; the segment can be used all the same."""
        if self._segment is not None:
            await locker.lock(self._segment.memory)

    def lend(self) -> memoryview | None:
        """Room for the next payload in a free slot, None without one; called on any thread.

        The slot is not used for another payload while the memory is referenced. `send` of bytes from its
        begin on copies nothing.
        """
        segment = self._segment
        if self._broken or segment is None:
            return None
        try:
            index = self._free.pop()
        except IndexError:
            return None
        self._lent.add(index)
        slot = segment.open(index)
        weakref.finalize(slot, self._end_loan_later, index).atexit = False
        return bytes_of(slot, self.offer.slot_bytes - HOP_DATA_OFFSET)

    async def send(self, data: Bytes) -> PayloadNotice | None:
        """Write one payload into its slot, as soon as that is free; None if the payload is too large.

        Raises ConnectionError when the receiver has gone.
        """
        payload = memoryview(data).cast("B")
        size_bytes = payload.nbytes
        if size_bytes > self.offer.slot_bytes - HOP_DATA_OFFSET:
            return None
        self._num_sent += 1
        epoch, number = self._key.epoch, self._num_sent
        segment = self._segment
        slot = None if segment is None else segment.slot_of(payload)
        is_there = slot in self._lent and slot not in self._written.values()
        if slot is None or not is_there:
            slot = await self._free_slot()
        segment = self._segment
        if self._broken or segment is None:
            raise ConnectionError(self._broken or _CLOSED)
        self._written[number] = slot
        checksum = await self._mover.run(
            size_bytes,
            lambda: (
                segment.seal(slot, epoch, number, size_bytes)
                if is_there
                else segment.write(slot, epoch, number, payload)
            ),
        )
        return PayloadNotice(number, size_bytes, checksum)

    async def _free_slot(self) -> int:
        """Wait for a slot. Raises ConnectionError."""
        while not self._broken:
            with contextlib.suppress(IndexError):
                # The last one that was returned is most likely in the processor's cache.
                return self._free.pop()
            self._changed.clear()
            await self._changed.wait()
        raise ConnectionError(self._broken)

    def close(self) -> None:
        """End the connection and fail calls of `send`. Idempotent."""
        self._break(_CLOSED)
        self._segment = None
        self._mover.end()

    def _connect(self) -> None:
        connection = self._socket = _new_socket()
        connection.connect(_address(self.offer.socket))
        _check_user(connection, "the next stage")
        descriptor = new_segment(self.offer.slot_bytes)
        try:
            self._segment = SharedSegment(descriptor, self.offer.slot_bytes)
            socket.send_fds(connection, [self._key.greeting()], [descriptor])
        finally:
            os.close(descriptor)
        self._loop.add_reader(connection, self._receive)

    def _receive(self) -> None:
        connection = self._socket
        assert connection is not None, "a closed socket has no reader"
        try:
            while True:
                self._take_message(connection.recv(_MAX_MESSAGE_BYTES))
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(_reason(error))

    def _take_message(self, message: bytes) -> None:
        """Raises ConnectionError for what no receiver sends."""
        if not message:
            raise ConnectionError(_CLOSED)
        if not self._opened.done():
            if not self._key.is_answer(message):
                raise ConnectionError("another process is at the socket")
            self._opened.set_result(None)
            return
        if len(message) % _RETURNED.size:
            raise ConnectionError(f"the receiver sent {len(message)} bytes, which are no numbers")
        for (number,) in _RETURNED.iter_unpack(message):
            slot = self._written.pop(number, None)
            if slot is None:
                raise ConnectionError(f"the receiver returned payload {number}, which it does not have")
            self._free_unless_lent(slot)

    def _free_unless_lent(self, slot: int) -> None:
        if slot not in self._lent:
            self._free.append(slot)
            self._changed.set()

    def _end_loan_later(self, slot: int) -> None:
        """Nothing refers to a slot that was lent; called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the sender with it
            self._loop.call_soon_threadsafe(self._end_loan, slot)

    def _end_loan(self, slot: int) -> None:
        self._lent.discard(slot)
        if slot not in self._written.values():
            self._free_unless_lent(slot)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        connection, self._socket = self._socket, None
        if connection is not None:
            self._loop.remove_reader(connection)
            connection.close()
        if not self._opened.done():
            self._opened.set_exception(ConnectionError(reason))
            self._opened.exception()  # nobody may wait for it
        self._changed.set()


class MemoryReceiver:
    """The receiving end of one hop and epoch: expects one segment, then takes the payloads in it."""

    def __init__(
        self, key: PayloadKey, offer: MemoryOffer, *, max_bytes: int, locker: PageLocker | None = None
    ) -> None:
        """With `locker`, the segment is page-locked from soon after its arrival on."""
        self._loop = asyncio.get_running_loop()
        self.key = key
        self.offer = offer
        self.lock_problem = ""
        """Why the segment is not page-locked, although it should be."""
        self._locker = locker
        self._max_bytes = max_bytes
        self._socket: socket.socket | None = None
        self._segment: SharedSegment | None = None
        self._mover = _Mover()
        self._pool = BufferPool(max_bytes)
        self._num_taken = 0
        self._held: set[int] = set()
        self._copied: list[int] = []

    @property
    def is_open(self) -> bool:
        """A sender has passed its segment."""
        return self._segment is not None

    def open(self, connection: socket.socket, segment: SharedSegment) -> None:
        """Use the segment of the sender that proved to know the secret. Raises OSError."""
        connection.send(self.key.answer())
        # Without an answer the sender takes another way, and this end must not count as open.
        self._socket, self._segment = connection, segment
        if self._locker is not None:
            self._locker.lock(segment.memory).add_done_callback(self._note_lock)

    def _note_lock(self, locked: "asyncio.Future[None]") -> None:
        if not locked.cancelled() and (error := locked.exception()) is not None:
            self.lock_problem = f"memory shared with the previous stage is not page-locked: {error}"
            log.warning("hidden states are copied once more: %s", self.lock_problem)

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        """The payload that a frame names; it was written before the frame was sent.

        Raises StepFault: UNDECODABLE for another number than the next one and for a slot that holds another
        payload, SHAPE for another size, CHECKSUM for other contents.
        """
        began_s, number, segment = time.monotonic(), self._num_taken + 1, self._segment
        assert segment is not None, "take before open"
        if notice.number != number:
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"the frame names payload {notice.number}, the next is {number}"
            )
        if not 0 < notice.size_bytes <= self._max_bytes:
            raise StepFault(
                StepFaultKind.SHAPE,
                f"payload {number} has {notice.size_bytes} bytes, the limit is {self._max_bytes}",
            )
        slot = segment.find(self.key.epoch, number, notice.size_bytes)
        data = written = bytes_of(slot, notice.size_bytes)
        stays = notice.size_bytes > INLINE_BYTES and len(self._held) < MAX_HELD
        if not stays:
            data = self._buffer(notice.size_bytes)
        checksum = await self._mover.run(
            notice.size_bytes, lambda: hashed(data) if stays else copy_hashed(data, written)
        )
        segment.find(self.key.epoch, number, notice.size_bytes)  # it was not overwritten meanwhile
        check_payload(PayloadNotice(number, notice.size_bytes, checksum), notice)
        self._num_taken = number
        if stays:
            self._held.add(number)
            weakref.finalize(slot, self._release_later, number).atexit = False
        else:
            self._copied.append(number)
            if len(self._copied) >= MAX_UNRETURNED or notice.size_bytes > INLINE_BYTES:
                self._return(*self._copied)
                self._copied.clear()
        return ArrivedPayload(notice, data.toreadonly(), began_s)

    def close(self) -> None:
        """End the connection. Idempotent. Payloads that were taken stay as they are."""
        connection, self._socket, self._segment = self._socket, None, None
        if connection is not None:
            connection.close()
        self._mover.end()

    def _buffer(self, size_bytes: int) -> memoryview:
        return (
            memoryview(bytearray(size_bytes)) if size_bytes <= INLINE_BYTES else self._pool.lease(size_bytes)
        )

    def _release_later(self, number: int) -> None:
        """Nothing refers to a payload that stayed in its slot; called in any thread."""
        # After the end of the loop there is no sender that waits for the slot.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release, number)

    def _release(self, number: int) -> None:
        self._held.discard(number)
        self._return(number)

    def _return(self, *numbers: int) -> None:
        connection = self._socket
        if connection is not None:
            # A sender that has gone needs no slot; its stream says why.
            with contextlib.suppress(OSError):
                connection.send(b"".join(map(_RETURNED.pack, numbers)))


class MemoryListener:
    """Takes the segments of a worker's senders at one socket, and passes each to the hop that expects it.

    Other connections are refused, counted and logged as `RefusedPeers` does. Used on the event loop only.
    """

    def __init__(self, refused: RefusedPeers, locker: PageLocker | None = None) -> None:
        """With `locker`, segments are page-locked."""
        self._refused, self._locker = refused, locker
        self._pause = OfferPause("hidden states do not travel in shared memory")
        self._name = ""
        self._listening: socket.socket | None = None
        self._expected: dict[bytes, MemoryReceiver] = {}
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}

    @property
    def is_listening(self) -> bool:
        """Memory can be shared with this process."""
        return self._listening is not None

    def listen(self) -> None:
        """Bind and accept. Raises OSError where the system has no such sockets or segments."""
        if not sys.platform.startswith("linux") or not host_id():
            raise OSError(errno.ENOSYS, "it needs Linux with /proc")
        os.close(new_segment(PAGE_BYTES))
        self._name = f"stageline-{secrets.token_hex(8)}"
        listening = _new_socket()
        try:
            listening.bind(_address(self._name))
            listening.listen(MAX_GREETINGS)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept)

    def expect(self, *, epoch: int, secret: bytes, max_bytes: int) -> MemoryReceiver | None:
        """Expect one segment of this hop until it is forgotten; None without a socket or while paused."""
        if self._listening is None or self._pause.reason:
            return None
        key = PayloadKey(epoch, secret, new_ticket())
        offer = MemoryOffer(host_id(), self._name, key.ticket, hop_slot_bytes(max_bytes))
        receiver = self._expected[key.ticket] = MemoryReceiver(
            key, offer, max_bytes=max_bytes, locker=self._locker
        )
        return receiver

    def suspend(self) -> None:
        """Expect no segment for a while, after a fault of one. Idempotent."""
        self._pause.begin()

    def forget(self, receiver: MemoryReceiver) -> None:
        """End the receiver's connection, or expect none any longer. Idempotent."""
        self._expected.pop(receiver.key.ticket, None)
        receiver.close()

    def close(self) -> None:
        """Close the socket and all connections without a receiver. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for connection in tuple(self._greeting):
            self._end_greeting(connection)
            connection.close()

    def _accept(self) -> None:
        assert self._listening is not None, "a closed socket has no reader"
        while True:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._accept_later(_reason(error))
                return
            connection.setblocking(False)
            try:
                _check_user(connection, "the sender")
            except ConnectionError as error:
                self._refuse(connection, str(error))
                continue
            if len(self._greeting) >= MAX_GREETINGS:
                problem = f"{MAX_GREETINGS} connections have not greeted, the limit is {MAX_GREETINGS}"
                self._refuse(connection, problem)
                continue
            self._begin_greeting(connection)

    def _accept_later(self, problem: str) -> None:
        """Out of file descriptors: the socket stays readable, and the sender may give up meanwhile."""
        log.warning("cannot accept a sender of shared memory: %s", problem)
        assert self._listening is not None, "called while it listens"
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)

        def accept_again() -> None:
            if self._listening is not None:
                loop.add_reader(self._listening, self._accept)

        loop.call_later(ACCEPT_RETRY_S, accept_again)

    def _begin_greeting(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._greeting[connection] = loop.call_later(GREETING_TIMEOUT_S, self._time_out, connection)
        loop.add_reader(connection, self._greet, connection)

    def _end_greeting(self, connection: socket.socket) -> None:
        self._greeting.pop(connection).cancel()
        asyncio.get_running_loop().remove_reader(connection)

    def _time_out(self, connection: socket.socket) -> None:
        self._end_greeting(connection)
        self._refuse(connection, "no greeting: timed out")

    def _greet(self, connection: socket.socket) -> None:
        """Receive the only packet of a sender."""
        self._end_greeting(connection)
        descriptors: list[int] = []
        try:
            greeting, descriptors, _, _ = socket.recv_fds(
                connection, GREETING_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
            self._open(connection, greeting, descriptors)
        except (OSError, ValueError) as error:
            self._refuse(connection, _reason(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _open(self, connection: socket.socket, greeting: bytes, descriptors: list[int]) -> None:
        """Raises ValueError for what is no greeting of an expected sender with its segment, or OSError."""
        receiver = None
        if len(greeting) == GREETING_BYTES:
            receiver = self._expected.get(ticket_of(greeting))
        if receiver is None or not receiver.key.is_greeting(greeting):
            raise ValueError("no valid greeting")
        if len(descriptors) != 1:
            raise ValueError("no segment with the greeting")
        segment = SharedSegment(descriptors[0], receiver.offer.slot_bytes)
        del self._expected[receiver.key.ticket]
        receiver.open(connection, segment)

    def _refuse(self, connection: socket.socket, problem: str) -> None:
        connection.close()
        self._refused.note("a segment of shared memory", problem, host="this host")


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _address(name: str) -> str:
    """In the abstract namespace, which leaves no file behind."""
    return f"\0{name}"


def _check_user(connection: socket.socket, peer: str) -> None:
    """Any process of the network namespace may connect. Raises ConnectionError for those of other users."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ConnectionError(f"{peer} runs as user {user}, this worker as user {os.geteuid()}")


def _reason(error: OSError | ValueError | OverflowError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
