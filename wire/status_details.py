"""What a status says beside code and text, in gRPC's richer error model (google.rpc.Status)."""

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from wire.errors import Overloaded, status_of

DETAILS_KEY = "grpc-status-details-bin"


def details_of(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for `error`: when to try again, as RetryInfo, where that is known; else none."""
    if not isinstance(error, Overloaded) or error.retry_after_s is None:
        return ()
    code, text = status_of(error)
    delay = Duration()
    delay.FromNanoseconds(round(error.retry_after_s * 1e9))
    detail = Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=text, details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)
