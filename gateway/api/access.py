"""Access to the gateway's paths: the key of a request, and what is answered without one."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import grpc
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.visitors import ANYONE, Doorkeeper, NoKey, NotAdmitted, NotPermitted, TooMany, Visitor
from gateway.api.errors import ApiError, error_response, status_error
from gateway.api.messages.endpoints import message_refusal
from web.api_keys import bearer_of
from wire.addresses import counted_host

OPEN_PATHS = frozenset({"/health", "/ping", "/readyz", "/", "/favicon.ico"})
OPEN_PREFIX = "/static/"
"""The chat page holds no data; what it asks for needs the key that is entered there."""
WATCHED_PATHS = frozenset({"/metrics", "/version"})
"""All that keys of role viewer open."""
MODELS_PATH = "/v1/models"
UNCOUNTED_PATHS = frozenset({MODELS_PATH, "/openapi.json", *WATCHED_PATHS})
"""What clients ask for again and again and what costs nothing; it is no request of a key's limits."""
VISITOR = "stageline.visitor"


class RequireKey:
    """Middleware: admits requests with a key, and requests to paths that need none."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper, messages_path: str) -> None:
        """Errors below `messages_path` have Anthropic's shape."""
        self._app, self._doorkeeper, self._messages_path = app, doorkeeper, messages_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            try:
                key = _key(Headers(scope=scope))
                scope[VISITOR] = visitor = self._doorkeeper.admit(key, counts=_counts(scope))
                if path not in WATCHED_PATHS:
                    visitor.check_requests()
            except NotAdmitted as refused:
                write = message_refusal if path.startswith(self._messages_path) else error_response
                await write(as_api_error(refused))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _counts(scope: Scope) -> bool:
    path: str = scope["path"]
    is_uncounted = path in UNCOUNTED_PATHS or path.startswith(f"{MODELS_PATH}/")
    return scope["method"] not in ("GET", "HEAD") or not is_uncounted


def visitor_of(scope: Scope) -> Visitor:
    """Who makes a request; anyone at its host where no keys are required."""
    visitor: Visitor | None = scope.get(VISITOR)
    if visitor is None:
        return Visitor(host=counted_host(scope["client"][0])) if scope.get("client") else ANYONE
    return visitor


def as_api_error(refused: NotAdmitted) -> ApiError:
    """The error of a request that was not admitted."""
    match refused:
        case NoKey():
            return status_error(
                grpc.StatusCode.UNAUTHENTICATED, str(refused), headers={"www-authenticate": "Bearer"}
            )
        case TooMany(retry_after_s=retry_s):
            headers = {"retry-after": str(ceil(retry_s)), "retry-after-ms": str(ceil(retry_s * 1000))}
            return status_error(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refused), headers=headers)
        case NotPermitted(field=field):
            return status_error(grpc.StatusCode.PERMISSION_DENIED, str(refused), param=field or None)
    raise AssertionError(refused)


def _key(headers: Mapping[str, str]) -> str:
    """OpenAI's clients send a bearer token, Anthropic's a header of their own."""
    bearer = bearer_of(headers)
    return headers.get("x-api-key", "").strip() if bearer is None else bearer
