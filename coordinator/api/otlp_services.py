"""OpenTelemetry's own services: what any exporter can send spans and metrics to."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from coordinator.observing.trace_store import Taken, TraceStore
from coordinator.observing.worker_metrics import num_points

MAX_EXPORT_BYTES = 4 * 1024 * 1024
"""What collectors take by default, too."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
OnMetrics: TypeAlias = Callable[[metrics_service_pb2.ExportMetricsServiceRequest], int]
"""Takes metrics, and returns how many of their points it has refused."""


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans for the store."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        if request.ByteSize() > MAX_EXPORT_BYTES:
            return _partial_trace(_num_spans(request), _too_large(request.ByteSize()))
        taken = Taken()
        for _ in self._store.adding(request.resource_spans, taken):
            await asyncio.sleep(0)  # steps go first
        return _partial_trace(taken.num_dropped + taken.num_refused, _reasons(taken))


class MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Metrics for whoever keeps them."""

    def __init__(self, on_metrics: OnMetrics | None = None) -> None:
        """Without `on_metrics` nobody does, and nothing is refused."""
        self._on_metrics = on_metrics

    async def Export(  # noqa: N802
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Context
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        if request.ByteSize() > MAX_EXPORT_BYTES:
            return _partial_metrics(_num_points(request), _too_large(request.ByteSize()))
        num_refused = 0 if self._on_metrics is None else self._on_metrics(request)
        return _partial_metrics(num_refused, f"{num_refused} points of resources that nobody here knows")


def _partial_trace(num_rejected: int, reason: str) -> trace_service_pb2.ExportTraceServiceResponse:
    if not num_rejected:
        return trace_service_pb2.ExportTraceServiceResponse()
    return trace_service_pb2.ExportTraceServiceResponse(
        partial_success=trace_service_pb2.ExportTracePartialSuccess(
            rejected_spans=num_rejected, error_message=reason
        )
    )


def _partial_metrics(num_rejected: int, reason: str) -> metrics_service_pb2.ExportMetricsServiceResponse:
    if not num_rejected:
        return metrics_service_pb2.ExportMetricsServiceResponse()
    return metrics_service_pb2.ExportMetricsServiceResponse(
        partial_success=metrics_service_pb2.ExportMetricsPartialSuccess(
            rejected_data_points=num_rejected, error_message=reason
        )
    )


def _reasons(taken: Taken) -> str:
    reasons = {**taken.refused, "of traces that had to make room": taken.num_dropped}
    return ", ".join(f"{number} spans {reason}" for reason, number in reasons.items() if number)


def _too_large(size_bytes: int) -> str:
    return f"{size_bytes} bytes at once, but {MAX_EXPORT_BYTES} are the most: send smaller batches"


def _num_spans(request: trace_service_pb2.ExportTraceServiceRequest) -> int:
    return sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)


def _num_points(request: metrics_service_pb2.ExportMetricsServiceRequest) -> int:
    return sum(map(num_points, request.resource_metrics))
