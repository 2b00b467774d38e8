"""Exports this process's metrics to a collector: snapshots on the event loop, the SDK's exporter on a thread.

A slow collector receives fewer snapshots, an unreachable one none; nothing blocks. The SDK's periodic reader
collects on its own thread, where the engine's state must not be read.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import Full, Queue

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData, ScopeMetrics
from opentelemetry.sdk.resources import Resource

from telemetry.metrics.otlp import metrics_data
from telemetry.metrics.registry import TakeSnapshot
from telemetry.settings import OtlpProtocol

log = logging.getLogger(__name__)

_LAST_EXPORT_TIMEOUT_S = 0.5


class CollectorExport:
    """Created, started and closed on the event loop. `num_failed` counts failed and skipped exports."""

    def __init__(
        self,
        protocol: OtlpProtocol,
        take_snapshot: TakeSnapshot,
        resource: Resource,
        *,
        interval_s: float,
        new_exporter: Callable[[OtlpProtocol], MetricExporter] | None = None,
    ) -> None:
        self._protocol = protocol
        self._take_snapshot = take_snapshot
        self._resource = resource
        self._interval_s = interval_s
        self._new_exporter = new_exporter or new_otlp_exporter
        self._next: Queue[ScopeMetrics | None] = Queue(maxsize=1)
        self._num_dropped = 0
        self._num_refused = 0
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None
        self._exporter: MetricExporter | None = None
        # A daemon: an export that hangs must not delay the exit of the process.
        self._thread = threading.Thread(target=self._export, name="metrics-export", daemon=True)

    @property
    def num_failed(self) -> int:
        return self._num_dropped + self._num_refused

    def start(self) -> None:
        """Start to export once per interval."""
        self._thread.start()
        self._task = asyncio.create_task(self._snapshots(), name="metrics-snapshots")

    async def close(self) -> None:
        """Export once more, for at most half a second."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._offer(self._take_snapshot())
        await asyncio.to_thread(self._end)

    async def _snapshots(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._offer(self._take_snapshot())

    def _offer(self, snapshot: ScopeMetrics) -> None:
        try:
            self._next.put_nowait(snapshot)
        except Full:
            self._num_dropped += 1

    def _end(self) -> None:
        if self._thread.is_alive():
            try:
                self._next.put(None, timeout=_LAST_EXPORT_TIMEOUT_S)
            except Full:
                log.debug("the last metrics are lost: an export has not ended")
            self._thread.join(_LAST_EXPORT_TIMEOUT_S)
        if self._exporter is not None:
            self._exporter.shutdown(timeout_millis=0)

    def _export(self) -> None:
        try:
            self._exporter = exporter = self._new_exporter(self._protocol)
        except Exception as error:
            log.error("metrics are not exported: %s", error)
            return
        while (snapshot := self._next.get()) is not None:
            self._note(exporter_took=self._try(exporter, metrics_data(snapshot, self._resource)))

    def _try(self, exporter: MetricExporter, data: MetricsData) -> bool:
        try:
            return exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:
            log.debug("export of metrics failed", exc_info=True)
            return False

    def _note(self, *, exporter_took: bool) -> None:
        self._num_refused += not exporter_took
        if exporter_took and self._is_failing:
            log.info("the collector accepts metrics again")
        elif not exporter_took and not self._is_failing:
            log.warning("the collector does not accept metrics; further failures are counted, not logged")
        self._is_failing = not exporter_took


def new_otlp_exporter(protocol: OtlpProtocol) -> MetricExporter:
    """The exporter, configured by the environment. Imported late: it takes some MB."""
    # It warns at every attempt; failures are logged once here.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    if protocol is OtlpProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter()
