"""An HTTP server with a thread and an event loop of its own, which answers while the process is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from web.server import HttpServer
from wire.addresses import Address

_JOIN_TIMEOUT_S = 5.0
_LAST_ITERATIONS = 4
"""Of the event loop: transports that were closed with TLS free their sockets in callbacks of callbacks."""


class ServerThread:
    """Serves from `start` to `stop`."""

    def __init__(self, server: HttpServer, *, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        """`on_start` is called first, in the thread."""
        self._server, self._on_start = server, on_start
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._started = Future[None]()

    @property
    def url(self) -> str:
        """URL from this machine."""
        return self._server.url

    @property
    def address(self) -> Address:
        """Where it listens; after `start` with the port that was chosen for port 0."""
        return self._server.address

    def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Close every connection."""
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        self._on_start()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        try:
            await self._server.start()
        except OSError as error:
            self._started.set_exception(error)
            return
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._started.set_result(None)
        await self._stopping.wait()
        await self._server.stop()
        for _ in range(_LAST_ITERATIONS):
            await asyncio.sleep(0)
