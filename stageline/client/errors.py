"""Client exceptions, one class per gRPC status.

Source: https://google.aip.dev/193, and github.com/googleapis/googleapis google/rpc/error_details.proto.

    StagelineError
        InvalidRequest      INVALID_ARGUMENT, or rejected before sending
        RequestExists       ALREADY_EXISTS
        RequestNotFound     NOT_FOUND
        WorkerNotFound      NOT_FOUND, of a worker
        Overloaded          RESOURCE_EXHAUSTED
        Unavailable         UNAVAILABLE, or no server at the address
        DeadlineExceeded    DEADLINE_EXCEEDED
        Cancelled           CANCELLED
        PermissionDenied    PERMISSION_DENIED, or UNAUTHENTICATED: missing or wrong secret or token
        StepFailed          ABORTED
        Superseded          ABORTED, with the reason SUPERSEDED in google.rpc.ErrorInfo
        ServerError         any other status, and responses that violate the protocol
"""

from dataclasses import dataclass
from typing import Self

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

SUPERSEDED = "SUPERSEDED"
"""ErrorInfo.reason of a call whose request another call has attached to."""

SUSPENDED = "REQUEST_SUSPENDED"
"""ErrorInfo.reason of a call whose request the next coordinator continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusDetails:
    """Details of a status. `is_present` is False for a status created by gRPC for a lost connection."""

    is_present: bool = False
    retry_after_s: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """Read the details of an error; absent or invalid ones are empty."""
        try:
            status = rpc_status.from_call(error)
        except (DecodeError, ValueError):
            return cls(is_present=True)
        return cls() if status is None else cls._from_status(status)

    @classmethod
    def _from_status(cls, status: status_pb2.Status) -> Self:
        retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        retry_after_s: float | None = None
        for detail in status.details:
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
            detail.Unpack(info)
        return cls(is_present=True, retry_after_s=retry_after_s, reason=info.reason)


class StagelineError(Exception):
    """Base of all client errors: `code` is the name of the gRPC status, `message` the text.

    `reason` is the stable code in the server's google.rpc.ErrorInfo, or the client's own;
    for a status created by gRPC, such as for a lost connection, it is the status name.
    """

    code = "UNKNOWN"
    reason = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason


class InvalidRequest(StagelineError, ValueError):
    """A parameter is out of range, or the sequence is longer than the model or the cache can hold."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class RequestExists(StagelineError):
    """A live or kept request has this request_id."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_EXISTS"


class RequestNotFound(StagelineError):
    """No live request, and no kept output, has this request_id."""

    code = "NOT_FOUND"
    reason = "REQUEST_NOT_FOUND"


class WorkerNotFound(StagelineError):
    """The cluster has no worker of this name."""

    code = "NOT_FOUND"
    reason = "WORKER_NOT_FOUND"


class Overloaded(StagelineError):
    """The waiting queue is full, or this client has too many requests.

    `retry_after_s` is the server's retry delay (google.rpc.RetryInfo), or None.
    """

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"
    retry_after_s: float | None = None


class Unavailable(StagelineError):
    """No coordinator at the address, no stage workers in time, or a permanently lost connection."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DeadlineExceeded(StagelineError):
    """The request took longer than its timeout."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(StagelineError):
    """The server cancelled the call: by Cancel, or because the client read too slowly."""

    code = "CANCELLED"
    reason = "CANCELLED"


class PermissionDenied(StagelineError):
    """The call lacks the secret of the request, or the operator token."""

    code = "PERMISSION_DENIED"
    reason = "ATTACH_SECRET_MISMATCH"


class StepFailed(StagelineError):
    """The step with this request failed; sending the request again is safe."""

    code = "ABORTED"
    reason = "STEP_FAILED"


class Superseded(StagelineError):
    """Another call has attached to the request and continues it. Sending it again would duplicate it."""

    code = "ABORTED"
    reason = "SUPERSEDED"


class ServerError(StagelineError):
    """A server error that the request did not cause."""

    code = "INTERNAL"
    reason = "BAD_RESPONSE"


_KINDS: dict[str, type[StagelineError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        RequestExists,
        RequestNotFound,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        PermissionDenied,
        StepFailed,
        ServerError,
    )
}
_KINDS["UNAUTHENTICATED"] = PermissionDenied


_REFUSED_STREAM = "RST_STREAM with error code 7"
"""In gRPC's text for REFUSED_STREAM (RFC 9113, section 8.7): the call has not been processed at all."""
REFUSED_RETRY_S = 1.0


def is_refused_stream(error: grpc.aio.AioRpcError) -> bool:
    """Whether a server or proxy refused the call before it read it, for too many open calls."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and _REFUSED_STREAM in (error.details() or "")


def from_rpc_error(error: grpc.aio.AioRpcError) -> StagelineError:
    """Convert a gRPC error, with the server's text."""
    if is_refused_stream(error):
        refused = Overloaded("the connection has too many open calls: send fewer at once, or try again")
        refused.retry_after_s = REFUSED_RETRY_S
        return refused
    code = error.code().name
    details = StatusDetails.of(error)
    kind = Superseded if details.reason == SUPERSEDED else _KINDS.get(code, ServerError)
    text = error.details() or f"the call ended with {code}"
    typed = kind(text, code=code, reason=details.reason or code)
    if isinstance(typed, Overloaded):
        typed.retry_after_s = details.retry_after_s
    return typed
