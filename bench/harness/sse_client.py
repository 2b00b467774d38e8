"""A light client: reads streams of server-sent events, and counts them without parsing.

    python -m bench.harness.sse_client URL_PATH BODY_JSON STREAMS HOST:PORT...

Prints a line "STARTED EVENTS BAD" for each line on standard input: streams with an event, events of all, and
responses that were not a stream.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

_END = b"\r\n0\r\n\r\n"


class EventReader(asyncio.Protocol):
    """One connection with one stream; a new one follows its end."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: Any = None
        self._is_begun = False
        self._last = b""
        self.num_events = 0
        self.num_bad = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._is_begun:
            self._is_begun = True
            self.num_bad += not data.startswith(b"HTTP/1.1 200")
        self.num_events += data.count(b"data: ")
        self._last = (self._last + data)[-len(_END) :]
        if self._last.endswith(_END):
            self._is_begun, self._last = False, b""
            self._transport.write(self._request)


async def _run(path: str, body: str, num_streams: int, addresses: list[str]) -> None:
    loop = asyncio.get_running_loop()
    readers = []
    for number in range(num_streams):
        host, _, port = addresses[number % len(addresses)].rpartition(":")
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body.encode())}\r\n\r\n"
        )
        reader = EventReader(head.encode() + body.encode())
        readers.append(reader)
        await loop.create_connection(lambda reader=reader: reader, host, int(port))  # type: ignore[misc]
    while await loop.run_in_executor(None, sys.stdin.readline):
        started = sum(reader.num_events > 1 for reader in readers)
        events = sum(reader.num_events for reader in readers)
        print(started, events, sum(reader.num_bad for reader in readers), flush=True)


if __name__ == "__main__":
    uvloop.run(_run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
