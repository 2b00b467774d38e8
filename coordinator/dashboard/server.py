"""HTTP server of the dashboard."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from math import ceil

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.dashboard.auth import DashboardAuth, error_response
from coordinator.dashboard.login import Login
from coordinator.dashboard.routes import DashboardContext, Routes
from web.api_keys import KeysFile
from web.connection_limits import FOR_OPERATORS
from web.server import HttpServer
from wire.addresses import parse_address
from wire.errors import InvalidRequest, Overloaded, RequestNotFound, ServingError, reason_of
from wire.peer_secrets import RefusedPeers

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 15.0
_STATUSES: dict[type[ServingError], int] = {RequestNotFound: 404, InvalidRequest: 400, Overloaded: 429}
PORT_HINT = "choose another port with --http HOST:PORT, or none with --no-http"


class DashboardServer:
    """Serves the dashboard on `listen` (HOST:PORT) from `start` to `stop`."""

    def __init__(
        self,
        context: DashboardContext,
        *,
        listen: str,
        token: str | None,
        refused: RefusedPeers | None = None,
        tls: ssl.SSLContext | None = None,
        keys: KeysFile | None = None,
        needs_login: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` counts and logs wrong keys and tokens. With `needs_login` only holders of one of `keys`
        or of the token are served.
        """
        address, refused = parse_address(listen), refused or RefusedPeers(clock)
        login = Login(keys, token, refused, is_tls=tls is not None, clock=clock) if needs_login else None
        auth = DashboardAuth(address.host, token, refused, login=login)
        self._routes = Routes(context, auth)
        application = Starlette(
            routes=self._routes.table(),
            middleware=[Middleware(DashboardGuard, auth=auth)],
            exception_handlers={HTTPException: _http_error_response},
        )
        self._server = HttpServer(
            application, address, name="the dashboard", hint=PORT_HINT, tls=tls, limits=FOR_OPERATORS
        )

    @property
    def url(self) -> str:
        """URL from this machine."""
        return self._server.url

    async def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        await self._server.start()

    async def stop(self) -> None:
        """Close every connection."""
        self._routes.close()
        await self._server.stop()


class DashboardGuard:
    """Middleware: refuses forbidden requests, limits their time, and converts errors of handlers."""

    def __init__(self, app: ASGIApp, auth: DashboardAuth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._auth.refusal(Request(scope)) or await self._failure_of(scope, receive, send)
        if error is not None:
            await error(scope, receive, send)

    async def _failure_of(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Run the handler; return the response to its error. Handlers answer at their end, in one piece."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._app(scope, receive, send)
        except ServingError as error:
            response = error_response(_STATUSES.get(type(error), 409), str(error), reason_of(error))
            if isinstance(error, Overloaded) and error.retry_after_s is not None:
                response.headers["Retry-After"] = str(ceil(error.retry_after_s))
            return response
        except TimeoutError:
            return error_response(504, f"no answer within {REQUEST_TIMEOUT_S:g} s")
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            return error_response(500, "internal error; the coordinator's log has the details")
        return None


async def _http_error_response(request: Request, error: Exception) -> Response:
    """Response for an HTTPException, with its headers."""
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response
