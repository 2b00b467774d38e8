"""`stageline.v1.TelemetryService` and OpenTelemetry's collector services."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from coordinator.api.activity import ActivityReporter
from coordinator.api.intake import Intake
from coordinator.observability.trace_reader import TraceReader
from coordinator.observability.trace_store import AddResult, TraceStore
from stageline_rpc.v1 import telemetry_pb2, telemetry_pb2_grpc
from telemetry.trace_view.facts import TraceSummary, encode_summary
from wire.errors import InvalidRequest, MessageTooLarge
from wire.foreign_text import parse_digits
from wire.message_scan import MessageScan, UnknownFields

MAX_EXPORT_BYTES = 4 * 1024 * 1024
"""Default of OpenTelemetry's collector."""
MAX_SPAN_FIELDS = 131_072
MAX_METRIC_FIELDS = 16_384
"""Metrics are processed on the event loop; a worker's export has about 2,000 fields."""
MAX_THREADS = 2
"""Exports parsed concurrently."""

OtlpCallContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
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
"""Stores metrics, and returns the number of rejected points."""


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans for the store. Raises MessageTooLarge, which exporters do not retry, and Overloaded."""

    def __init__(self, store: TraceStore, intake: Intake) -> None:
        self._store, self._intake = store, intake
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def Export(  # noqa: N802  # as bytes: see MessageLimits
        self, request: bytes, context: OtlpCallContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        _check_size(request)
        self._intake.take(len(request), context)
        async with self._threads:
            taken = await asyncio.to_thread(self._take, request)
        return _partial_trace(taken.num_dropped + taken.num_refused, _reasons(taken))

    def _take(self, data: bytes) -> AddResult:
        _SPAN_SCAN.check(data)
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
        return self._store.add(request.resource_spans)


class MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Receives metrics. Raises MessageTooLarge, which exporters do not retry, and Overloaded."""

    def __init__(self, intake: Intake, on_metrics: OnMetrics | None = None) -> None:
        """Without `on_metrics`, metrics are dropped without being rejected."""
        self._intake, self._on_metrics = intake, on_metrics
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def Export(  # noqa: N802  # as bytes: see MessageLimits
        self, request: bytes, context: OtlpCallContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        _check_size(request)
        self._intake.take(len(request), context)
        async with self._threads:
            metrics = await asyncio.to_thread(_parse_metrics, request)
        num_refused = 0 if self._on_metrics is None else self._on_metrics(metrics)
        return _partial_metrics(num_refused, f"{num_refused} points of unknown resources")


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


def _reasons(taken: AddResult) -> str:
    reasons = {**taken.refused, "of evicted traces": taken.num_dropped}
    return ", ".join(f"{number} spans {reason}" for reason, number in reasons.items() if number)


DEFAULT_PAGE = 100
MAX_PAGE = 512


def page_of_traces(
    summaries: Sequence[TraceSummary], page_size: int, page_token: str
) -> tuple[list[TraceSummary], str]:
    """Return a page, newest start first, and the token of the next one.

    A token names the last trace of its page, so that later traces do not shift pages.

    Raises:
        InvalidRequest: the token is not one of an earlier page.
    """
    size = min(page_size or DEFAULT_PAGE, MAX_PAGE)
    newest_first = sorted(summaries, key=_page_key, reverse=True)
    if page_token:
        last = _read_page_token(page_token)
        newest_first = [summary for summary in newest_first if _page_key(summary) < last]
    page = newest_first[:size]
    if len(page) == len(newest_first):
        return page, ""
    started_ns, request_id = _page_key(page[-1])
    return page, f"{started_ns}.{request_id}"


def _page_key(summary: TraceSummary) -> tuple[int, str]:
    return summary.started_ns, summary.request_id


def _read_page_token(token: str) -> tuple[int, str]:
    text, dot, request_id = token.partition(".")
    if not dot or (started_ns := parse_digits(text, limit=2**63 - 1)) is None:
        raise InvalidRequest(f"page_token is {token[:60]!r}, must be the next_page_token of a response")
    return started_ns, request_id


Context = grpc.aio.ServicerContext[Any, Any]


class TelemetryService(telemetry_pb2_grpc.TelemetryServiceServicer):
    """Called by `stageline top` and `stageline trace`."""

    def __init__(self, store: TraceStore, traces: TraceReader, activity: ActivityReporter) -> None:
        self._store = store
        self._traces = traces
        self._activity = activity

    async def GetActivity(  # noqa: N802
        self, request: telemetry_pb2.GetActivityRequest, context: Context
    ) -> telemetry_pb2.GetActivityResponse:
        return await self._activity.activity(request)

    async def ListTraces(  # noqa: N802
        self, request: telemetry_pb2.ListTracesRequest, context: Context
    ) -> telemetry_pb2.ListTracesResponse:
        summaries = await self._traces.summaries()
        page, next_page_token = page_of_traces(summaries, request.page_size, request.page_token)
        counts = self._store.counts
        return telemetry_pb2.ListTracesResponse(
            traces=[encode_summary(summary) for summary in page],
            next_page_token=next_page_token,
            num_dropped_traces=counts.dropped_traces,
            num_dropped_spans=counts.dropped,
        )

    async def GetTrace(  # noqa: N802
        self, request: telemetry_pb2.GetTraceRequest, context: Context
    ) -> telemetry_pb2.GetTraceResponse:
        found, data = await self._traces.data(request.request_id)
        return telemetry_pb2.GetTraceResponse(
            request_id=found.request_id, trace_id=found.trace_id, traces_data=data
        )
