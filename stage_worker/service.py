"""The Stage service: hello, accepted, then chunks."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from stage_worker.stage_host import StageHost
from stageline_rpc.v1 import stage_pb2, stage_pb2_grpc
from wire.errors import HandshakeMismatch, StepFault, StepFaultKind

Requests = AsyncIterator[stage_pb2.ForwardRequest]


class StageService(stage_pb2_grpc.StageServicer):
    """Hands the one stream of the present predecessor to the stage."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    async def Forward(  # noqa: N802 - the name is the contract's
        self, request_iterator: Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[stage_pb2.ForwardResponse]:
        session = await self._host.accept(await _hello(request_iterator))
        yield stage_pb2.ForwardResponse(accepted=stage_pb2.HopAccepted())
        await session.receive(_chunks(request_iterator))


async def _hello(requests: Requests) -> stage_pb2.HopHello:
    async for request in requests:
        if request.WhichOneof("message") == "hello":
            return request.hello
        raise HandshakeMismatch("first message", expected="hello", got=request.WhichOneof("message"))
    raise HandshakeMismatch("first message", expected="hello", got="the end of the stream")


async def _chunks(requests: Requests) -> AsyncIterator[stage_pb2.FrameChunk]:
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            got = request.WhichOneof("message")
            raise StepFault(StepFaultKind.UNDECODABLE, f"message {got!r} where a chunk of a frame was due")
        yield request.chunk
