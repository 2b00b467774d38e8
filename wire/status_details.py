"""What a status says beside code and text, in gRPC's richer error model (google.rpc.Status)."""

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from wire.errors import Overloaded, ServingError, status_of
from wire.reasons import reason_of

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "stageline"


def details_of(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for `error`: its kind, as ErrorInfo, and when to try again, as RetryInfo.

    Whoever reads it can tell an answer of ours from a connection that broke: only an answer has details.
    """
    code, text = status_of(error)
    number: int = code.value[0]
    details = [error_details_pb2.ErrorInfo(reason=sent_reason(error), domain=DOMAIN)]
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=number, message=text, details=[_packed(each) for each in details])
    return ((DETAILS_KEY, status.SerializeToString()),)


def sent_reason(error: BaseException) -> str:
    """The reason code that a client receives: INTERNAL_ERROR for everything but a ServingError."""
    return reason_of(error) if isinstance(error, ServingError) else "INTERNAL_ERROR"


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
