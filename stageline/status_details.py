"""What a server tells besides status and text: a google.rpc.Status in the trailing metadata.

Source: https://google.aip.dev/193, and github.com/googleapis/googleapis google/rpc/error_details.proto.
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
