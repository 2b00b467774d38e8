"""gRPC calls that send part of their message and then nothing, which no gRPC library does."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from types import TracebackType

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

PREFIX_BYTES = 5
"""Of a message: whether it is compressed, and its length."""
MAX_FRAME_BYTES = 16_384
_PING_ANSWER = b"\0\0\x08\x06\x01\0\0\0\0" + bytes(8)
"""A frame that the server neither expects nor minds."""


class UnfinishedCalls:
    """One connection with calls whose message lacks its last byte, until `finish`."""

    def __init__(
        self,
        address: str,
        tls: ssl.SSLContext | None = None,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        num_pings: int = 0,
    ) -> None:
        """With `tls`, which offers h2 and has the caller's certificate.

        A frame has up to `max_frame_bytes` of a message; `num_pings` others, of 17 bytes, come after it.
        """
        self._max_frame_bytes, self._filler = max_frame_bytes, _PING_ANSWER * num_pings
        self._host, port = address.rsplit(":", 1)
        self._port, self._tls = int(port), tls
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._unsent: dict[int, list[memoryview]] = {}
        self.num_sent: dict[int, int] = {}
        """Bytes of each call, with the 5 before its message."""
        self.ended: dict[int, tuple[str, str]] = {}
        """Status code and message of each call that has ended."""
        self.answered: set[int] = set()
        """Calls with a message of the server."""
        self.is_closed = False
        """By the server."""

    async def __aenter__(self) -> UnfinishedCalls:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        self._http.initiate_connection()
        self._flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def open(self, method: str, message: bytes, *, before: bytes | None = None) -> int:
        """Call `method` with all of `message` but its last byte; return the stream's number.

        A whole message may come `before` it.
        """
        stream = self._http.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "test")]
        headers += [("content-type", "application/grpc"), ("te", "trailers")]
        self._http.send_headers(stream, headers)
        whole = b"" if before is None else _prefix(before) + before
        self._unsent[stream] = [memoryview(whole + _prefix(message)), memoryview(message)[:-1]]
        self.num_sent[stream] = 0
        return stream

    def finish(self, stream: int, message: bytes) -> None:
        """Send the last byte of a message whose other bytes were sent."""
        assert not self._unsent[stream], "the other bytes were not sent"
        self._http.send_data(stream, message[-1:], end_stream=True)
        self._flush()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Exchange frames until something holds, or the server closes the connection."""
        while not self.is_closed and not holds():
            await self._send()
            if holds():
                break
            data = await self._reader.read(1 << 16)
            self.is_closed = not data
            for event in self._http.receive_data(data):
                self._note(event)

    def _note(self, event: object) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                found = {str(name): str(value) for name, value in event.headers or ()}
                if "grpc-status" in found and event.stream_id is not None:
                    self.ended[event.stream_id] = found["grpc-status"], found.get("grpc-message", "")
            case DataReceived():
                self.answered.add(event.stream_id or 0)
                length = event.flow_controlled_length or 0
                self._http.acknowledge_received_data(length, event.stream_id or 0)
            case ConnectionTerminated():
                self.is_closed = True
            case StreamReset() | StreamEnded() if event.stream_id is not None:
                self.ended.setdefault(event.stream_id, ("reset", ""))
                self._unsent[event.stream_id].clear()

    async def _send(self) -> None:
        """As much as the server's windows allow."""
        for stream, parts in self._unsent.items():
            while parts and stream not in self.ended:
                window = self._http.local_flow_control_window(stream)
                room = min(window, self._max_frame_bytes, len(parts[0]))
                if not room:
                    break
                self._http.send_data(stream, parts[0][:room])
                self.num_sent[stream] += room
                parts[0] = parts[0][room:]
                if not parts[0]:
                    del parts[0]
                self._flush()
                self._writer.write(self._filler)
                await self._writer.drain()
                await asyncio.sleep(0)  # others have their turn even if the buffer has room
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())


def _prefix(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(PREFIX_BYTES - 1, "big")
