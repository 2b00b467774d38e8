"""A worker's metrics put together: recorded as steps are done, and exported."""

import asyncio
import time
from typing import TYPE_CHECKING

from stage_worker.metrics_export import CoordinatorExport
from stage_worker.process_memory import resident_bytes
from stage_worker.stage_metrics import ObservedStage, StageMetrics
from telemetry.environment import TelemetrySettings
from telemetry.metrics import definitions
from telemetry.metrics.metric import Process
from telemetry.metrics.registry import Registry
from telemetry.metrics.snapshot import Snapshot
from telemetry.span_recorder import SpanRecorder, new_resource

if TYPE_CHECKING:
    from telemetry.metrics.collector_export import CollectorExport


class WorkerMetrics:
    """Used from the event loop only. `stage` is for the sessions; `start` once the worker has its name."""

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._registry = Registry(start_ns=time.time_ns())
        self.stage = StageMetrics(self._registry)
        self._memory = self._registry.number(definitions.RESIDENT_MEMORY).of()
        self._dropped_spans = self._registry.number(definitions.DROPPED_SPANS).of()
        self._failed_exports = self._registry.number(definitions.FAILED_EXPORTS)
        self._spans: SpanRecorder | None = None
        self._to_coordinator: CoordinatorExport | None = None
        self._to_collector: CollectorExport | None = None
        self._task: asyncio.Task[None] | None = None
        self._registry.read_with(self._read)

    def snapshot(self) -> Snapshot:
        """All metrics as of now."""
        return self._registry.snapshot(time.time_ns())

    def start(self, name: str, coordinator: str, stage: ObservedStage, spans: SpanRecorder) -> None:
        """Exports from now on: to the coordinator, and to the collector if there is one."""
        self.stage.watch(stage)
        self._spans = spans
        settings = self._settings
        if settings.is_disabled:
            return
        export, service = settings.metrics, Process.WORKER.value
        self._to_coordinator = CoordinatorExport(
            coordinator,
            self.snapshot,
            {"service.name": service, "service.instance.id": name},
            interval_s=export.to_coordinator_interval_s,
        )
        self._task = asyncio.create_task(self._to_coordinator.run(), name="metrics-to-coordinator")
        if export.collector is None:
            return
        # Imported late: some MB that a worker without a collector does not need.
        from telemetry.metrics.collector_export import CollectorExport

        resource = new_resource(service, instance=name, version=settings.service_version)
        self._to_collector = CollectorExport(
            export.collector, self.snapshot, resource, interval_s=export.interval_s
        )
        self._to_collector.start()

    async def close(self) -> None:
        """Exports once more to the collector, without waiting for long."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._to_collector is not None:
            await self._to_collector.close()

    def _read(self) -> None:
        self._memory.set(resident_bytes())
        if self._spans is not None:
            self._dropped_spans.set(self._spans.num_dropped)
        if self._to_coordinator is not None:
            self._failed_exports.of("coordinator").set(self._to_coordinator.num_failed)
        if self._to_collector is not None:
            self._failed_exports.of("collector").set(self._to_collector.num_failed)
