"""Client and server side of `StageService`, with messages as bytes.

The code that grpc generates would copy every payload into a message and out again.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc
from wire.transport import PLAIN, Transport

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
    address: str,
    request: forward_pb2.ComputeReferenceRequest,
    *,
    timeout_s: float,
    transport: Transport = PLAIN,
) -> forward_pb2.ComputeReferenceResponse:
    """Call ComputeReference of the worker at `address`. Raises grpc.aio.AioRpcError."""
    async with transport.channel(address) as channel:
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
