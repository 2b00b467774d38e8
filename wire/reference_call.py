"""`Stage.ComputeReference` at both ends."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from stageline_rpc.v1 import stage_pb2, stage_pb2_grpc
from wire.channels import client_channel

_COMPUTE = stage_pb2.DESCRIPTOR.services_by_name["Stage"].methods_by_name["ComputeReference"]


async def compute_reference(
    address: str, request: stage_pb2.ReferenceRequest, *, timeout_s: float
) -> stage_pb2.ReferenceResponse:
    """Asks the worker at `address`. Raises grpc.aio.AioRpcError."""
    async with client_channel(address) as channel:
        stub = stage_pb2_grpc.StageStub(channel)
        return await stub.ComputeReference(request, timeout=timeout_s)


def reference_handler(
    compute: Callable[[bytes, Any], Awaitable[stage_pb2.ReferenceResponse]],
) -> grpc.GenericRpcHandler:
    """For a server whose `compute` takes the request as bytes; Stage.Forward has a handler of its own."""
    untyped: Any = compute
    handler: Any = grpc.unary_unary_rpc_method_handler(
        untyped,
        response_serializer=stage_pb2.ReferenceResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(
        _COMPUTE.containing_service.full_name, {_COMPUTE.name: handler}
    )
