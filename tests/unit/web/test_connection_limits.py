"""What an HTTP server refuses before any application sees it, and how it says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from web.connection_limits import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_SMALL_PARTS,
    MIN_PART_BYTES,
    HttpLimits,
)
from web.server import HttpServer
from wire.addresses import Address

DEADLINE_S = 60.0
LIMITS = HttpLimits(
    max_connections=3,
    max_connections_per_host=2,
    head_timeout_s=0.3,
    pause_timeout_s=0.3,
    body_timeout_s=0.8,
    max_unread_bytes=100_000,
)


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that responds with the size of the body.

    `/slow` reads it later than a pause may be, `/unread` not at all.
    """
    if scope["path"] == "/unread":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"unread"})
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * LIMITS.pause_timeout_s)
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


@asynccontextmanager
async def serving(limits: HttpLimits = LIMITS, app: ASGIApp = count_bytes) -> AsyncIterator[Address]:
    server = HttpServer(app, Address("127.0.0.1", 0), name="the test", hint="", limits=limits)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


class Connection:
    """A raw connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, address: Address, data: bytes = b"") -> Connection:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        connection = cls(reader, writer)
        connection.send(data)
        return connection

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def pump(self, part: bytes) -> int:
        """Send a part again and again until the connection is closed; return the number of bytes."""
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while not self._writer.is_closing():
                self.send(part)
                await self._writer.drain()
                num_sent += len(part)
        return num_sent

    async def trickle(self, part: bytes, every_s: float) -> None:
        """Send a part again and again until the connection is closed."""
        while not self._writer.is_closing():
            self.send(part)
            await asyncio.sleep(every_s)

    async def response(self) -> tuple[int, str]:
        """Status, and the body or the message of the error in it."""
        async with asyncio.timeout(DEADLINE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if b"transfer-encoding" in head.lower():
                body = (await self._reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1]
            else:
                length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
                body = await self._reader.readexactly(int(length.split()[1]))
        return status, body.decode() if status == 200 else json.loads(body)["error"]["message"]

    async def rest(self) -> tuple[bytes, bytes]:
        """Head and body of the last response of a connection that the server closes."""
        async with asyncio.timeout(DEADLINE_S):
            head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        return head, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


def request(*headers: bytes, path: bytes = b"/") -> bytes:
    return b"\r\n".join((b"POST " + path + b" HTTP/1.1", b"Host: test", *headers)) + b"\r\n\r\n"


CHUNKED = request(b"Transfer-Encoding: chunked")


def chunks(num: int, size: int) -> bytes:
    return (b"%x\r\n" % size + bytes(size) + b"\r\n") * num


HEADERS = [b"X-%d: y" % index for index in range(MAX_HEADERS)]


@pytest.mark.parametrize(
    ("data", "status", "problem"),
    [
        (request(*HEADERS), 431, "the request has 101 header fields, the limit is 100"),
        (request(b"X: " + b"y" * MAX_HEAD_BYTES), 431, "have 16402 bytes, the limit is 16384"),
        (b"GET /" + b"y" * MAX_HEAD_BYTES, 431, "Receive buffer too long"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "invalid http request received: illegal request line"),
        (request(b"Content-Encoding: gzip"), 415, "the body has a content-encoding: send it uncompressed"),
        (request(*HEADERS[:-1], b"Content-Encoding: identity")[:-2], 408, "no headers within 0.3 s"),
        (b"", 408, "no headers within 0.3 s"),
        (
            CHUNKED + chunks(MAX_SMALL_PARTS, MIN_PART_BYTES - 1) + chunks(1, 1),
            400,
            "61441 bytes of the body came in 4097 parts: send larger chunks",
        ),
        (request(b"Content-Length: 5") + b"1234", 408, "no body within 0.8 s, or none of it for 0.3 s"),
        (
            request(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + request(),
            400,
            "content-length beside transfer-encoding: send one of them",
        ),
        (
            request(b"Transfer-Encoding: Chunked", b"content-length: 0") + b"0\r\n\r\n" + request(),
            400,
            "content-length beside transfer-encoding: send one of them",
        ),
    ],
    ids=[
        "headers",
        "head",
        "line",
        "garbage",
        "encoding",
        "partial",
        "silent",
        "chunks",
        "pause",
        "lengths",
        "no length",
    ],
)
async def test_what_exceeds_a_limit_is_refused_with_its_number(
    data: bytes, status: int, problem: str
) -> None:
    async with serving() as address:
        connection = await Connection.to(address, data)
        found = await connection.response()
        assert (found[0], problem in found[1]) == (status, True), found
        if status not in (415, 431):
            assert await connection.is_closed()
        await connection.close()


@pytest.mark.parametrize(
    ("begin", "part", "status"),
    [(b"", b"\r\n", 400), (request(b"Content-Length: 100")[:-2], b"X: y\r\n", 408)],
    ids=["blank lines", "headers"],
)
async def test_a_head_that_trickles_in_is_not_waited_for(begin: bytes, part: bytes, status: int) -> None:
    async with serving() as address:
        connection = await Connection.to(address, begin)
        trickling = asyncio.create_task(connection.trickle(part, 0.05))
        assert (await connection.response())[0] == status
        await connection.close()
        await trickling


@pytest.mark.parametrize(
    ("headers", "status"),
    [((b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400), ((b"Content-Length: 5",), 408)],
    ids=["lengths", "pause"],
)
async def test_a_refused_head_has_a_response_without_a_body(headers: Sequence[bytes], status: int) -> None:
    async with serving() as address:
        connection = await Connection.to(address, request(*headers).replace(b"POST", b"HEAD", 1))
        head, body = await connection.rest()
        assert (head.split()[1], body) == (b"%d" % status, b"")
        assert b"content-length: " in head
        await connection.close()


async def test_a_body_that_trickles_in_is_not_waited_for() -> None:
    async with serving() as address:
        connection = await Connection.to(address, request(b"Content-Length: 100"))
        trickling = asyncio.create_task(connection.trickle(b"x", 0.1))
        assert (await connection.response())[0] == 408
        await connection.close()
        await trickling


async def test_a_body_without_end_is_not_taken_after_its_response() -> None:
    async with serving() as address, asyncio.timeout(DEADLINE_S):
        head = request(b"Content-Length: 1000000000", path=b"/unread")
        connection = await Connection.to(address, head)
        assert await connection.response() == (200, "unread")
        num_sent = await connection.pump(bytes(10_000))
        assert LIMITS.max_unread_bytes <= num_sent < 100_000_000
        await connection.close()


async def test_within_the_limits_a_connection_serves_one_request_after_the_other() -> None:
    body = bytes(500_000)
    async with serving() as address:
        connection = await Connection.to(address, request(*HEADERS[:-2], b"Content-Encoding: identity"))
        assert await connection.response() == (200, "0")
        await asyncio.sleep(1.5 * LIMITS.head_timeout_s)
        connection.send(request(b"Content-Length: 100000", path=b"/unread") + bytes(100_000))
        assert await connection.response() == (200, "unread")
        # An application that reads late is not the client's fault.
        connection.send(request(b"Content-Length: %d" % len(body), path=b"/slow") + body)
        assert await connection.response() == (200, str(len(body)))
        for num, size in ((MAX_SMALL_PARTS, 1), (MAX_SMALL_PARTS + 1, MIN_PART_BYTES)):
            connection.send(CHUNKED + chunks(num, size) + b"0\r\n\r\n")
            assert await connection.response() == (200, str(num * size))
        connection.send(request()[:-2])
        assert await connection.response() == (408, "no headers within 0.3 s")
        await connection.close()


async def test_a_pause_counts_from_when_the_application_reads_on() -> None:
    limits = HttpLimits(pause_timeout_s=1.0)
    paused = HIGH_WATER_LIMIT + 4096
    reads_on = asyncio.Event()

    async def read_late(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.9 * limits.pause_timeout_s)
        reads_on.set()
        await count_bytes(scope, receive, send)

    async with serving(limits, read_late) as address:
        head = request(b"Content-Length: %d" % (paused + 1))
        connection = await Connection.to(address, head + bytes(paused))
        await reads_on.wait()
        await asyncio.sleep(0.5 * limits.pause_timeout_s)
        connection.send(bytes(1))
        assert await connection.response() == (200, str(paused + 1))
        await connection.close()


async def test_connections_are_limited_per_host_and_in_all() -> None:
    hosts = HttpLimits(max_connections=3, max_connections_per_host=2)
    all_of_them = HttpLimits(max_connections=2, max_connections_per_host=3)
    for limits, problem in (
        (hosts, "host 127.0.0.1 has 2 connections, the limit is 2"),
        (all_of_them, "the server has 2 connections, which is the limit"),
    ):
        async with serving(limits) as address:
            first, second = await Connection.to(address), await Connection.to(address, request())
            assert await second.response() == (200, "0")
            third = await Connection.to(address)
            assert await third.response() == (503, problem)
            assert await third.is_closed()
            await third.close()
            await first.close()
            for _ in range(3):  # a connection that ended counts no longer
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        again = await Connection.to(address, request())
                        status, _ = await again.response()
                        await again.close()
                        if status == 200:
                            break
            await second.close()
