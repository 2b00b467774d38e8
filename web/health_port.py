"""Plain HTTP port for probes without certificates, `/healthz` and `/readyz`, answered by an own thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from threading import Thread

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from web.connection_limits import FOR_OPERATORS, HttpLimits
from web.server import HttpServer
from wire.addresses import parse_address
from wire.condition import Condition

PORT_HINT = "choose another address with --health-listen HOST:PORT"
METHODS = ("GET", "HEAD")
_JOIN_TIMEOUT_S = 5.0


class _Answers:
    """The application."""

    def __init__(self, condition: Callable[[], Condition]) -> None:
        self._condition = condition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope["method"], scope["path"])(scope, receive, send)

    def _response(self, method: str, path: str) -> PlainTextResponse:
        if path not in ("/healthz", "/readyz"):
            return PlainTextResponse("not found\n", HTTPStatus.NOT_FOUND)
        if method not in METHODS:
            headers = {"allow": ", ".join(METHODS)}
            return PlainTextResponse("method not allowed\n", HTTPStatus.METHOD_NOT_ALLOWED, headers)
        if path == "/healthz":
            return PlainTextResponse("ok\n")
        condition = self._condition()
        status = HTTPStatus.OK if condition.is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return PlainTextResponse(f"{condition.text}\n", status)


class HealthPort:
    """Answers probes while the process runs, also when its event loop is busy."""

    def __init__(
        self, listen: str, condition: Callable[[], Condition], *, limits: HttpLimits = FOR_OPERATORS
    ) -> None:
        """`condition` is called in the thread of the port."""
        self._server = HttpServer(
            _Answers(condition), parse_address(listen), name="health", hint=PORT_HINT, limits=limits
        )
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="health port", daemon=True)
        self._started = Future[None]()

    @property
    def url(self) -> str:
        """URL from this machine."""
        return self._server.url

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


@contextlib.contextmanager
def health_port(listen: str | None, condition: Callable[[], Condition]) -> Iterator[None]:
    """Serve on `listen`, if it is given, while the block runs. Raises OSError."""
    if listen is None:
        yield
        return
    port = HealthPort(listen, condition)
    port.start()
    print(f"health at {port.url}", flush=True)
    try:
        yield
    finally:
        port.stop()
