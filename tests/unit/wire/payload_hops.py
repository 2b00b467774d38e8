"""Hops of both ways beside the stream, over this machine: payload connections, and memory that ends share."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import ModuleType
from typing import TypeVar

from wire import memory_listener, payload_memory, payload_sockets
from wire.addresses import Address
from wire.memory_listener import MemoryListener
from wire.payload_memory import MemoryReceiver, MemorySender
from wire.payload_sockets import (
    MAX_PER_HOST,
    MIN_PIECE_BYTES,
    PayloadListener,
    PayloadReceiver,
    PayloadSender,
)
from wire.payloads import MAX_GREETINGS, ArrivedPayload, PayloadKey, PayloadNotice
from wire.peer_secrets import RefusedPeers
from wire.shared_segment import PIECE_BYTES, DeviceSharer, PageLocker, new_segment

SECRET = b"s" * 32
EPOCH = 7
DEADLINE_S = 10.0
H = TypeVar("H", bound="Hop")


class Hop(ABC):
    """A listener that expects one sender, and its counted refusals."""

    listening: ModuleType
    sending: ModuleType
    """Each has the time to greet."""
    limit: int
    """Size of the largest payload."""
    max_silent: int
    """Connections that may have not greeted."""
    listener: PayloadListener | MemoryListener
    receiver: PayloadReceiver | MemoryReceiver

    def __init__(self) -> None:
        self.num_refused = 0
        self.refused = RefusedPeers(time.monotonic, self._count)

    @property
    def key(self) -> PayloadKey:
        """What the sender must know."""
        return self.receiver.key

    @property
    @abstractmethod
    def num_silent(self) -> int:
        """Connections that have not greeted."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """The sender has been accepted."""

    @abstractmethod
    def connect(self) -> socket.socket:
        """A connection that has not greeted."""

    @abstractmethod
    def greet(self, connection: socket.socket, greeting: bytes) -> None:
        """Send a greeting, with all that belongs to it."""

    @abstractmethod
    def sender(self, key: PayloadKey | None = None) -> PayloadSender | MemorySender:
        """A sender with this key, by default the right one, which is not open."""

    @abstractmethod
    def impostor(self) -> tuple[socket.socket, PayloadSender | MemorySender]:
        """Another process that listens, and a sender to it."""

    @abstractmethod
    async def take(self, notice: PayloadNotice) -> ArrivedPayload: ...

    @abstractmethod
    def forget(self) -> None:
        """Expect no sender any longer."""

    def close(self) -> None:
        self.forget()
        self.listener.close()

    def _count(self) -> None:
        self.num_refused += 1


class SocketHop(Hop):
    listening = sending = payload_sockets
    limit = 16 * MIN_PIECE_BYTES
    max_silent = MAX_PER_HOST
    listener: PayloadListener
    receiver: PayloadReceiver

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.listener = PayloadListener(self.refused, lambda: tls)
        self.listener.listen(Address("127.0.0.1", 0))
        receiver = self.listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=self.limit)
        assert receiver is not None
        self.receiver = receiver

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.receiver.offer.port)

    @property
    def num_silent(self) -> int:
        return threads().count("payload-receiver")

    @property
    def is_open(self) -> bool:
        return self.receiver.is_open

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=DEADLINE_S)

    def greet(self, connection: socket.socket, greeting: bytes) -> None:
        connection.sendall(greeting)

    def sender(self, key: PayloadKey | None = None) -> PayloadSender:
        return PayloadSender(self.address, key or self.key)

    def impostor(self) -> tuple[socket.socket, PayloadSender]:
        listening = socket.create_server(("127.0.0.1", 0))
        return listening, PayloadSender(Address("127.0.0.1", listening.getsockname()[1]), self.key)

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        return await self.receiver.inbox.take(notice)

    def forget(self) -> None:
        self.listener.forget(self.receiver)


class MemoryHop(Hop):
    listening, sending = memory_listener, payload_memory
    limit = 3 * PIECE_BYTES
    max_silent = MAX_GREETINGS
    listener: MemoryListener
    receiver: MemoryReceiver

    def __init__(self, locker: PageLocker | None = None, sharer: DeviceSharer | None = None) -> None:
        super().__init__()
        self.listener = MemoryListener(self.refused, locker, sharer)
        self.listener.listen()
        receiver = self.listener.expect(epoch=EPOCH, secret=SECRET, max_bytes=self.limit)
        assert receiver is not None
        self.receiver = receiver

    @property
    def num_silent(self) -> int:
        return len(self.listener._greeting)

    @property
    def is_open(self) -> bool:
        return self.receiver.is_open

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(DEADLINE_S)
        connection.connect(f"\0{self.receiver.offer.socket}")
        return connection

    def greet(self, connection: socket.socket, greeting: bytes) -> None:
        segment = new_segment(self.receiver.offer.slot_bytes)
        socket.send_fds(connection, [greeting], [segment])
        os.close(segment)

    def sender(self, key: PayloadKey | None = None) -> MemorySender:
        return MemorySender(self.receiver.offer, key or self.key)

    def impostor(self) -> tuple[socket.socket, MemorySender]:
        name = f"stageline-test-{os.getpid()}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"\0{name}")
        listening.listen()
        return listening, MemorySender(replace(self.receiver.offer, socket=name), self.key)

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        return await self.receiver.take(notice)

    def forget(self) -> None:
        self.listener.forget(self.receiver)


@asynccontextmanager
async def closing(made: H) -> AsyncIterator[H]:
    """Close a hop at the end; then there are no threads."""
    try:
        yield made
    finally:
        made.close()
        await until(lambda: not threads())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def threads() -> list[str]:
    """Names of the threads of all hops."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("payload-")]


async def end_of(connection: socket.socket) -> bytes:
    """What a connection has before it ends: nothing if it was refused."""

    def receive() -> bytes:
        try:
            return connection.recv(1)
        except ConnectionResetError:
            return b""

    return await asyncio.to_thread(receive)


S = TypeVar("S", bound=PayloadSender | MemorySender)


@asynccontextmanager
async def opening(sender: S) -> AsyncIterator[S]:
    """Open a sender, and close it at the end."""
    try:
        await sender.open()
        yield sender
    finally:
        sender.close()
