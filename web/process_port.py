"""An HTTP port for other processes of the cluster, which are admitted by their certificates."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from web.connection_limits import HttpLimits
from web.protocol import PEER_CERTIFICATE
from web.server import HttpServer
from web.server_thread import ServerThread
from wire.addresses import Address, counted_host
from wire.authorization import CertificateGate
from wire.errors import AccessDenied, CertificateRefused, reason_of
from wire.peer_secrets import RefusedPeers
from wire.transport import Transport


class ProcessPort(ServerThread):
    """Serves an application to callers that `ROLES_OF_PATH` admits, from a thread of its own."""

    def __init__(
        self,
        application: ASGIApp,
        address: Address,
        *,
        name: str,
        limits: HttpLimits,
        transport: Transport,
        deny_list: Path | None,
        refused: RefusedPeers,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` is what is served, as in --NAME-listen. Raises OSError or ValueError for a bad deny list.

        `refused` is used by the thread only.
        """
        gate = CertificateGate(transport, deny_list, refused)
        server = HttpServer(
            RoleGuard(application, gate, refused),
            address,
            name=name,
            hint=f"choose another address with --{name}-listen HOST:PORT",
            tls=transport.http_context(asks_certificates=True),
            limits=limits,
        )
        super().__init__(server, name=f"{name} port", on_start=on_start)


class RoleGuard:
    """An application behind the table of authorisation; refusals are counted and logged."""

    def __init__(self, application: ASGIApp, gate: CertificateGate, refused: RefusedPeers) -> None:
        self._application, self._gate, self._refused = application, gate, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions: dict[str, Any] = scope.get("extensions", {})
        try:
            self._gate.admit(extensions.get(PEER_CERTIFICATE), scope["path"])
        except (CertificateRefused, AccessDenied) as error:
            host = counted_host(scope["client"][0]) if scope.get("client") else "unknown"
            self._refused.note(f"{scope['method']} {scope['path'][:64]}", str(error), host=host)
            is_known = isinstance(error, AccessDenied)
            status = HTTPStatus.FORBIDDEN if is_known else HTTPStatus.UNAUTHORIZED
            body = json.dumps({"error": str(error), "reason": reason_of(error)}).encode()
            await Response(body, status, media_type="application/json")(scope, receive, send)
            return
        await self._application(scope, receive, send)
