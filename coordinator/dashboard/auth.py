"""Access control of the dashboard: host names, size of bodies, operator token."""

import hmac
import ipaddress
import json
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from wire.peer_secrets import RefusedPeers

MAX_BODY_BYTES = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def error_response(status: int, text: str, reason: str | None = None) -> Response:
    """Build an error response; `reason` is its code (default: the name of the status)."""
    body = json.dumps({"error": text, "reason": reason or HTTPStatus(status).name}).encode()
    return Response(body, status, media_type="application/json")


class DashboardAuth:
    """Decides who is served: host names, size of bodies, operator token."""

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

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that no handler sees."""
        if not self._is_served(request):
            # protects against DNS rebinding: another site's name may resolve to this machine
            return error_response(421, f"host {request.headers.get('host', '')!r} is not served")
        if _body_bytes(request) > MAX_BODY_BYTES:
            return error_response(413, f"the body exceeds the limit of {MAX_BODY_BYTES} bytes")
        return None

    def check_token(self, request: Request) -> None:
        """Raises the HTTP error for a caller without the operator token."""
        if self._token is None:
            raise HTTPException(403, "this coordinator was started without --token-file: read only")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            if given.strip():
                host = request.client.host if request.client else "unknown"
                self._refused.note("an HTTP request", "wrong operator token", host=host)
            raise HTTPException(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def _is_served(self, request: Request) -> bool:
        return self._names is None or _name_of(request.headers.get("Host", "")) in self._names


def _body_bytes(request: Request) -> int:
    """Size of the body; above the limit if it is not known."""
    if "Transfer-Encoding" in request.headers:
        return MAX_BODY_BYTES + 1
    return int(request.headers.get("Content-Length", 0))


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
