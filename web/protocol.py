"""HTTP/1.1 within limits: what exceeds them is refused before an application sees it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from web.connection_limits import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_SMALL_PARTS,
    MIN_PART_BYTES,
    HttpConnections,
    refusal_body,
)
from web.direct_chunks import EXTENSION, DirectChunks
from web.headers import keep_out_of_caches
from wire.addresses import counted_host

PEER_CERTIFICATE = "stageline.peer_certificate"
"""Key of the certificate that the client proved, in DER form; None for a client without one."""


class _Parser(h11.Connection):
    """Refuses bodies that arrive in many small parts, and those with two lengths."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_parts = self._num_bytes = 0
        self.is_head = False
        """The request is a HEAD, whose response has no body (RFC 9110, 9.3.2)."""

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self.is_head = False

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request:
            self.is_head = event.method == b"HEAD"
            _check_framing(event)
        elif type(event) is h11.Data:
            self._num_parts += 1
            self._num_bytes += len(event.data)
            if self._num_parts > MAX_SMALL_PARTS and self._num_bytes < MIN_PART_BYTES * self._num_parts:
                raise h11.RemoteProtocolError(
                    f"{self._num_bytes} bytes of the body came in {self._num_parts} parts: send larger chunks"
                )
        elif type(event) is h11.EndOfMessage:
            self._num_parts = self._num_bytes = 0
        return event


def _check_framing(request: h11.Request) -> None:
    """Raise RemoteProtocolError for a body of which another server may see another end (RFC 9112, 6.1)."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        raise h11.RemoteProtocolError("content-length beside transfer-encoding: send one of them")


class _Flow(FlowControl):
    """Says when the server reads on, because an application took what it had of a body."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        was_paused = self.read_paused
        super().resume_reading()
        if was_paused:
            self._on_resume()


class HttpProtocol(H11Protocol):
    """One connection, whose responses are not cached.

    Applications find `DirectChunks` and the peer's certificate in the scope.
    """

    def __init__(self, *arguments: Any, connections: HttpConnections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = self._parser = _Parser()
        self._application: Any = self.app
        self.app = self._serve
        self._counted, self._limits = connections, connections.limits
        self._host = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._body_end: float | None = None
        self._num_unread = 0

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._watch)
        self._host = counted_host(self.client[0]) if self.client else ""
        if (problem := self._counted.enter(self._host)) is not None:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, problem)
            return
        self._set_deadline(self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted.leave(self._host)
        self._unset_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        self._count_unread(len(data))

    def _count_unread(self, num_bytes: int) -> None:
        """Close the connection if too much of a body comes after its response."""
        if self.conn.our_state is not h11.DONE or self.conn.their_state is not h11.SEND_BODY:
            self._num_unread = 0
            return
        self._num_unread += num_bytes
        if self._num_unread > self._limits.max_unread_bytes:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    # Deadlines of heads and bodies; between requests, uvicorn's own timer runs

    def _watch(self) -> None:
        now = self.loop.time()
        match self.conn.their_state:
            case h11.SEND_BODY if self.flow.read_paused:  # the client can do nothing about it
                self._body_end = None
                self._unset_deadline()
            case h11.SEND_BODY:
                self._body_end = self._body_end or now + self._limits.body_timeout_s
                self._set_deadline(min(self._limits.pause_timeout_s, max(0.0, self._body_end - now)))
            case h11.IDLE:
                self._body_end = None
                if self._deadline is None and self.timeout_keep_alive_task is None:
                    self._set_deadline(self._limits.head_timeout_s)
            case _:
                self._body_end = None
                self._unset_deadline()

    def _set_deadline(self, after_s: float) -> None:
        self._unset_deadline()
        self._deadline = self.loop.call_later(after_s, self._expire)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        limits = self._limits
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.SEND_BODY:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no headers within {limits.head_timeout_s:g} s")
        else:
            whole_s, pause_s = limits.body_timeout_s, limits.pause_timeout_s
            problem = f"no body within {whole_s:g} s, or none of it for {pause_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, problem)

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """Called for what is not HTTP, with the reason as the current exception."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", HTTPStatus.BAD_REQUEST)
        self._refuse(HTTPStatus(status), f"{msg.rstrip('.').lower()}: {error}")

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        """Answer, if no application has begun to, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = refusal_body(status, problem)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"cache-control", b"no-store"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            content = () if self._parser.is_head else (h11.Data(data=body),)
            for event in (head, *content, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # what its application sends goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_uncached(message: Message) -> None:
            if message["type"] == "http.response.start":
                keep_out_of_caches(message)
            await send(message)

        if (refusal := _refusal(scope)) is not None:
            await refusal(scope, receive, send_uncached)
            return
        extensions: dict[str, Any] = {PEER_CERTIFICATE: _peer_certificate(self.transport)}
        if scope["http_version"] == "1.1":  # older clients know no chunks
            extensions[EXTENSION] = DirectChunks(self)
        scope["extensions"] = extensions
        await self._application(scope, receive, send_uncached)


def _refusal(scope: Scope) -> Response | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > MAX_HEADERS:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        problem = f"the request has {len(headers)} header fields, the limit is {MAX_HEADERS}"
    elif (size := _head_bytes(scope)) > MAX_HEAD_BYTES:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        problem = f"target and header fields have {size} bytes, the limit is {MAX_HEAD_BYTES}"
    elif any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers):
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        problem = "the body has a content-encoding: send it uncompressed"
    else:
        return None
    return Response(refusal_body(status, problem), status, media_type="application/json")


def _head_bytes(scope: Scope) -> int:
    """Of a head that arrived in one piece; h11 counts those that do not."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope["raw_path"]) + len(scope["query_string"]) + fields


def _peer_certificate(transport: Any) -> bytes | None:
    connection = transport.get_extra_info("ssl_object")
    return None if connection is None else connection.getpeercert(binary_form=True)
