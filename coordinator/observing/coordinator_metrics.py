"""The coordinator's metrics put together: recorded as things happen, shown to Prometheus, and exported."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from coordinator.cluster.controller import Controller
from coordinator.observing.pipeline_metrics import PipelineMetrics
from coordinator.observing.readouts import Readouts
from coordinator.observing.request_metrics import RequestMetrics
from coordinator.observing.worker_metrics import WorkerMetrics, exposed_workers
from coordinator.requests.engine import Engine
from coordinator.requests.observer import EngineObserver
from telemetry.environment import TelemetrySettings
from telemetry.metrics import definitions
from telemetry.metrics.metric import Process
from telemetry.metrics.prometheus import Exposed, prometheus_text
from telemetry.metrics.registry import Registry
from telemetry.metrics.snapshot import Snapshot
from telemetry.span_recorder import new_resource

if TYPE_CHECKING:
    from telemetry.metrics.collector_export import CollectorExport


class CoordinatorMetrics:
    """Used from the event loop only. `observers` are for the engine; `watch` it before `start`."""

    def __init__(self, settings: TelemetrySettings, *, instance: str) -> None:
        """`instance` tells coordinators apart, in a collector."""
        self._settings = settings
        self._instance = instance
        self._registry = Registry(start_ns=time.time_ns())
        self.requests = RequestMetrics(self._registry)
        self.pipeline = PipelineMetrics(self._registry)
        self.observers: tuple[EngineObserver, ...] = (self.requests, self.pipeline)
        self._memory = self._registry.number(definitions.RESIDENT_MEMORY).of()
        self._failed_exports = self._registry.number(definitions.FAILED_EXPORTS)
        self._export: CollectorExport | None = None
        self._workers: WorkerMetrics | None = None

    def watch(
        self, engine: Engine, controller: Controller, *, num_dropped_spans: Callable[[], int] = lambda: 0
    ) -> None:
        """Reads off these two, now and then; once."""
        Readouts(self._registry, engine, controller, num_dropped_spans)
        self._workers = WorkerMetrics(lambda: controller.connections)
        self._registry.read_with(lambda: self.pipeline.read(engine.now_s()))
        self._registry.read_with(self._read)

    def start(self) -> None:
        """Exports to the collector from now on, if there is one."""
        settings, export = self._settings, self._settings.metrics
        if settings.is_disabled or export.collector is None:
            return
        from telemetry.metrics.collector_export import CollectorExport

        resource = new_resource(
            Process.COORDINATOR.value,
            instance=self._instance,
            version=settings.service_version,
        )
        self._export = CollectorExport(
            export.collector, self.snapshot, resource, interval_s=export.interval_s
        )
        self._export.start()

    async def close(self) -> None:
        """Exports once more, without waiting for long."""
        if self._export is not None:
            await self._export.close()

    def take(self, request: ExportMetricsServiceRequest) -> int:
        """What workers export to the coordinator. Returns how many of their resources were refused."""
        assert self._workers is not None, "take before watch"
        now_s = time.monotonic()
        self._workers.forget_old(now_s)
        return self._workers.take(request, now_s)

    def snapshot(self) -> Snapshot:
        """The coordinator's own metrics as of now."""
        return self._registry.snapshot(time.time_ns())

    async def metrics_text(self, accept: str) -> tuple[bytes, str]:
        """For `/metrics`: the text of coordinator and workers, and its content type, as the header `accept`
        wishes.
        """
        assert self._workers is not None, "metrics_text before watch"
        self._workers.forget_old(time.monotonic())
        return await asyncio.to_thread(_text, self.snapshot(), self._workers.last(), accept)

    def _read(self) -> None:
        self._memory.set(psutil.Process().memory_info().rss)
        if self._export is not None:
            self._failed_exports.of("collector").set(self._export.num_failed)


def _text(own: Snapshot, workers: dict[str, ResourceMetrics], accept: str) -> tuple[bytes, str]:
    return prometheus_text([Exposed("", own), *exposed_workers(workers)], accept)
