"""The exception tree, its gRPC status codes and reason codes.

```
ServingError
|- InvalidRequest            INVALID_ARGUMENT     a parameter or a prompt that cannot be served
|  `- MessageTooLarge        INVALID_ARGUMENT     more bytes or entries than the method takes
|- RequestNotFound           NOT_FOUND
|- RequestExists             ALREADY_EXISTS
|- WorkerNotFound            NOT_FOUND
|- ServiceNotFound           NOT_FOUND            the health of a service that the server does not have
|- MethodNotFound            UNIMPLEMENTED        the server has no such method
|- NameInUse                 ALREADY_EXISTS       a live worker elsewhere has this name
|- SecretMismatch            PERMISSION_DENIED    the caller does not know the secret of this hop or worker
|- AttachSecretMismatch      PERMISSION_DENIED    the caller does not know the secret of this request
|- TokenMissing              UNAUTHENTICATED      an operator's call without the operator token
|- TokenMismatch             PERMISSION_DENIED    an operator's call with another token
|- Overloaded                RESOURCE_EXHAUSTED   a bounded queue is full; says when to try again
|- HandshakeMismatch         FAILED_PRECONDITION  two ends disagree; carries both values
|- StaleStream               ABORTED              a stream of an epoch that is over
|- StepFailed                ABORTED              its steps were faulty, again and again
|- RequestPoisoned           INTERNAL             workers died when they ran this request alone
|- SliceFailed               INTERNAL             this sequence alone failed on a stage
|- InvariantBroken           INTERNAL             a guard of tokens, ends or pages failed: a defect
|- RequestCancelled          CANCELLED
|- DeadlinePassed            DEADLINE_EXCEEDED
|- Superseded                ABORTED              another call reads this request now
|- ClusterUnavailable        UNAVAILABLE          no stages in time
|- JournalUnavailable        UNAVAILABLE          the journal cannot be written
|- RequestSuspended          UNAVAILABLE          the coordinator stops; the next one goes on with the request
`- StepFault                 ABORTED              a stage refuses a step, and with it the epoch
```
"""

import re
from enum import Enum

import grpc

from stageline_rpc.v1 import stage_pb2
from wire.ids import RequestId, id_text


class ServingError(Exception):
    """Base of every error that the product raises on purpose. Its text is safe to send to a client.

    `request_id` is for the log, where the message that a call began with does not name the request by itself.
    """

    request_id: RequestId | None = None


class InvalidRequest(ServingError):
    """A parameter or a prompt that cannot be served; the text has the numbers."""


class MessageTooLarge(InvalidRequest):
    """The message has more bytes, or more entries, than its method takes; sending it again is no use."""


class RequestNotFound(ServingError):
    """No such request is live."""


class RequestExists(ServingError):
    """A live request has this id."""


class WorkerNotFound(ServingError):
    """No such worker is here."""


class ServiceNotFound(ServingError):
    """The server knows no health of this service."""


class MethodNotFound(ServingError):
    """The server has no such method."""


class NameInUse(ServingError):
    """A live worker elsewhere has this name."""


class SecretMismatch(ServingError):
    """The caller does not present the secret that this call needs; the text says nothing else."""


class AttachSecretMismatch(ServingError):
    """The caller knows the id of a request, but not its secret."""


class TokenMissing(ServingError):
    """An operator's call came without the operator token."""


class TokenMismatch(ServingError):
    """An operator's call came with a token that is not the coordinator's."""


class Overloaded(ServingError):
    """A bounded queue is full, or a client has too many requests. `retry_after_s`: when to try again."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HandshakeMismatch(ServingError):
    """Two ends disagree about something that must be equal."""

    def __init__(self, what: str, *, expected: object, got: object, text: str = "") -> None:
        """`text`, if given, takes the place of the usual sentence."""
        super().__init__(text or f"{what} mismatch: expected {expected}, got {got}")
        self.what = what


class StaleStream(ServingError):
    """The stream belongs to an epoch, a process or a predecessor that is not the present one."""


class StepFailed(ServingError):
    """The steps that carried this request were faulty, and it has been tried often enough."""


class RequestPoisoned(ServingError):
    """Workers died while this request, and no other, ran."""


class InvariantBroken(ServingError):
    """A guard of tokens, ends or pages failed: a defect of ours, which must not become wrong output."""


class SliceFailed(ServingError):
    """This sequence failed on a stage; its batch mates did not."""


class RequestCancelled(ServingError):
    """The request was cancelled; the text says why."""


class DeadlinePassed(ServingError):
    """The request was not finished when its deadline came."""


class Superseded(ServingError):
    """Another call has attached to the request; this one gets nothing more."""


class ClusterUnavailable(ServingError):
    """There are no stages to serve with, and none came in time."""


class JournalUnavailable(ServingError):
    """The journal cannot be written, so a new request would not survive the coordinator."""


class RequestSuspended(ServingError):
    """The coordinator stops, and whoever opens its journal next goes on with the request."""


class StepFaultKind(Enum):
    """Why a stage refused a step. Values are those of the wire enum."""

    HIDDEN_STATES_MISSING = stage_pb2.STEP_FAULT_KIND_HIDDEN_STATES_MISSING
    HIDDEN_STATES_UNEXPECTED = stage_pb2.STEP_FAULT_KIND_HIDDEN_STATES_UNEXPECTED
    SHAPE = stage_pb2.STEP_FAULT_KIND_SHAPE
    DTYPE = stage_pb2.STEP_FAULT_KIND_DTYPE
    EPOCH = stage_pb2.STEP_FAULT_KIND_EPOCH
    STEP_ID = stage_pb2.STEP_FAULT_KIND_STEP_ID
    SLICE_SET = stage_pb2.STEP_FAULT_KIND_SLICE_SET
    POSITION = stage_pb2.STEP_FAULT_KIND_POSITION
    CHECKSUM = stage_pb2.STEP_FAULT_KIND_CHECKSUM
    UNDECODABLE = stage_pb2.STEP_FAULT_KIND_UNDECODABLE
    RECORD = stage_pb2.STEP_FAULT_KIND_RECORD
    KV_SIGNAL = stage_pb2.STEP_FAULT_KIND_KV_SIGNAL
    KV_DIVERGENCE = stage_pb2.STEP_FAULT_KIND_KV_DIVERGENCE
    DEVICE = stage_pb2.STEP_FAULT_KIND_DEVICE
    NON_FINITE = stage_pb2.STEP_FAULT_KIND_NON_FINITE
    NEIGHBOUR = stage_pb2.STEP_FAULT_KIND_NEIGHBOUR
    OVERDUE = stage_pb2.STEP_FAULT_KIND_OVERDUE
    OUT_OF_MEMORY = stage_pb2.STEP_FAULT_KIND_OUT_OF_MEMORY
    INTERNAL = stage_pb2.STEP_FAULT_KIND_INTERNAL

    @property
    def blames_requests(self) -> bool:
        """What was computed may have caused it; a stage that cannot reach the next one says nothing of it."""
        return self is not StepFaultKind.NEIGHBOUR


class StepFault(ServingError):
    """A stage computes nothing for this step and refuses every later frame of the epoch.

    `step_id` is None where the frame was too broken to tell; the stage that reports it fills in the step that
    it expected, and its own index.
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
        """One line that names stage, step and requests."""
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
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HandshakeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StaleStream: grpc.StatusCode.ABORTED,
    StepFailed: grpc.StatusCode.ABORTED,
    RequestPoisoned: grpc.StatusCode.INTERNAL,
    SliceFailed: grpc.StatusCode.INTERNAL,
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
    """Raises InvariantBroken unless it `holds`. Unlike `assert`, also under `python -O`."""
    if not holds:
        raise InvariantBroken(text)


INTERNAL_ERROR_TEXT = "internal error; the coordinator's or worker's log has the detail"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and text to send for `error`. What is not ours becomes INTERNAL with a fixed text."""
    for kind in type(error).__mro__:
        code = STATUS_OF_ERROR.get(kind)
        if code is not None:
            return code, str(error)
    return grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT


def reason_of(error: BaseException) -> str:
    """The reason code of an error class: `CLUSTER_UNAVAILABLE` for ClusterUnavailable.

    Built-in exceptions have two codes, OS_ERROR and INVALID_CONFIGURATION (ValueError); every other one is an
    INTERNAL_ERROR. docs/errors.md lists the codes.
    """
    kind = type(error)
    if kind.__module__ != "builtins" and not issubclass(kind, OSError):
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).upper()
    if isinstance(error, OSError):
        return "OS_ERROR"
    return "INVALID_CONFIGURATION" if isinstance(error, ValueError) else "INTERNAL_ERROR"


def error_line(reason: str, text: str) -> str:
    """The line on standard error that ends a command or a process: `stageline: error[REASON]: text`."""
    return f"stageline: error[{reason}]: {text}"
