"""Parts of a response, written to the connection directly: for streams of many small parts.

Each part through ASGI costs a coroutine per layer, and several objects of h11, which knows the framing of
chunked responses as well as this module does. Start and end of a response remain h11's.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

EXTENSION = "stageline.direct_chunks"
"""Key of a `DirectChunks` in `scope["extensions"]`; absent where parts must go through `send`."""


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
