"""An OpenTelemetry collector of our own: a real gRPC `TraceService` that keeps what it gets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span with the resource attributes of its process."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.span.attributes)

    @property
    def process(self) -> str:
        """`service.name` and, of workers, which one."""
        return f"{self.resource['service.name']} {self.resource['service.instance.id']}"


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`address` is HOST:PORT. `may_answer` cleared: it accepts calls without answering."""

    address: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    status: grpc.StatusCode | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        await self.may_answer.wait()
        if self.status is not None:
            await context.abort(self.status, "as the test wants it")
        for resource_spans in request.resource_spans:
            resource = attributes_of(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += [CollectedSpan(span, resource) for span in scope_spans.spans]
        self._arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_until(
        self, holds: Callable[[list[CollectedSpan]], bool], *, timeout_s: float = 30.0
    ) -> None:
        """Raises TimeoutError, with the names of the spans that are here."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(self.spans):
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            names = sorted({f"{span.process}: {span.name}" for span in self.spans})
            raise TimeoutError(f"{len(self.spans)} spans: {names}") from None


def attributes_of(pairs: Any) -> dict[str, Any]:
    """As plain values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector on a free port of the loopback interface."""
    server = grpc.aio.server()
    servicer = Collector()
    servicer.may_answer.set()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        servicer.may_answer.set()
        await server.stop(0)
