"""Client and server side of `StageService`, with messages as bytes.

The code that grpc generates would copy every payload into a message and out again.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from types import coroutine as generator_coroutine
from typing import Any

import grpc

from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc
from wire.channels import client_channel

ForwardCall = grpc.aio.StreamStreamCall[Any, Any]
Messages = AsyncIterator[bytes]

HELLO_RETRY_S = 0.05
"""Delay before a hello is repeated to a stage with too many waiting streams (RESOURCE_EXHAUSTED)."""

_FORWARD = forward_pb2.DESCRIPTOR.services_by_name["StageService"].methods_by_name["Forward"]
_SERVICE: str = _FORWARD.containing_service.full_name


def open_forward(channel: grpc.aio.Channel, requests: Messages | None = None) -> ForwardCall:
    """Open the call, which sends serialised ForwardRequests and receives ForwardResponses."""
    untyped: Any = channel
    call = untyped.stream_stream(
        f"/{_SERVICE}/{_FORWARD.name}", response_deserializer=forward_pb2.ForwardResponse.FromString
    )
    opened: ForwardCall = call(requests, wait_for_ready=True)
    return opened


class StartedWrite:
    """A write that was handed to gRPC in this turn of the event loop; await it to finish it, once.

    A task would start it behind all callbacks that are due. Python 3.12 has eager tasks for this.
    """

    def __init__(self, write: Coroutine[Any, Any, None]) -> None:
        self._write = write
        self._error: Exception | None = None
        try:
            self._waits_for = write.send(None)
        except Exception as error:  # StopIteration: finished without waiting
            self._error = error

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is None:
            yield from _resume(self._write, self._waits_for)
        elif not isinstance(self._error, StopIteration):
            raise self._error


@generator_coroutine
def _resume(write: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Wait for the future that a started coroutine waits for, then run the rest of it."""
    try:
        yield waits_for
    except BaseException as error:
        yield from _resume(write, write.throw(error))
    else:
        yield from write


def forward_handler(
    forward: Callable[[Messages, Any], AsyncIterator[forward_pb2.ForwardResponse]],
) -> grpc.GenericRpcHandler:
    """Return the RPC handler; `forward` receives the requests as bytes."""
    untyped: Any = forward
    handler: Any = grpc.stream_stream_rpc_method_handler(
        untyped, response_serializer=forward_pb2.ForwardResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {_FORWARD.name: handler})


_COMPUTE = forward_pb2.DESCRIPTOR.services_by_name["StageService"].methods_by_name["ComputeReference"]


async def compute_reference(
    address: str, request: forward_pb2.ComputeReferenceRequest, *, timeout_s: float
) -> forward_pb2.ComputeReferenceResponse:
    """Call ComputeReference of the worker at `address`. Raises grpc.aio.AioRpcError."""
    async with client_channel(address) as channel:
        stub = forward_pb2_grpc.StageServiceStub(channel)
        return await stub.ComputeReference(request, timeout=timeout_s)


def reference_handler(
    compute: Callable[[bytes, Any], Awaitable[forward_pb2.ComputeReferenceResponse]],
) -> grpc.GenericRpcHandler:
    """Return the RPC handler; `compute` receives the request as bytes."""
    untyped: Any = compute
    handler: Any = grpc.unary_unary_rpc_method_handler(
        untyped,
        response_serializer=forward_pb2.ComputeReferenceResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(
        _COMPUTE.containing_service.full_name, {_COMPUTE.name: handler}
    )
