"""Server reflection: services describe themselves to clients that ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from wire.errors import Overloaded
from wire.message_reads import begin_receive

MAX_STREAM_S = 60.0
"""Of a client that asks; a stream is one of few, and takes a message's size of memory."""


class ReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it has no types
    """Ends streams that last long."""

    def __init__(self, names: Iterable[str], *, max_stream_s: float = MAX_STREAM_S) -> None:
        super().__init__(names)
        self._max_stream_s = max_stream_s

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """Raises Overloaded at the end of the time."""
        try:
            async with asyncio.timeout(self._max_stream_s):
                async for response in super().ServerReflectionInfo(_received(request_iterator), context):
                    yield response
        except TimeoutError:
            limit = f"a reflection stream may last {self._max_stream_s:g} s"
            raise Overloaded(f"{limit}: open another", retry_after_s=0.0) from None


async def _received(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests; a timeout leaves the receiving of the next one to the end of the call."""
    while True:
        request = begin_receive(lambda: anext(requests, None))
        await asyncio.wait((request,))
        if request.result() is None:
            return
        yield request.result()


def add_reflection(server: grpc.aio.Server, files: Iterable[FileDescriptor]) -> None:
    """Describe the services of these files, and reflection itself, to clients that ask."""
    services: list[Any] = [service for file in files for service in file.services_by_name.values()]
    names = (*(service.full_name for service in services), reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(ReflectionServicer(names), server)
