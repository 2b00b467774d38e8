"""Parts of a response, written to the connection directly: for streams of many small parts.

Each part through ASGI costs a coroutine per layer, and several objects of h11, which knows the framing of
chunked responses as well as this module does. Start and end of a response remain h11's.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from web.headers import keep_out_of_caches

EXTENSION = "stageline.direct_chunks"
"""Key of a `DirectChunks` in `scope["extensions"]`; absent where parts must go through `send`."""
PEER_CERTIFICATE = "stageline.peer_certificate"
"""Key of the certificate that the client proved, in DER form; None for a client without one."""


class DirectChunks:
    """Writes parts of one chunked response, after `http.response.start` and before the last part."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._transport = protocol.transport
        self._cycle: Any = protocol.cycle
        self._flow = protocol.flow

    def write(self, part: bytes) -> bool:
        """Write a part, which is not empty; False if the connection is congested."""
        if self._cycle.disconnected:
            return True
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Wait until the connection takes more, or is closed."""
        await self._flow.drain()


class ChunkedProtocol(H11Protocol):
    """HTTP/1.1 whose applications find `DirectChunks` in the scope, and whose responses are not cached."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._application: Any = self.app
        self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions: dict[str, Any] = {PEER_CERTIFICATE: _peer_certificate(self.transport)}
        if scope["http_version"] == "1.1":  # older clients know no chunks
            extensions[EXTENSION] = DirectChunks(self)
        scope["extensions"] = extensions

        async def send_uncached(message: Message) -> None:
            if message["type"] == "http.response.start":
                keep_out_of_caches(message)
            await send(message)

        await self._application(scope, receive, send_uncached)


def _peer_certificate(transport: Any) -> bytes | None:
    connection = transport.get_extra_info("ssl_object")
    return None if connection is None else connection.getpeercert(binary_form=True)
