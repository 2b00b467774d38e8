"""The Stage service: hello, accepted, then chunks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from stage_worker.stage_host import StageHost
from stageline_rpc.v1 import stage_pb2, stage_pb2_grpc
from wire.errors import HandshakeMismatch, StaleStream

HELLO_TIMEOUT_S = 10.0

Requests = AsyncIterator[stage_pb2.ForwardRequest]


class StageService(stage_pb2_grpc.StageServicer):
    """Hands the one stream of the present predecessor to the stage."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    async def Forward(  # noqa: N802 - the name is the contract's
        self, request_iterator: Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[stage_pb2.ForwardResponse]:
        session = await self._host.accept(await _hello(aiter(request_iterator)))
        yield stage_pb2.ForwardResponse(accepted=stage_pb2.HopAccepted())
        await session.receive(request_iterator)


async def _hello(requests: Requests) -> stage_pb2.HopHello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests, stage_pb2.ForwardRequest())
    except TimeoutError:
        raise StaleStream(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    if first.WhichOneof("message") != "hello":
        raise HandshakeMismatch("first message", expected="hello", got=first.WhichOneof("message"))
    return first.hello
