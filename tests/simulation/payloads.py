"""Payload connections on the simulated network, in place of `wire.payload_sockets`.

Greetings, headers and the way into frames are the product's; one payload is one message.
"""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from tests.simulation.network import Direction
from tests.simulation.virtual_loop import Process
from wire.addresses import Address
from wire.errors import StepFault
from wire.payloads import (
    GREETING_BYTES,
    GREETING_TIMEOUT_S,
    HEADER_BYTES,
    ArrivedPayload,
    Bytes,
    PayloadInbox,
    PayloadKey,
    PayloadNotice,
    PayloadOffer,
    decode_header,
    encode_header,
    ticket_of,
)

PORT_OFFSET = 10_000
"""Simulated workers listen for payloads this far above their other port."""


class SimReceiver:
    """As PayloadReceiver."""

    def __init__(self, key: PayloadKey, offer: PayloadOffer, max_bytes: int) -> None:
        self.key = key
        self.offer = offer
        self.inbox = PayloadInbox()
        self.link: SimSender | None = None
        self._max_bytes = max_bytes
        self._number = 0
        self._is_over = False

    @property
    def is_open(self) -> bool:
        return self.link is not None

    def arrive(self, item: Any) -> None:
        """From the network: a payload behind its header, or None at the end."""
        if self._is_over:
            return
        if item is None:
            self.end("the sender closed the payload connection")
            return
        self._number += 1
        header, data = item[:HEADER_BYTES], item[HEADER_BYTES:]
        try:
            if len(header) < HEADER_BYTES or len(data) < decode_header(
                header, number=self._number, max_bytes=self._max_bytes
            ):
                self.end("the payload connection ended")
                return
        except StepFault as fault:
            self._is_over = True
            self.inbox.fail(fault)
            return
        notice = PayloadNotice(self._number, len(data), xxhash.xxh3_64_intdigest(data))
        self.inbox.arrived(ArrivedPayload(notice, data, Process.current().loop.time()))

    def end(self, reason: str) -> None:
        self._is_over = True
        self.inbox.end(reason)

    def close(self) -> None:
        self._is_over = True
        if self.link is not None:
            self.link.break_off(is_seen_by=self.link.process)


class SimListener:
    """As PayloadListener."""

    def __init__(self, refused: object, tls: object = None) -> None:
        self.process = Process.current()
        self._address: Address | None = None
        self._expected: dict[bytes, SimReceiver] = {}

    def listen(self, address: Address, *, offered: Address) -> None:
        self._address = Address(address.host, address.port or PORT_OFFSET)
        self.process.network.payload_listeners[self._address] = self

    def expect(self, *, epoch: int, secret: bytes, max_bytes: int) -> SimReceiver | None:
        assert self._address is not None
        network = self.process.network
        key = PayloadKey(epoch, secret, network.ticket())
        receiver = SimReceiver(key, PayloadOffer("", self._address.port, key.ticket), max_bytes)
        self._expected[key.ticket] = receiver
        return receiver

    def forget(self, receiver: SimReceiver) -> None:
        self._expected.pop(receiver.key.ticket, None)
        receiver.close()

    reason_to_wait = ""

    def suspend(self) -> None:
        """The next epoch may have a connection again."""

    def greeted(self, greeting: bytes) -> SimReceiver | None:
        if len(greeting) != GREETING_BYTES:
            return None
        receiver = self._expected.get(ticket_of(greeting))
        if receiver is None or not receiver.key.is_greeting(greeting):
            return None
        return self._expected.pop(receiver.key.ticket)

    def close(self) -> None:
        """Its process ends."""


class SimSender:
    """As PayloadSender."""

    def __init__(self, address: Address, key: PayloadKey, tls: object = None) -> None:
        self.address = address
        self.process = Process.current()
        self.failed: asyncio.Future[str] = self.process.loop.create_future()
        self.receiver: SimReceiver | None = None
        self.up = Direction(self.process.network, self.process, lambda item: None, None)
        self.up.num_sent = 1  # the greeting
        self._key = key
        self._number = 0

    async def open(self) -> None:
        """Raises ConnectionError or TimeoutError."""
        network = self.process.network
        await asyncio.sleep(network.latency_s())
        listener = network.payload_listeners.get(self.address)
        if listener is None or listener.process.is_dead:
            raise ConnectionError("Connection refused")
        if listener.process.is_frozen or network.is_cut(self.process, listener.process):
            await asyncio.sleep(GREETING_TIMEOUT_S)
            raise TimeoutError("timed out")
        receiver = listener.greeted(self._key.greeting())
        if receiver is None:
            raise ConnectionError("the connection was closed")
        self.receiver, receiver.link = receiver, self
        self.up.to, self.up.receiver = listener.process, receiver.arrive
        network.payload_links.append(self)

    async def send(self, data: Bytes) -> PayloadNotice:
        if self.failed.done():
            raise ConnectionError(self.failed.result())
        self._number += 1
        payload = bytes(data)
        self.up.send(encode_header(self._number, len(payload)) + payload)
        return PayloadNotice(self._number, len(payload), xxhash.xxh3_64_intdigest(payload))

    def close(self) -> None:
        """The receiver sees the end behind all payloads."""
        if self.is_open:
            self._forget()
            self.up.send(None)

    @property
    def is_open(self) -> bool:
        return self in self.process.network.payload_links

    def break_off(self, *, is_seen_by: Process | None = None) -> None:
        """Reset the connection, at one end or at both."""
        if not self.is_open:
            return
        self._forget()
        assert self.receiver is not None and self.up.to is not None
        network, reason = self.process.network, "Connection reset by peer"
        for process, end in ((self.process, self._fail), (self.up.to, self.receiver.end)):
            if is_seen_by in (None, process) and not network.is_cut(self.process, self.up.to):
                self.process.loop.call_later(network.latency_s(), end, reason, context=process.context)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def _forget(self) -> None:
        self.process.network.payload_links.remove(self)
