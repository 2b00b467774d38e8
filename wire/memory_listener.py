"""Where the senders of a worker's hops on one host connect, each with its segment."""

import asyncio
import errno
import logging
import os
import secrets
import socket
import sys

from wire.payload_memory import (
    MemoryOffer,
    MemoryReceiver,
    check_user,
    host_id,
    new_socket,
    reason_of,
    socket_address,
)
from wire.payloads import (
    GREETING_BYTES,
    GREETING_TIMEOUT_S,
    MAX_GREETINGS,
    OfferPause,
    PayloadKey,
    new_ticket,
    ticket_of,
)
from wire.peer_secrets import RefusedPeers
from wire.shared_segment import DeviceSharer, PageLocker, SharedSegment, new_segment
from wire.staging import PAGE_BYTES, hop_slot_bytes

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.05
"""Pause without file descriptors."""


class MemoryListener:
    """Takes the segments of a worker's senders at one socket, and passes each to the hop that expects it.

    Other connections are refused, counted and logged as `RefusedPeers` does. Used on the event loop only.
    """

    def __init__(
        self,
        refused: RefusedPeers,
        locker: PageLocker | None = None,
        sharer: DeviceSharer | None = None,
    ) -> None:
        """With `locker`, segments are page-locked. `sharer` opens memory of devices."""
        self._refused, self._locker, self._sharer = refused, locker, sharer
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
        listening = new_socket()
        try:
            listening.bind(socket_address(self._name))
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
            key, offer, max_bytes=max_bytes, locker=self._locker, sharer=self._sharer
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
                self._accept_later(reason_of(error))
                return
            connection.setblocking(False)
            try:
                check_user(connection, "the sender")
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
            self._refuse(connection, reason_of(error))
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
