"""Surface of payload connections: bytes to the port of a worker that expects one.

A case is what the connection begins with (`+` for the greeting that is expected, `-` for nothing), and what
is sent then.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import xxhash

from tests.fuzz.background import Background, errors_logged
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import BIG_NUMBERS, NUMBERS, mutate_bytes
from wire.addresses import Address
from wire.errors import StepFault, StepFaultKind
from wire.payload_sockets import PayloadListener, PayloadReceiver, PayloadSender
from wire.payloads import PayloadKey, PayloadNotice, encode_header
from wire.peer_secrets import RefusedPeers

_EPOCH, _SECRET = 3, bytes(range(32))
_MAX_BYTES = 4096
_CONTENT = bytes(range(256)) * 4
_CHECKSUM = xxhash.xxh3_64_intdigest(_CONTENT)


def make(random: Random) -> bytes:
    """One to three payloads with changed headers, or a changed greeting."""
    if random.random() < 0.2:
        return b"-" + mutate_bytes(PayloadKey(_EPOCH, _SECRET, random.randbytes(16)).greeting(), random)
    data = b""
    for number in range(1, random.randint(1, 3) + 1):
        size = random.choice((1, 7, 1024, _MAX_BYTES, _MAX_BYTES + 1))
        data += encode_header(number, size) + (_CONTENT * 5)[:size]
    if random.random() < 0.4:
        numbers = [random.choice((*NUMBERS, *BIG_NUMBERS)) % 2**64 for _ in range(2)]
        data = encode_header(*numbers) + data[16:]
    return b"+" + (mutate_bytes(data, random) if random.random() < 0.7 else data)


class _Hop:
    """A listener, and connections to it, each expected by a receiver of its own."""

    def __init__(self) -> None:
        self._listener = PayloadListener(RefusedPeers(time.monotonic))

    async def __aenter__(self) -> _Hop:
        self._listener.listen(Address("127.0.0.1", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    @contextmanager
    def _expecting(self) -> Iterator[PayloadReceiver]:
        receiver = self._listener.expect(epoch=_EPOCH, secret=_SECRET, max_bytes=_MAX_BYTES)
        assert receiver is not None
        try:
            yield receiver
        finally:
            self._listener.forget(receiver)

    async def exchange(self, data: bytes) -> str:
        """Send a case to its end; return the last fault of the receiver."""
        is_expected, sent = data[:1] == b"+", data[1:]
        with self._expecting() as receiver:
            reader, writer = await asyncio.open_connection("127.0.0.1", receiver.offer.port)
            try:
                writer.write(receiver.key.greeting() + sent if is_expected else sent)
                writer.write_eof()
                answer = await reader.read()
            except OSError:  # the listener closed the connection before its end
                answer = b""
            finally:
                writer.close()
            if not is_expected:
                return _refused(answer)
            return await _taken(receiver)

    async def check(self) -> None:
        """Raises Broken unless a payload arrives as it was sent."""
        with self._expecting() as receiver:
            sender = PayloadSender(Address("127.0.0.1", receiver.offer.port), receiver.key)
            await sender.open()
            notice = await sender.send(_CONTENT)
            payload = await receiver.inbox.take(notice)
            sender.close()
        if bytes(payload.data) != _CONTENT:
            raise Broken("a payload changed on its way")


def _refused(answer: bytes) -> str:
    if answer:
        raise Broken(f"an unexpected connection is answered: {answer!r}")
    return "refused"


async def _taken(receiver: PayloadReceiver) -> str:
    """Take all payloads that arrived, whatever frames would have said; return the fault after the last."""
    for number in itertools.count(1):
        try:
            await receiver.inbox.take(PayloadNotice(number, len(_CONTENT), _CHECKSUM))
        except StepFault as fault:
            if (
                fault.kind not in (StepFaultKind.SHAPE, StepFaultKind.CHECKSUM)
                or receiver.inbox.damaged.done()
            ):
                return fault.kind.name
    raise AssertionError


@contextmanager
def opened() -> Iterator[Opened]:
    background, failed = Background(), list[str]()

    def note(failure: threading.ExceptHookArgs) -> None:
        failed.append("".join(traceback.format_exception(failure.exc_value)))

    with (
        errors_logged() as errors,
        patch.object(threading, "excepthook", note),
        background.entered(_Hop) as hop,
    ):

        def settle() -> None:
            errors.check()
            if failed:
                raise Broken(f"a thread ended: {failed.pop()}")

        def examine(data: bytes) -> str:
            ended = background.run(hop.exchange(data))
            settle()
            return ended

        def check() -> None:
            background.run(hop.check())
            settle()

        yield Opened(examine, check, (os.getpid(),))
    background.close()


SURFACES = (Surface(name="payloads", share=4, make=make, opened=opened),)
