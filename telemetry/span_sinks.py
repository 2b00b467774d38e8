"""Where finished spans go: coordinator, store, collector. Bounded queues, drops are counted."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from wire.transport import PLAIN, RenewedChannel, Transport

log = logging.getLogger(__name__)


QUEUED_SPANS = 4096
BATCH_SPANS = 16
"""Spans per encoded batch; 100 us each, during which the event loop is blocked."""
DELAY_S = 0.2
"""How long a span waits to be sent in a batch."""
SEND_TIMEOUT_S = 3.0


class SpanSink(ABC):
    """Accepts finished spans. Used on the event loop only."""

    num_dropped: int = 0

    @abstractmethod
    def offer(self, span: ReadableSpan) -> None:
        """Accept a span, or drop it."""

    @abstractmethod
    def start(self) -> None:
        """Start to export."""

    @abstractmethod
    async def close(self) -> None:
        """Export queued spans, with a deadline, and stop."""


class QueueSink(SpanSink):
    """A bounded queue, and a task that delivers small batches of encoded spans."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._queue: deque[ReadableSpan] = deque()
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def offer(self, span: ReadableSpan) -> None:
        if len(self._queue) >= QUEUED_SPANS:
            self.num_dropped += 1
        else:
            self._queue.append(span)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="spans")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._is_closing.set()
        await asyncio.wait({task}, timeout=SEND_TIMEOUT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.num_dropped += len(self._queue)
        self._queue.clear()

    async def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DELAY_S):
                    is_closing = await self._is_closing.wait()
            while self._queue:
                await self._pass_on()
                # Let other tasks run between batches.
                await asyncio.sleep(0)

    async def _pass_on(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))]
        is_taken = False
        try:
            is_taken = await self.deliver(encode_spans(batch))
        finally:
            if not is_taken:
                self.num_dropped += len(batch)

    @abstractmethod
    async def deliver(self, request: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        """Return whether the batch was accepted."""


class StoreSink(QueueSink):
    """Adds spans to a store in this process."""

    def __init__(self, add: Callable[[Sequence[ResourceSpans]], object]) -> None:
        """`add` receives the `ResourceSpans` of a batch."""
        super().__init__()
        self._add = add

    async def deliver(self, request: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        self._add(request.resource_spans)
        return True


class CoordinatorSink(QueueSink):
    """Exports to the coordinator's `TraceService`. Spans are dropped while it is unreachable."""

    def __init__(self, address: str, transport: Transport = PLAIN) -> None:
        super().__init__()
        self._channel = RenewedChannel(transport, address)
        self._is_silent = False

    async def deliver(self, request: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        export = trace_service_pb2_grpc.TraceServiceStub(self._channel.current()).Export
        try:
            await export(request, timeout=SEND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if not self._is_silent:
                log.debug("the coordinator does not accept spans: %s", error.details())
            self._is_silent = True
            return False
        self._is_silent = False
        return True

    async def close(self) -> None:
        await super().close()
        await self._channel.close()


COLLECTOR_BATCH_SPANS = 64
"""The thread holds the interpreter lock while it encodes a batch, so batches are small."""
DELAY_MS = 500.0
CLOSE_TIMEOUT_S = 2.0


class CollectorSink(SpanSink):
    """A BatchSpanProcessor that never receives more than its queue holds."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _Counting(exporter)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUED_SPANS,
            max_export_batch_size=COLLECTOR_BATCH_SPANS,
            schedule_delay_millis=DELAY_MS,
        )
        self._num_taken = 0
        self._num_refused = 0

    @property
    def num_dropped(self) -> int:  # type: ignore[override]
        """Spans that did not fit, and spans that the collector did not accept."""
        return self._num_refused + self._exporter.num_failed

    def offer(self, span: ReadableSpan) -> None:
        if self._num_taken - self._exporter.num_seen >= QUEUED_SPANS:
            self._num_refused += 1
        else:
            self._num_taken += 1
            self._processor.on_end(span)

    def start(self) -> None:
        """The processor's thread runs already."""

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await loop.run_in_executor(None, self._processor.shutdown)
        except TimeoutError:
            log.warning("the collector does not answer; the last spans are lost")


class _Counting(SpanExporter):
    """Counts exported spans; runs on the processor's thread."""

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
    """The exporter for "grpc" or "http/protobuf"; it reads the standard variables.

    Imported late: most clusters have no collector.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()
