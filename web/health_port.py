"""Plain HTTP port for probes without certificates, `/healthz` and `/readyz`, answered by an own thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from http import HTTPStatus

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from web.connection_limits import FOR_OPERATORS, HttpLimits
from web.server import HttpServer
from web.server_thread import ServerThread
from wire.addresses import parse_address
from wire.condition import Condition

PORT_HINT = "choose another address with --health-listen HOST:PORT"
METHODS = ("GET", "HEAD")


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


class HealthPort(ServerThread):
    """Answers probes while the process runs, also when its event loop is busy."""

    def __init__(
        self, listen: str, condition: Callable[[], Condition], *, limits: HttpLimits = FOR_OPERATORS
    ) -> None:
        """`condition` is called in the thread of the port."""
        server = HttpServer(
            _Answers(condition), parse_address(listen), name="health", hint=PORT_HINT, limits=limits
        )
        super().__init__(server, name="health port")


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
