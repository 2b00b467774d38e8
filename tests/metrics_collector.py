"""A collector of metrics for tests: the standard MetricsService over real gRPC on port 0."""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)

DEADLINE_S = 20.0


class MetricsCollector(MetricsServiceServicer):
    """Keeps what it is sent. `refusal` is answered as long as it is set; while `holds` is, nothing is."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.refusal: grpc.StatusCode | None = None
        self.num_calls = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._came = asyncio.Event()
        self._server = grpc.aio.server()
        self.address = ""

    async def __aenter__(self) -> Self:
        add_MetricsServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.may_answer.set()
        await self._server.stop(None)

    async def Export(  # noqa: N802
        self, request: ExportMetricsServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportMetricsServiceResponse:
        self.num_calls += 1
        self._came.set()
        await self.may_answer.wait()
        if self.refusal is not None:
            await context.abort(self.refusal, "refused by the test")
        self.requests.append(request)
        self._came.set()
        return ExportMetricsServiceResponse()

    async def wait_calls(self, num_calls: int) -> None:
        """Until this many exports have arrived, accepted or not."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_calls < num_calls:
                self._came.clear()
                await self._came.wait()

    async def wait_requests(self, num_requests: int) -> None:
        """Until this many exports have been accepted."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.requests) < num_requests:
                self._came.clear()
                await self._came.wait()
