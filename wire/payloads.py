"""Payloads of a hop beside its stream: greeting, headers, and their way into frames.

The sender opens one TCP connection per hop and epoch to the address in `HopAccepted` and sends a greeting
that proves the secret of the hop; the receiver proves it too, and then receives payloads, each behind a
header with its number and size. The frame on the gRPC stream names the payload and its XXH3-64: it decides
order and contents, the connection only moves bytes. `wire.payload_sockets` has the connections, and
`wire.payload_memory` shared memory in their place.
"""

import asyncio
import hmac
import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wire.errors import StepFault, StepFaultKind

log = logging.getLogger(__name__)

MIN_PAYLOAD_BYTES = 256 * 1024
"""Smaller payloads travel in the frame."""
PAYLOAD_TIMEOUT_S = 5.0
"""Maximum time without a byte of a payload whose frame has arrived."""
PAYLOAD_RETRY_S = 30.0
"""Time without new payload connections to or from a stage after one did not work."""
GREETING_TIMEOUT_S = 2.0
"""Maximum time to connect and greet; then hidden states travel another way."""
MAX_GREETINGS = 16
"""Connections that may greet at the same time, for up to `GREETING_TIMEOUT_S` each."""
TICKET_BYTES = 16

_MAGIC = b"STGLPAY1"
_GREETING = struct.Struct(f">8sQ{TICKET_BYTES}s32s")
_HEADER = struct.Struct("<QQ")
GREETING_BYTES = _GREETING.size
HEADER_BYTES = _HEADER.size
PROOF_BYTES = 32

Bytes = bytes | bytearray | memoryview
"""What a sender sends."""


@dataclass(frozen=True, slots=True)
class PayloadOffer:
    """Where a stage receives the payloads of one hop and epoch, valid for one connection.

    An empty host means the host at which the sender reached the stage.
    """

    host: str
    port: int
    ticket: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PayloadKey:
    """What both ends of a hop know: the epoch, the hop's secret, and the ticket of the connection."""

    epoch: int
    secret: bytes = field(repr=False)
    ticket: bytes = field(repr=False)

    def greeting(self) -> bytes:
        """The sender's first bytes."""
        return _GREETING.pack(_MAGIC, self.epoch, self.ticket, self._proof(b"sender"))

    def answer(self) -> bytes:
        """The receiver's only bytes, which an impostor at its address cannot send."""
        return self._proof(b"receiver")

    def is_greeting(self, greeting: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(greeting, self.greeting())

    def is_answer(self, answer: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(answer, self.answer())

    def _proof(self, role: bytes) -> bytes:
        message = b"stageline payloads " + role + struct.pack(">Q", self.epoch) + self.ticket
        return hmac.digest(self.secret, message, "sha256")


def new_ticket() -> bytes:
    return secrets.token_bytes(TICKET_BYTES)


def ticket_of(greeting: bytes) -> bytes:
    """The ticket of a greeting; other bytes have one that nothing expects."""
    ticket: bytes = _GREETING.unpack(greeting)[2]
    return ticket


def encode_header(number: int, size_bytes: int) -> bytes:
    return _HEADER.pack(number, size_bytes)


def decode_header(header: bytes, *, number: int, max_bytes: int) -> int:
    """The size of payload `number`. Raises StepFault for another payload or a size beyond the limit."""
    got: int
    size_bytes: int
    got, size_bytes = _HEADER.unpack(header)
    if got != number:
        raise StepFault(StepFaultKind.UNDECODABLE, f"payload {got} on the connection, expected {number}")
    if not 0 < size_bytes <= max_bytes:
        raise StepFault(
            StepFaultKind.SHAPE, f"payload {number} has {size_bytes} bytes, the limit is {max_bytes}"
        )
    return size_bytes


@dataclass(frozen=True, slots=True)
class PayloadNotice:
    """What a frame says about its payload: number on the connection from 1 on, size and XXH3-64."""

    number: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ArrivedPayload:
    """A received payload; `began_s` is when its header was there, on the clock of the event loop."""

    notice: PayloadNotice
    data: bytes | memoryview
    began_s: float


class OfferPause:
    """No offers for PAYLOAD_RETRY_S after a payload did not arrive intact, so that a fault ends one epoch."""

    def __init__(self, consequence: str) -> None:
        """`consequence` of a pause, in the log."""
        self._consequence = consequence
        self._until_s = 0.0

    @property
    def reason(self) -> str:
        """Why nothing is offered now; empty otherwise."""
        return "a payload did not arrive intact" if time.monotonic() < self._until_s else ""

    def begin(self) -> None:
        """Idempotent."""
        if self.reason:
            return
        self._until_s = time.monotonic() + PAYLOAD_RETRY_S
        log.warning("%s for %g s: %s", self._consequence, PAYLOAD_RETRY_S, self.reason)


class PayloadInbox:
    """Payloads of one hop and epoch on their way from the connection into frames; event loop only.

    Payloads arrive and are taken in the order of their numbers. An end of the connection counts when a
    frame needs a payload: the stream says why the sender ended, if it did.
    """

    def __init__(
        self,
        *,
        progress: Callable[[], int] = lambda: 0,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`progress` counts received bytes; `on_taken` is called for each payload that a frame took."""
        loop = asyncio.get_running_loop()
        self.damaged: asyncio.Future[StepFault] = loop.create_future()
        """Set when the connection carries what no sender sends."""
        self._progress = progress
        self._on_taken = on_taken
        self._arrived: deque[ArrivedPayload] = deque()
        self._num_taken = 0
        self._end = ""
        self._changed = asyncio.Event()

    def arrived(self, payload: ArrivedPayload) -> None:
        """Record the next complete payload."""
        self._arrived.append(payload)
        self._changed.set()

    def fail(self, fault: StepFault) -> None:
        """Record that the connection is damaged."""
        if not self.damaged.done():
            self.damaged.set_result(fault)
        self.end(fault.message)

    def end(self, reason: str) -> None:
        """Record that nothing more arrives."""
        self._end = self._end or reason
        self._changed.set()

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        """The payload that a frame names, as soon as it is complete.

        Raises StepFault: UNDECODABLE for another number than the next one, SHAPE for another size,
        CHECKSUM for other contents, NEIGHBOUR when the payload does not arrive, and what `damaged` has.
        """
        number = self._num_taken + 1
        if notice.number != number:
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"the frame names payload {notice.number}, the next is {number}"
            )
        while not self._arrived:
            await self._wait(notice)
        payload = self._arrived.popleft()
        self._num_taken = number
        self._on_taken()
        check_payload(payload.notice, notice)
        return payload

    async def _wait(self, notice: PayloadNotice) -> None:
        """Wait for an arrival or for progress."""
        if self.damaged.done():
            raise self.damaged.result()
        if self._end:
            raise _missing(notice, self._end)
        received = self._progress()
        self._changed.clear()
        try:
            async with asyncio.timeout(PAYLOAD_TIMEOUT_S):
                await self._changed.wait()
        except TimeoutError:
            if self._progress() == received:
                raise _missing(notice, f"no byte for {PAYLOAD_TIMEOUT_S:g} s") from None


def _missing(notice: PayloadNotice, reason: str) -> StepFault:
    return StepFault(
        StepFaultKind.NEIGHBOUR,
        f"payload {notice.number} of {notice.size_bytes} bytes did not arrive: {reason}",
    )


def check_payload(arrived: PayloadNotice, notice: PayloadNotice) -> None:
    """Compare a payload with its frame. Raises StepFault: SHAPE or CHECKSUM."""
    if arrived.size_bytes != notice.size_bytes:
        raise StepFault(
            StepFaultKind.SHAPE,
            f"payload {notice.number} has {arrived.size_bytes} bytes, the frame says {notice.size_bytes}",
        )
    if arrived != notice:
        raise StepFault(
            StepFaultKind.CHECKSUM,
            f"checksum of payload {notice.number}: expected {notice.checksum:016x}, "
            f"got {arrived.checksum:016x}",
        )
