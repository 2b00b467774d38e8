"""Payloads of a hop in memory that its two processes share, where they run on one host.

The sender creates a segment of slots (memfd), seals its size, and passes it with its greeting over a Unix
socket. It writes a payload into a free slot; the frame on the gRPC stream names the payload, and
decides order and contents. The receiver uses the payload where it is, or copies it, and returns the slot by a
message on the socket. A segment has no name: the kernel frees it with the last of the two processes, however
they end.

Where both compute on GPUs, the sender may pass on memory of its device, too: a second packet has the
driver's handle, and the receiver answers whether it could open it. Slots of both kinds have the same numbers;
the stamp of a payload, in memory of the host, says where it is. A payload on the device is read by the
receiver's device only, and its checksum is compared when its step ends: see
`stage_worker.backends.transfers`.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import struct
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
    GREETING_TIMEOUT_S,
    ArrivedPayload,
    Bytes,
    PayloadKey,
    PayloadNotice,
    check_payload,
)
from wire.shared_segment import (
    DeviceCard,
    DeviceSegment,
    DeviceSharer,
    PageLocker,
    SharedSegment,
    bytes_of,
    copy_hashed,
    hashed,
    new_segment,
)
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS, WORD_BYTES

log = logging.getLogger(__name__)

MAX_HELD = 4
"""Payloads that a receiver uses where they are; others are copied, so that their slots are returned."""
MAX_UNRETURNED = NUM_HOP_SLOTS - MAX_HELD
"""Small payloads that were copied and are returned in one message, which wakes the sender once."""
INLINE_BYTES = 128 * 1024
"""Larger payloads are moved in a thread: to wake one takes as long as to copy these."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_RETURNED = struct.Struct("<Q")
_CARD = struct.Struct("<8s64sQ")
_CARD_MAGIC = b"STGLGPU1"
MAX_REASON_BYTES = 400
_ANSWER = b"\x01"
"""Begins the answer to a card: a length that no message with numbers has."""
_MAX_MESSAGE_BYTES = 512
DEVICE_TIMEOUT_S = 120.0
"""Of a receiver that opens memory of a device, and compiles what it reads it with."""
NO_DEVICE = "no device"
"""Answer of a receiver without a GPU."""
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
        self._device: DeviceSegment | None = None
        self._min_device_bytes = 0
        self._mover = _Mover()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._device_answer: asyncio.Future[str] | None = None
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
            raise ConnectionError(reason_of(error)) from None

    async def lock(self, locker: PageLocker) -> None:
        """Page-lock the segment. Raises OSError with the reason; the segment can be used all the same."""
        if self._segment is not None:
            await locker.lock(self._segment.memory)

    async def share_device(self, sharer: DeviceSharer, *, min_bytes: int) -> bool:
        """Let payloads of at least `min_bytes` stay on the device, from now on.

        Returns False if the receiver computes on no GPU. Raises OSError with the reason; payloads travel in
        memory of the host then.
        """
        exported = await sharer.export(self.offer.slot_bytes)
        try:
            if (connection := self._socket) is None:
                raise ConnectionError(self._broken or _CLOSED)
            answered = self._device_answer = self._loop.create_future()
            card = _CARD.pack(_CARD_MAGIC, exported.card.handle, exported.card.proof)
            socket.send_fds(connection, [card], [exported.lease])
        finally:
            os.close(exported.lease)
        try:
            async with asyncio.timeout(DEVICE_TIMEOUT_S):
                reason = await answered
        except TimeoutError:
            raise OSError(f"the next stage did not open it within {DEVICE_TIMEOUT_S:g} s") from None
        if reason == NO_DEVICE:
            return False
        if reason:
            raise OSError(reason)
        self._min_device_bytes, self._device = min_bytes, exported.segment
        return True

    def lend(self, num_bytes: int) -> memoryview | None:
        """Room for the next payload of `num_bytes` in a free slot, None without one; called on any thread.

        It is on the device where that is shared, and the payload large enough and of whole words; nothing can
        be read or written there by the host. The slot is not used for another payload while the memory is
        referenced. `send` of bytes from its begin on copies nothing.
        """
        segment, device = self._segment, self._device
        if self._broken or segment is None or num_bytes > self.offer.slot_bytes - HOP_DATA_OFFSET:
            return None
        try:
            index = self._free.pop()
        except IndexError:
            return None
        self._lent.add(index)
        slot = segment.open(index)
        if device is not None and num_bytes >= self._min_device_bytes and not num_bytes % WORD_BYTES:
            slot = device.slot(index)
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
        if (checksum := self._seal_on_device(number, payload)) is not None:
            return PayloadNotice(number, size_bytes, checksum)
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

    def _seal_on_device(self, number: int, payload: memoryview) -> int | None:
        """Seal a payload that stays on the device; its checksum, None for one in memory of the host.

        Raises ConnectionError.
        """
        device, segment = self._device, self._segment
        slot = None if device is None else device.slot_of(payload)
        if device is None or slot is None:
            return None
        if self._broken or segment is None:
            raise ConnectionError(self._broken or _CLOSED)
        self._written[number] = slot
        segment.seal_on_device(slot, self._key.epoch, number, payload.nbytes)
        return device.slots.checksums.pop(slot)

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
        self._segment = self._device = None
        self._mover.end()

    def _connect(self) -> None:
        connection = self._socket = new_socket()
        connection.connect(socket_address(self.offer.socket))
        check_user(connection, "the next stage")
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
            self._break(reason_of(error))

    def _take_message(self, message: bytes) -> None:
        """Raises ConnectionError for what no receiver sends."""
        if not message:
            raise ConnectionError(_CLOSED)
        if not self._opened.done():
            if not self._key.is_answer(message):
                raise ConnectionError("another process is at the socket")
            self._opened.set_result(None)
            return
        if len(message) % _RETURNED.size == len(_ANSWER) and self._take_answer(message):
            return
        if len(message) % _RETURNED.size:
            raise ConnectionError(f"the receiver sent {len(message)} bytes, which are no numbers")
        for (number,) in _RETURNED.iter_unpack(message):
            slot = self._written.pop(number, None)
            if slot is None:
                raise ConnectionError(f"the receiver returned payload {number}, which it does not have")
            self._free_unless_lent(slot)

    def _take_answer(self, message: bytes) -> bool:
        """Take the answer to a card; False for another message, or without a card."""
        answered = self._device_answer
        if answered is None or not message.startswith(_ANSWER):
            return False
        if not answered.done():
            answered.set_result(message[len(_ANSWER) :].decode(errors="replace").strip())
        return True

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
        if self._device_answer is not None and not self._device_answer.done():
            self._device_answer.set_exception(ConnectionError(reason))
            self._device_answer.exception()
        self._changed.set()


class MemoryReceiver:
    """The receiving end of one hop and epoch: expects one segment, then takes the payloads in it."""

    def __init__(
        self,
        key: PayloadKey,
        offer: MemoryOffer,
        *,
        max_bytes: int,
        locker: PageLocker | None = None,
        sharer: DeviceSharer | None = None,
    ) -> None:
        """With `locker`, the segment is page-locked from soon after its arrival on.

        Memory of a device is opened by `sharer`, and refused without one.
        """
        self._loop = asyncio.get_running_loop()
        self.key = key
        self.offer = offer
        self.lock_problem = ""
        """Why the segment is not page-locked, although it should be."""
        self._locker, self._sharer = locker, sharer
        self._max_bytes = max_bytes
        self._socket: socket.socket | None = None
        self._segment: SharedSegment | None = None
        self._device: DeviceSegment | None = None
        self._mover = _Mover()
        self._pool = BufferPool(max_bytes)
        self._num_taken = 0
        self._held: set[int] = set()
        self._copied: list[int] = []

    @property
    def is_on_device(self) -> bool:
        """Payloads may stay on the device of the sender, where their contents are compared later."""
        return self._device is not None

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
        self._loop.add_reader(connection, self._take_card)

    def _take_card(self) -> None:
        """Receive the only packet of a sender after its greeting."""
        connection, descriptors = self._socket, list[int]()
        assert connection is not None, "a closed socket has no reader"
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                connection, _CARD.size + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            packet = b""  # the sender has gone; its stream says why
        self._loop.remove_reader(connection)
        if self._sharer is None or len(packet) != _CARD.size or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            if packet:
                self._answer(NO_DEVICE if self._sharer is None else "the card of the device is malformed")
            return
        magic, handle, proof = _CARD.unpack(packet)
        card = DeviceCard(handle, proof)
        if magic != _CARD_MAGIC:
            os.close(descriptors[0])
            self._answer("the card of the device is malformed")
            return
        opening = self._sharer.import_(self.offer.slot_bytes, card, descriptors[0])
        opening.add_done_callback(self._note_device)

    def _note_device(self, opening: "asyncio.Future[DeviceSegment]") -> None:
        if opening.cancelled():
            return
        if (error := opening.exception()) is not None:
            log.warning("hidden states do not stay on the GPU: %s", error)
            self._answer(str(error))
        elif self._socket is not None:
            # The sender uses it once it has the answer.
            self._device = opening.result()
            self._answer("")

    def _answer(self, reason: str) -> None:
        """Say why memory of a device cannot be opened, or that it is."""
        text = reason.encode()[:MAX_REASON_BYTES]
        text += b" " * (-len(text) % _RETURNED.size)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(_ANSWER + text)

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
        index = segment.find(self.key.epoch, number, notice.size_bytes)
        if segment.is_on_device(index):
            return ArrivedPayload(notice, self._take_on_device(index, notice), began_s)
        slot = segment.slot(index)
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

    def _take_on_device(self, index: int, notice: PayloadNotice) -> memoryview:
        """A payload that stays on the device, where its checksum is compared.

        Its slot is returned when nothing refers to it. Raises StepFault.
        """
        device = self._device
        if device is None or notice.size_bytes % WORD_BYTES:
            problem = "not whole words" if device is not None else "memory that this stage did not open"
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"payload {notice.number} is on a device, in {problem}"
            )
        self._num_taken = notice.number
        slot = device.slot(index)
        device.slots.checksums[index] = notice.checksum
        self._held.add(notice.number)
        weakref.finalize(slot, self._release_later, notice.number).atexit = False
        return bytes_of(slot, notice.size_bytes).toreadonly()

    def close(self) -> None:
        """End the connection. Idempotent. Payloads that were taken stay as they are."""
        connection, self._socket, self._segment = self._socket, None, None
        self._device = None
        if connection is not None:
            self._loop.remove_reader(connection)
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


def new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def socket_address(name: str) -> str:
    """In the abstract namespace, which leaves no file behind."""
    return f"\0{name}"


def check_user(connection: socket.socket, peer: str) -> None:
    """Any process of the network namespace may connect. Raises ConnectionError for those of other users."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ConnectionError(f"{peer} runs as user {user}, this worker as user {os.geteuid()}")


def reason_of(error: OSError | ValueError | OverflowError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
