"""Logging in to the dashboard: sessions in cookies for browsers, keys and the token for other programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.dashboard.credentials import Credentials, unauthorized
from coordinator.dashboard.sessions import Sessions, User
from web.api_keys import KeysFile, bearer_of
from wire.audit import Action, AuditOutcome, Who
from wire.peer_secrets import RefusedPeers

COOKIE = "stageline-session"
_FORM = "application/x-www-form-urlencoded"
_READING = frozenset({"GET", "HEAD"})


class Login:
    """Who makes a request, by its cookie or its Authorization header."""

    def __init__(
        self,
        keys: KeysFile | None,
        token: str | None,
        refused: RefusedPeers,
        *,
        is_tls: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` counts, logs and limits wrong keys and tokens."""
        self._credentials = Credentials(keys, token, refused)
        self._sessions = Sessions(clock)
        self._refused, self._audit = refused, refused.audit
        self._is_tls = is_tls
        # Browsers take a name with this prefix over HTTPS only, and from this very host.
        self._cookie = f"__Host-{COOKIE}" if is_tls else COOKIE

    async def user_of(self, request: Request) -> User:
        """Raises HTTPException and Overloaded for a request without a session, a key or the token."""
        if (text := bearer_of(request.headers)) is not None:
            return await self._credentials.user_of(text, call="an HTTP request", host=host_of(request))
        token = request.cookies.get(self._cookie, "")
        user = self._sessions.find(token)
        if user is not None and (user := await self._credentials.current(user)) is None:
            self._sessions.end(token)
        if user is None:
            raise unauthorized("log in at /login, or send Authorization: Bearer KEY")
        if request.method not in _READING:
            self._check_origin(request, is_browser=True, who=user.name)
        return user

    async def begin(self, request: Request) -> Response:
        """Log in with the key in the body; the response sets the cookie. Raises as `user_of`.

        A session is always a new one, whatever cookie the request has; the former one ends.
        """
        self._check_origin(request, is_browser=False, action=Action.LOGIN)
        text, host = await _key_in(request), host_of(request)
        user = await self._credentials.user_of(text, call="a login", host=host, action=Action.LOGIN)
        self._sessions.end(request.cookies.get(self._cookie, ""))
        self._audit.record(Action.LOGIN, AuditOutcome.OK, who=user.name, host=host)
        response = Response(json.dumps(user_fields(user)).encode(), media_type="application/json")
        self._set_cookie(response, self._sessions.begin(user))
        return response

    async def end(self, request: Request) -> Response:
        """Log out."""
        user = self._sessions.end(request.cookies.get(self._cookie, ""))
        if user is not None:
            self._audit.record(Action.LOGOUT, AuditOutcome.OK, who=user.name, host=host_of(request))
        response = Response(b"{}", media_type="application/json")
        self._set_cookie(response, "", max_age=0)
        return response

    def _check_origin(
        self, request: Request, *, is_browser: bool, who: Who | None = None, action: Action = Action.DENIAL
    ) -> None:
        """Refuse what another site's page sends. Browsers say with every POST where it comes from."""
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        is_named = site is not None or origin is not None
        own = f"{request.url.scheme}://{request.headers.get('Host', '')}"
        if is_named and site in (None, "same-origin") and origin in (None, own):
            return
        if is_named or is_browser:
            problem = "the request does not come from a page of this dashboard"
            call = f"{request.method} {request.url.path[:100]}"
            self._refused.note(call, problem, host=host_of(request), who=who, action=action)
            raise HTTPException(403, problem)

    def _set_cookie(self, response: Response, value: str, *, max_age: int | None = None) -> None:
        response.set_cookie(
            self._cookie,
            value,
            max_age=max_age,
            path="/",
            secure=self._is_tls,
            httponly=True,
            samesite="strict",
        )


def host_of(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def user_fields(user: User) -> dict[str, Any]:
    return {"name": user.name, "role": "operator" if user.is_operator else "viewer"}


async def _key_in(request: Request) -> str:
    """The key in a form or a JSON object. Raises HTTPException."""
    body = await request.body()
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/json":
            fields: Any = json.loads(body)
        elif kind == _FORM:
            parsed = parse_qs(body.decode("ascii"), strict_parsing=True, max_num_fields=2)
            fields = {name: values[0] for name, values in parsed.items() if len(values) == 1}
        else:
            raise HTTPException(415, f"the content type must be application/json or {_FORM}")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.keys() != {"key"} or not isinstance(fields["key"], str):
        raise HTTPException(400, "the body must have one field, key, with an API key or the operator token")
    return fields["key"].strip()
