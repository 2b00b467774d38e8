"""An HTTP server in a running event loop: uvicorn without signal handlers and process exits."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from web.connection_limits import HttpConnections, HttpLimits
from web.headers import security_headers
from web.protocol import HttpProtocol
from wire.addresses import Address, local_address
from wire.transport import is_loopback

log = logging.getLogger(__name__)

KEEPALIVE_S = 30.0
STOP_GRACE_S = 1.0


class HttpServer:
    """Serves an ASGI application on one address, from `start` to `stop`."""

    def __init__(
        self,
        application: ASGIApp,
        address: Address,
        *,
        name: str,
        hint: str,
        stop_grace_s: float = STOP_GRACE_S,
        tls: ssl.SSLContext | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """`name` and `hint` (what to do about it) are parts of the error for an address that is in use.

        `stop` waits for open responses for `stop_grace_s`, rounded up to whole seconds, then cancels them.
        """
        self._address, self._name, self._hint = address, name, hint
        config = uvicorn.Config(
            application,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(KEEPALIVE_S),
            timeout_graceful_shutdown=max(1, round(stop_grace_s)),
            headers=security_headers(is_only_https=tls is not None and not is_loopback(str(address))),
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        self._scheme = "http" if tls is None else "https"
        self._server = uvicorn.Server(config)
        self._connections = HttpConnections(limits or HttpLimits())
        self._listening: socket.socket | None = None
        self._ticks: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        """Where it listens; after `start` with the port that was chosen for port 0."""
        return self._address

    @property
    def url(self) -> str:
        """URL from this machine."""
        return f"{self._scheme}://{local_address(self._address)}/"

    async def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        try:
            self._listening = _bind(self._address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OSError(f"cannot serve {self._name} on {self._address}: {reason}; {self._hint}") from None
        self._address = Address(self._address.host, self._listening.getsockname()[1])
        _quiet_uvicorn()
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.on_tick(0)  # the first response has all headers, too
        await self._listen(self._listening)
        self._ticks = asyncio.create_task(self._server.main_loop(), name=f"HTTP server of {self._name}")

    async def _listen(self, listening: socket.socket) -> None:
        """Do what uvicorn does, with limits."""
        server, config, limits = self._server, self._server.config, self._connections.limits
        protocol = partial(
            HttpProtocol, config, server.server_state, server.lifespan.state, connections=self._connections
        )
        server.servers = [
            await asyncio.get_running_loop().create_server(
                protocol,
                sock=listening,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else limits.tls_timeout_s,
                backlog=config.backlog,
            )
        ]
        server.started = True

    async def stop(self) -> None:
        """Close every connection."""
        if self._ticks is None or self._listening is None:
            return
        server = self._server
        server.should_exit = True
        await self._ticks
        open_ones: set[Any] = set(server.server_state.connections)
        await server.shutdown(sockets=[self._listening])
        open_ones |= server.server_state.connections  # accepted meanwhile
        for connection in open_ones:  # they would wait for clients to read, or with TLS to close their ends
            connection.transport.abort()
        self._ticks = None


def _bind(address: Address) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, sockaddr = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(sockaddr)
    except OSError:
        listening.close()
        raise
    return listening


class _ErrorsOnly(logging.Filter):
    """Passes errors of applications; everything else is logged at debug, as any client can cause it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and not record.getMessage().startswith("Cancel "):
            return True
        log.debug("HTTP: %s", record.getMessage())
        return False


def _quiet_uvicorn() -> None:
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(known, _ErrorsOnly) for known in logger.filters):
        logger.addFilter(_ErrorsOnly())
