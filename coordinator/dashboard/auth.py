"""Access control of the dashboard: host names, token, security headers, errors."""

import asyncio
import hmac
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import hdrs, web

from wire.errors import InvalidRequest, RequestNotFound, ServingError, reason_of
from wire.peer_secrets import RefusedPeers

log = logging.getLogger(__name__)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_TIMEOUT_S = 15.0
MAX_BODY_BYTES = 4096
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Server": "stageline",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATUSES: dict[type[ServingError], int] = {RequestNotFound: 404, InvalidRequest: 400}
_KEPT_HEADERS = frozenset({hdrs.ALLOW, hdrs.WWW_AUTHENTICATE})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def error_response(status: int, text: str, reason: str | None = None) -> web.Response:
    """Build an error response; `reason` is its code (default: the name of the status)."""
    body = json.dumps({"error": text, "reason": reason or HTTPStatus(status).name}).encode()
    return web.Response(status=status, body=body, content_type="application/json")


async def add_security_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add security headers to every response, errors included."""
    for name, value in SECURITY_HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")


class DashboardAuth:
    """Rejects forbidden requests, and converts exceptions of handlers to responses."""

    def __init__(self, host: str, token: str | None, refused: RefusedPeers) -> None:
        """`host` is the listen address. Without a token, the dashboard is read-only. `refused` counts and
        logs wrong tokens.
        """
        self._names = _LOOPBACK_NAMES | {host.lower()} if _is_loopback(host) else None
        self._token = token
        self._refused = refused

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check host and body size, call the handler with a timeout, and convert its errors."""
        if not self._is_served(request):
            # protects against DNS rebinding: another site's name may resolve to this machine
            return error_response(421, f"host {request.host!r} is not served")
        if request.body_exists and (request.content_length or MAX_BODY_BYTES + 1) > MAX_BODY_BYTES:
            return error_response(413, f"the body exceeds the limit of {MAX_BODY_BYTES} bytes")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await handler(request)
        except web.HTTPException as error:
            response = error_response(error.status, error.text or error.reason)
            for name in _KEPT_HEADERS & error.headers.keys():
                response.headers[name] = error.headers[name]
            return response
        except ServingError as error:
            return error_response(_STATUSES.get(type(error), 409), str(error), reason_of(error))
        except TimeoutError:
            return error_response(504, f"no answer within {REQUEST_TIMEOUT_S:g} s")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(500, "internal error; the coordinator's log has the details")

    def check_token(self, request: web.Request) -> None:
        """Raises the HTTP error for a caller without the operator token."""
        if self._token is None:
            raise web.HTTPForbidden(text="this coordinator was started without --token-file: read only")
        scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            if given.strip():
                host = request.remote or "unknown"
                self._refused.note("an HTTP request", "wrong operator token", host=host)
            raise web.HTTPUnauthorized(
                text="the token is missing or wrong", headers={hdrs.WWW_AUTHENTICATE: "Bearer"}
            )

    def _is_served(self, request: web.Request) -> bool:
        return self._names is None or _name_of(request.headers.get(hdrs.HOST, "")) in self._names


def _name_of(host_header: str) -> str:
    """The host without the port, which may belong to a port forwarding."""
    name, separator, port = host_header.rpartition(":")
    return (name if separator and port.isdigit() else host_header).lower()


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
