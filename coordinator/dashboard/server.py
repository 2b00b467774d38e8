"""HTTP server of the dashboard."""

import logging
import socket
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.dashboard.auth import MAX_BODY_BYTES, DashboardAuth, add_security_headers
from coordinator.dashboard.routes import DashboardContext, Routes
from wire.addresses import Address, local_address, parse_address
from wire.peer_secrets import RefusedPeers

log = logging.getLogger(__name__)


class AiohttpLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs non-HTTP connections at debug: any client can send such bytes."""

    def __init__(self) -> None:
        super().__init__(log, {})

    def exception(self, msg: object, *args: object, exc_info: Any = True, **named: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            reason = " ".join(exc_info.message.split())
            super().debug("non-HTTP request from %s: %.200r", args[0] if args else None, reason)
        else:
            super().error(msg, *args, exc_info=exc_info, **named)


MAX_HEADER_BYTES = 8190
KEEPALIVE_S = 30.0
STOP_GRACE_S = 1.0


class DashboardServer:
    """Serves the dashboard on `listen` (HOST:PORT) from `start` to `stop`."""

    def __init__(
        self,
        context: DashboardContext,
        *,
        listen: str,
        token: str | None,
        refused: RefusedPeers | None = None,
    ) -> None:
        """`refused` counts and logs wrong operator tokens."""
        self._address = parse_address(listen)
        auth = DashboardAuth(self._address.host, token, refused or RefusedPeers(time.monotonic))
        self._routes = Routes(context, auth)
        self.app = web.Application(middlewares=[auth.middleware], client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(self._routes.table())
        self.app.on_response_prepare.append(add_security_headers)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """URL from this machine."""
        return f"http://{local_address(self._address)}/"

    async def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        listening = _bind(self._address)
        self._address = Address(self._address.host, listening.getsockname()[1])
        self._runner = web.AppRunner(
            self.app,
            access_log=None,
            logger=AiohttpLogger(),
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            shutdown_timeout=STOP_GRACE_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        """Close every connection."""
        self._routes.close()
        if self._runner is not None:
            await self._runner.cleanup()


def _bind(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, sockaddr = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(sockaddr)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "choose another port with --http HOST:PORT, or none with --no-http"
        raise OSError(f"cannot serve the dashboard on {address}: {reason.lower()}; {hint}") from None
    return listening
