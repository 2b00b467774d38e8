"""OpenTelemetry's own services: what any exporter can send spans and metrics to."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from coordinator.observing.trace_store import Taken, TraceStore
from wire.errors import MessageTooLarge
from wire.message_scan import MessageScan, UnknownFields

MAX_EXPORT_BYTES = 4 * 1024 * 1024
"""As by default in OpenTelemetry's collector."""
MAX_SPAN_FIELDS = 131_072
MAX_METRIC_FIELDS = 16_384
"""Metrics are walked on the event loop; those of a worker have some 2,000 fields."""
MAX_THREADS = 2
"""Exports that are parsed at once."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_SPAN_SCAN = MessageScan(
    trace_service_pb2.ExportTraceServiceRequest.DESCRIPTOR,
    max_fields=MAX_SPAN_FIELDS,
    unknown=UnknownFields.SKIP,
)
_METRIC_SCAN = MessageScan(
    metrics_service_pb2.ExportMetricsServiceRequest.DESCRIPTOR,
    max_fields=MAX_METRIC_FIELDS,
    unknown=UnknownFields.SKIP,
)
OnMetrics: TypeAlias = Callable[[metrics_service_pb2.ExportMetricsServiceRequest], int]
"""Takes metrics, and returns how many of their points it has refused."""


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans for the store. Raises MessageTooLarge, which exporters do not retry."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def Export(  # noqa: N802  # as bytes: see MessageLimits
        self, request: bytes, context: Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        _check_size(request)
        async with self._threads:
            taken = await asyncio.to_thread(self._take, request)
        return _partial_trace(taken.num_dropped + taken.num_refused, _reasons(taken))

    def _take(self, data: bytes) -> Taken:
        _SPAN_SCAN.check(data)
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
        return self._store.add(request.resource_spans)


class MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Metrics for their keeper. Raises MessageTooLarge, which exporters do not retry."""

    def __init__(self, on_metrics: OnMetrics | None = None) -> None:
        """Without `on_metrics` nothing is kept, and nothing is refused."""
        self._on_metrics = on_metrics
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def Export(  # noqa: N802  # as bytes: see MessageLimits
        self, request: bytes, context: Context
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        _check_size(request)
        async with self._threads:
            metrics = await asyncio.to_thread(_parse_metrics, request)
        num_refused = 0 if self._on_metrics is None else self._on_metrics(metrics)
        return _partial_metrics(num_refused, f"{num_refused} points of resources that nobody here knows")


def _parse_metrics(data: bytes) -> metrics_service_pb2.ExportMetricsServiceRequest:
    _METRIC_SCAN.check(data)
    return metrics_service_pb2.ExportMetricsServiceRequest.FromString(data)


def _check_size(data: bytes) -> None:
    if len(data) > MAX_EXPORT_BYTES:
        raise MessageTooLarge(
            f"the export has {len(data)} bytes, the limit is {MAX_EXPORT_BYTES}: send smaller batches"
        )


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
