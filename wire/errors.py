"""Exceptions of the product, their gRPC status codes (`STATUS_OF_ERROR`) and reason codes (`reason_of`)."""

import re
from enum import Enum
from typing import Self

import grpc

from stageline_rpc.internal.v1 import step_pb2
from wire.foreign_text import printable_line
from wire.ids import RequestId, id_text


class ServingError(Exception):
    """Base of every error that the product raises on purpose. Its text is safe to send to a client.

    `request_id` is for the log; set it where the call's first message does not contain the request id.
    """

    request_id: RequestId | None = None

    def again(self) -> Self:
        """Return a new exception of this error, for one that is stored and raised several times.

        A raised exception holds the frames that it passed.
        """
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__)
        return error


class InvalidRequest(ServingError):
    """A parameter or prompt that cannot be served; the text gives value and limit.

    `field` is the field of the request that it is about, empty if there is none.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class MessageTooLarge(InvalidRequest):
    """A message with more bytes or entries than its method accepts; retrying does not help."""


class RequestNotFound(ServingError):
    """No live request has this id, and no output of it is kept."""


class RequestExists(ServingError):
    """A live or kept request already has this id."""


class WorkerNotFound(ServingError):
    """No worker of the cluster has this name."""


class ServiceNotFound(ServingError):
    """The health service has no such service."""


class MethodNotFound(ServingError):
    """The server does not implement this method."""


class NameInUse(ServingError):
    """Another process with this worker name is connected."""


class SecretMismatch(ServingError):
    """A call between processes of the cluster lacks the secret that it needs."""


class AttachSecretMismatch(ServingError):
    """`Attach` or `Cancel` without the secret of the request."""


class TokenMissing(ServingError):
    """An operator's call, such as `Drain`, without the operator token."""


class TokenMismatch(ServingError):
    """The operator token is wrong, or the coordinator has none."""


class AccessDenied(ServingError):
    """The certificate of the caller does not permit this call."""


class CertificateRefused(ServingError):
    """The caller's certificate is of another cluster, names nobody, or is on the deny list."""


class JoinTokenRefused(ServingError):
    """The join token is unknown, has ended or is used up."""


class Overloaded(ServingError):
    """The queue is full, or a caller or stage has too many requests, calls, streams or incomplete messages.

    `retry_after_s` is the retry hint, sent as google.rpc.RetryInfo.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HandshakeMismatch(ServingError):
    """Two processes disagree about a value that must be equal.

    `text` replaces the default message.
    """

    def __init__(self, what: str, *, expected: object, got: object, text: str = "") -> None:
        super().__init__(text or f"{what} mismatch: expected {expected}, got {got}")
        self.what = what


class StaleStream(ServingError):
    """The stream belongs to an earlier epoch, process or predecessor."""


class StepFailed(ServingError):
    """The steps with this request failed more often than the retry limit allows."""


class RequestPoisoned(ServingError):
    """Workers crashed while they ran this request alone."""


class InvariantBroken(ServingError):
    """An internal check of tokens, ends or pages failed: a defect, reported instead of wrong output."""


class SliceFailed(ServingError):
    """This sequence failed on a stage; the other sequences of the batch did not."""


class GrammarFailed(ServingError):
    """A stage cannot apply the grammar of this sequence any further: a dead end, a limit, or too slow."""


class RequestCancelled(ServingError):
    """The request was cancelled; the text gives the reason."""


class DeadlinePassed(ServingError):
    """The request was not finished at its deadline."""


class Superseded(ServingError):
    """Another call has attached to the request; this call receives no further output."""


class ClusterUnavailable(ServingError):
    """No pipeline of stages is serving, and none became ready within the timeout."""


START_WORKERS = "start workers with `stageline worker --coordinator HOST:PORT`"
"""Advice where workers are missing."""


class JournalUnavailable(ServingError):
    """The journal cannot be written, so a new request would not survive a coordinator restart."""


class RequestSuspended(ServingError):
    """The coordinator is stopping; the next coordinator with its journal continues the request."""


class StepFaultKind(Enum):
    """Why a stage rejected a step. The values equal the wire enum."""

    HIDDEN_STATES_MISSING = step_pb2.STEP_FAULT_KIND_HIDDEN_STATES_MISSING
    HIDDEN_STATES_UNEXPECTED = step_pb2.STEP_FAULT_KIND_HIDDEN_STATES_UNEXPECTED
    SHAPE = step_pb2.STEP_FAULT_KIND_SHAPE
    DTYPE = step_pb2.STEP_FAULT_KIND_DTYPE
    EPOCH = step_pb2.STEP_FAULT_KIND_EPOCH
    STEP_ID = step_pb2.STEP_FAULT_KIND_STEP_ID
    SLICE_SET = step_pb2.STEP_FAULT_KIND_SLICE_SET
    POSITION = step_pb2.STEP_FAULT_KIND_POSITION
    CHECKSUM = step_pb2.STEP_FAULT_KIND_CHECKSUM
    UNDECODABLE = step_pb2.STEP_FAULT_KIND_UNDECODABLE
    RECORD = step_pb2.STEP_FAULT_KIND_RECORD
    KV_SIGNAL = step_pb2.STEP_FAULT_KIND_KV_SIGNAL
    KV_DIVERGENCE = step_pb2.STEP_FAULT_KIND_KV_DIVERGENCE
    DEVICE = step_pb2.STEP_FAULT_KIND_DEVICE
    NON_FINITE = step_pb2.STEP_FAULT_KIND_NON_FINITE
    NEIGHBOUR = step_pb2.STEP_FAULT_KIND_NEIGHBOUR
    OVERDUE = step_pb2.STEP_FAULT_KIND_OVERDUE
    OUT_OF_MEMORY = step_pb2.STEP_FAULT_KIND_OUT_OF_MEMORY
    INTERNAL = step_pb2.STEP_FAULT_KIND_INTERNAL

    @property
    def blames_requests(self) -> bool:
        """Whether the computed requests may be the cause; an unreachable next stage (NEIGHBOUR) is not."""
        return self is not StepFaultKind.NEIGHBOUR


class StepFault(ServingError):
    """A stage rejected a step, and with it every later frame of the epoch.

    `step_id` is None for a frame that could not be decoded; the reporting stage then fills in the step id
    that it expected and its own index.
    """

    def __init__(
        self,
        kind: StepFaultKind,
        message: str,
        *,
        step_id: int | None = None,
        request_ids: tuple[RequestId, ...] = (),
    ) -> None:
        super().__init__(f"{kind.name}: {message}")
        self.kind = kind
        self.message = message
        self.step_id = step_id
        self.request_ids = request_ids

    def describe(self, *, stage: int) -> str:
        step = "unknown step" if self.step_id is None else f"step {self.step_id}"
        requests = ", ".join(id_text(request_id) for request_id in self.request_ids) or "none known"
        return f"stage {stage}, {step}, requests {requests}: {self}"


STATUS_OF_ERROR: dict[type[ServingError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    MessageTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    RequestNotFound: grpc.StatusCode.NOT_FOUND,
    RequestExists: grpc.StatusCode.ALREADY_EXISTS,
    WorkerNotFound: grpc.StatusCode.NOT_FOUND,
    ServiceNotFound: grpc.StatusCode.NOT_FOUND,
    MethodNotFound: grpc.StatusCode.UNIMPLEMENTED,
    NameInUse: grpc.StatusCode.ALREADY_EXISTS,
    SecretMismatch: grpc.StatusCode.PERMISSION_DENIED,
    AttachSecretMismatch: grpc.StatusCode.PERMISSION_DENIED,
    TokenMissing: grpc.StatusCode.UNAUTHENTICATED,
    TokenMismatch: grpc.StatusCode.PERMISSION_DENIED,
    AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    CertificateRefused: grpc.StatusCode.UNAUTHENTICATED,
    JoinTokenRefused: grpc.StatusCode.PERMISSION_DENIED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HandshakeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StaleStream: grpc.StatusCode.ABORTED,
    StepFailed: grpc.StatusCode.ABORTED,
    RequestPoisoned: grpc.StatusCode.INTERNAL,
    SliceFailed: grpc.StatusCode.INTERNAL,
    GrammarFailed: grpc.StatusCode.INVALID_ARGUMENT,
    InvariantBroken: grpc.StatusCode.INTERNAL,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    Superseded: grpc.StatusCode.ABORTED,
    ClusterUnavailable: grpc.StatusCode.UNAVAILABLE,
    JournalUnavailable: grpc.StatusCode.UNAVAILABLE,
    RequestSuspended: grpc.StatusCode.UNAVAILABLE,
    StepFault: grpc.StatusCode.ABORTED,
}


def require(holds: bool, text: str) -> None:
    """Raise InvariantBroken if `holds` is false; unlike `assert`, also under `python -O`."""
    if not holds:
        raise InvariantBroken(text)


INTERNAL_ERROR_TEXT = "internal error; the coordinator's or worker's log has the detail"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return status code and text to send for `error`; any other exception is INTERNAL with a fixed text."""
    for kind in type(error).__mro__:
        code = STATUS_OF_ERROR.get(kind)
        if code is not None:
            return code, printable_line(str(error))
    return grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT


def reason_of(error: BaseException) -> str:
    """Return the reason code of an error class: `CLUSTER_UNAVAILABLE` for ClusterUnavailable.

    OSError gives OS_ERROR, ValueError gives INVALID_CONFIGURATION, any other built-in exception
    INTERNAL_ERROR. docs/reference/errors.md lists the codes.
    """
    kind = type(error)
    if kind.__module__ != "builtins" and not issubclass(kind, OSError):
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).upper()
    if isinstance(error, OSError):
        return "OS_ERROR"
    return "INVALID_CONFIGURATION" if isinstance(error, ValueError) else "INTERNAL_ERROR"
