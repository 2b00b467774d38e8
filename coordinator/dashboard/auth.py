"""Access control of the dashboard: host names, size of bodies, and who may do what."""

import json
from enum import Enum
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.dashboard.credentials import OPERATOR_TOKEN, Credentials, unauthorized
from coordinator.dashboard.login import Login, host_of
from coordinator.dashboard.sessions import User
from web.api_keys import bearer_of
from wire.audit import Action, AuditOutcome, Fact
from wire.foreign_text import printable_line
from wire.peer_secrets import RefusedPeers
from wire.transport import is_loopback_host

MAX_BODY_BYTES = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def error_response(status: int, text: str, reason: str | None = None) -> Response:
    """Build an error response; `reason` is its code (default: the name of the status)."""
    body = json.dumps({"error": printable_line(text), "reason": reason or HTTPStatus(status).name}).encode()
    return Response(body, status, media_type="application/json")


class Access(Enum):
    """Who may use a path: everyone, or users who VIEW, or operators who ACT."""

    OPEN = "open"
    VIEW = "view"
    ACT = "act"


ANYONE = User("anyone", is_operator=False)


class DashboardAuth:
    """Decides who is served: host names, size of bodies, and what users may do."""

    def __init__(
        self, host: str, token: str | None, refused: RefusedPeers, *, login: Login | None = None
    ) -> None:
        """`host` is the listen address. Without a login, everyone views, and the token permits to act;
        without a token, too, the dashboard is read-only. `refused` counts and logs wrong tokens.
        """
        self._names = _LOOPBACK_NAMES | {host.lower()} if is_loopback_host(host) else None
        self._token, self._refused, self._audit = token, refused, refused.audit
        self._credentials = Credentials(None, token, refused)
        self.login = login

    def may_act(self, user: User) -> bool:
        """Whether the page offers cancel and drain; without a login, once it has the token."""
        return self._token is not None if self.login is None else user.is_operator

    async def admit(self, request: Request, access: Access) -> User:
        """Return the user of a request. Raises HTTPException, or Overloaded after too many wrong keys."""
        if access is Access.OPEN:
            return ANYONE
        if self.login is None:
            return ANYONE if access is Access.VIEW else self._check_token(request)
        user = await self.login.user_of(request)
        if access is Access.ACT and not user.is_operator:
            problem = "a viewer may not do this: it needs a key of role operator"
            self._refused.note(
                f"{request.method} {request.url.path[:100]}", problem, host=host_of(request), who=user.name
            )
            raise HTTPException(403, problem)
        return user

    def record(self, action: Action, request: Request, user: User, **facts: Fact | None) -> None:
        """Record what a user did."""
        self._audit.record(action, AuditOutcome.OK, who=user.name, host=host_of(request), **facts)

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that no handler sees."""
        if not self._is_served(request):
            # protects against DNS rebinding: another site's name may resolve to this machine
            return error_response(421, f"host {request.headers.get('host', '')!r} is not served")
        if _body_bytes(request) > MAX_BODY_BYTES:
            return error_response(413, f"the body exceeds the limit of {MAX_BODY_BYTES} bytes")
        return None

    def _check_token(self, request: Request) -> User:
        """Raises the HTTP error for a caller without the operator token."""
        if self._token is None:
            raise HTTPException(403, "this coordinator was started without --token-file: read only")
        if self._credentials.is_token(bearer_of(request.headers) or ""):
            return OPERATOR_TOKEN
        if request.headers.get("Authorization", "").partition(" ")[2].strip():
            self._refused.note("an HTTP request", "wrong operator token", host=host_of(request))
        raise unauthorized("the token is missing or wrong")

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
