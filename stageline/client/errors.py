"""Client exceptions, one class per gRPC status.

Source: https://google.aip.dev/193, and github.com/googleapis/googleapis google/rpc/error_details.proto.

StagelineError
    InvalidRequest      INVALID_ARGUMENT, or refused before it was sent
    RequestExists       ALREADY_EXISTS
    RequestNotFound     NOT_FOUND
    WorkerNotFound      NOT_FOUND, of a worker
    Overloaded          RESOURCE_EXHAUSTED
    Unavailable         UNAVAILABLE, or nobody answers at the address
    DeadlineExceeded    DEADLINE_EXCEEDED
    Cancelled           CANCELLED
    PermissionDenied    PERMISSION_DENIED, or UNAUTHENTICATED: a secret or token is missing or wrong
    StepFailed          ABORTED
    Superseded          ABORTED, with the reason SUPERSEDED in google.rpc.ErrorInfo
    ServerError         every other status, and answers that break the contract
"""

from dataclasses import dataclass
from typing import Self

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

SUPERSEDED = "SUPERSEDED"
"""ErrorInfo.reason of a call whose request another call has attached to."""

SUSPENDED = "REQUEST_SUSPENDED"
"""ErrorInfo.reason of a call whose request the next coordinator goes on with."""

_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusDetails:
    """`is_present` tells a status that a server sent from one that this end made up for a lost connection."""

    is_present: bool = False
    retry_after_s: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """Reads the details of an error. What is absent or cannot be read says nothing."""
        data = error.trailing_metadata().get(_KEY)
        if not isinstance(data, bytes):
            return cls()
        try:
            return cls._from_status(status_pb2.Status.FromString(data))
        except DecodeError:
            return cls(is_present=True)

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
    """Base of all errors that a client raises: `code` is the name of the gRPC status, `message` says more.

    `reason` is the stable code in the server's google.rpc.ErrorInfo, or the client's own (docs/errors.md); of
    a status that gRPC made up, such as that of a lost connection, it is the name of the status.
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
    """A live request has this request_id."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_EXISTS"


class RequestNotFound(StagelineError):
    """No request that is live, or whose output is kept, has this request_id."""

    code = "NOT_FOUND"
    reason = "REQUEST_NOT_FOUND"


class WorkerNotFound(StagelineError):
    """No worker of this name is in the cluster."""

    code = "NOT_FOUND"
    reason = "WORKER_NOT_FOUND"


class Overloaded(StagelineError):
    """The waiting queue is full, or this client has too many requests.

    `retry_after_s` is when to try again, where the server says so (google.rpc.RetryInfo), else None.
    """

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"
    retry_after_s: float | None = None


class Unavailable(StagelineError):
    """No coordinator at the address, no stage workers in time, or a connection that is lost for good."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DeadlineExceeded(StagelineError):
    """The request took longer than its timeout."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(StagelineError):
    """The server ended the call as cancelled: by Cancel, or because the client read too slowly."""

    code = "CANCELLED"
    reason = "CANCELLED"


class PermissionDenied(StagelineError):
    """The call lacks the secret of the request, or the operator token."""

    code = "PERMISSION_DENIED"
    reason = "ATTACH_SECRET_MISMATCH"


class StepFailed(StagelineError):
    """The step that carried this request was faulty; sending the request again is safe."""

    code = "ABORTED"
    reason = "STEP_FAILED"


class Superseded(StagelineError):
    """Another call has attached to the request, which goes on there. Sending it again would double it."""

    code = "ABORTED"
    reason = "SUPERSEDED"


class ServerError(StagelineError):
    """Something went wrong on the server that is not the request's fault."""

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


def from_rpc_error(error: grpc.aio.AioRpcError) -> StagelineError:
    """The typed error for a gRPC status, with the server's text."""
    code = error.code().name
    details = StatusDetails.of(error)
    kind = Superseded if details.reason == SUPERSEDED else _KINDS.get(code, ServerError)
    text = error.details() or f"the call ended with {code}"
    typed = kind(text, code=code, reason=details.reason or code)
    if isinstance(typed, Overloaded):
        typed.retry_after_s = details.retry_after_s
    return typed
