"""Spans to a collector, by OpenTelemetry's own exporters, on a thread of theirs."""

import asyncio
import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from telemetry.span_sinks import QUEUED_SPANS, SpanSink

log = logging.getLogger(__name__)

BATCH_SPANS = 64
"""The thread holds the interpreter while it encodes a batch, so batches are small."""
DELAY_MS = 500.0
CLOSE_TIMEOUT_S = 2.0


class CollectorSink(SpanSink):
    """A BatchSpanProcessor that is never given more than it has room for."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _Counting(exporter)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUED_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=DELAY_MS,
        )
        self._num_taken = 0
        self._num_refused = 0

    @property
    def num_dropped(self) -> int:  # type: ignore[override]
        """What found no room, and what the collector did not take."""
        return self._num_refused + self._exporter.num_failed

    def offer(self, span: ReadableSpan) -> None:
        if self._num_taken - self._exporter.num_seen >= QUEUED_SPANS:
            self._num_refused += 1
        else:
            self._num_taken += 1
            self._processor.on_end(span)

    def start(self) -> None:
        """The thread runs already."""

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await loop.run_in_executor(None, self._processor.shutdown)
        except TimeoutError:
            log.warning("the collector does not answer; the last spans are lost")


class _Counting(SpanExporter):
    """Passes spans on, and counts them; on the processor's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_seen = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_seen += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def new_exporter(protocol: str) -> SpanExporter:
    """The exporter for "grpc" or "http/protobuf"; it reads the standard variables. Imported late: most
    clusters have no collector, and a worker need not hold what it does not use.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()
