"""Errors of the HTTP API: one table from gRPC statuses, one JSON shape."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import grpc
import orjson
from starlette.responses import Response

from gateway.upstream.contract import UpstreamFailure
from wire.foreign_text import printable_line

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
INTERNAL_ERROR_TEXT = "internal error; the gateway's log has the detail"
NO_RETRY = {"x-should-retry": "false"}
"""For statuses that OpenAI's clients retry by default, though the same request fails again."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP status, `type` and `code` of an error, and headers that say whether to retry."""

    status: int
    type: str
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_KIND_OF_STATUS: dict[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind(400, INVALID_REQUEST, headers=NO_RETRY),
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind(400, INVALID_REQUEST, headers=NO_RETRY),
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind(401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind(403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: ErrorKind(404, "not_found_error"),
    grpc.StatusCode.ALREADY_EXISTS: ErrorKind(409, "conflict_error", headers=NO_RETRY),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: ErrorKind(499, "cancelled_error", "request_cancelled", NO_RETRY),
    grpc.StatusCode.UNAVAILABLE: ErrorKind(503, "service_unavailable_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind(504, "timeout_error", "deadline_exceeded", NO_RETRY),
}
_SERVER_ERROR = ErrorKind(500, "server_error")
_KIND_OF_HTTP: dict[int, ErrorKind] = {
    404: ErrorKind(404, "not_found_error", "not_found"),
    405: ErrorKind(405, INVALID_REQUEST, "method_not_allowed"),
    413: ErrorKind(413, INVALID_REQUEST, "body_too_large", NO_RETRY),
    415: ErrorKind(415, INVALID_REQUEST, "unsupported_media_type"),
}
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
MODEL_NOT_FOUND = "model_not_found"
DEFAULT_RETRY_S = 1.0
UNSERVABLE = "SLICE_FAILED"
"""The reason of a request of which no next token can be sampled; it fails again."""


class ApiError(Exception):
    """An error to send to the client; `param` names the field that it is about."""

    def __init__(
        self,
        message: str,
        kind: ErrorKind,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = kind.status
        self.body = {
            "message": printable_line(message),
            "type": kind.type,
            "param": param,
            "code": code or kind.code,
        }
        self.headers = {**kind.headers, **(headers or {})}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error of a field that cannot be served."""
    return ApiError(message, _KIND_OF_STATUS[grpc.StatusCode.INVALID_ARGUMENT], param=param, code=code)


def http_error(
    status: int, message: str, headers: Mapping[str, str] | None = None, *, param: str | None = None
) -> ApiError:
    """Make the error of an HTTP status, such as of an unknown path."""
    kind = _KIND_OF_HTTP.get(status) or ErrorKind(status, INVALID_REQUEST if status < 500 else "server_error")
    return ApiError(message, kind, headers=headers, param=param)


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(
        f"model {name!r} is not served here, {served!r} is",
        _KIND_OF_STATUS[grpc.StatusCode.NOT_FOUND],
        param="model",
        code=MODEL_NOT_FOUND,
    )


def status_error(
    status: grpc.StatusCode,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ApiError:
    """Make the error that the table has for a gRPC status."""
    return ApiError(message, _KIND_OF_STATUS[status], param=param, headers=headers)


def unavailable(message: str) -> ApiError:
    """Make the error of a gateway that cannot serve now."""
    return api_error(UpstreamFailure(message, status=grpc.StatusCode.UNAVAILABLE, reason="UNAVAILABLE"))


def api_error(error: Exception) -> ApiError:
    """Convert any exception; unknown ones are logged, and their text is not sent."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, UpstreamFailure):
        log.error("request failed", exc_info=error)
        return ApiError(INTERNAL_ERROR_TEXT, _SERVER_ERROR)
    kind = _KIND_OF_STATUS.get(error.status, _SERVER_ERROR)
    if error.reason == UNSERVABLE:
        kind = replace(kind, headers=NO_RETRY)
    code = kind.code or (error.reason.lower() if error.reason != "INVALID_REQUEST" else None)
    return ApiError(error.message, kind, code=code, param=error.field or None, headers=_retry_headers(error))


def _retry_headers(error: UpstreamFailure) -> dict[str, str]:
    """Seconds and milliseconds: OpenAI's clients prefer the latter."""
    if error.status not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        return {}
    retry_s = DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    return {"retry-after": str(ceil(retry_s)), "retry-after-ms": str(ceil(retry_s * 1000))}


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.body}


def error_response(error: ApiError) -> Response:
    return Response(
        orjson.dumps(error_body(error)),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
