"""Metrics of a worker and their export to the coordinator.

The time of an epoch is split at the timestamps of its steps, in their order:

    wait: computed(previous) -> received    nothing queued and nothing to compute
    (rest): received or computed(previous), the later -> started    handover to the executor
    busy: started -> ready
    send: ready -> sent                     while the next step is computed
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.sdk.metrics.export import ScopeMetrics
from opentelemetry.sdk.resources import Resource

from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage
from stage_worker.backends.contract import GraphCounts, HandedOn, StepObserver, TimedOutput
from telemetry.metrics import definitions
from telemetry.metrics.definitions import Process
from telemetry.metrics.otlp import export_request
from telemetry.metrics.registry import Distribution, Number, Registry, TakeSnapshot, watch_certificate
from telemetry.settings import TelemetrySettings
from telemetry.span_recorder import SpanRecorder, new_resource
from wire.frames import Frame
from wire.gpu import DeviceMemory
from wire.tensors import HiddenStates
from wire.transport import PLAIN, CertificateLife, RenewedChannel, Transport

if TYPE_CHECKING:
    from telemetry.metrics.collector_export import CollectorExport

log = logging.getLogger(__name__)


_PROCESS = psutil.Process()


def resident_bytes() -> int:
    """Resident memory of this process; for every heartbeat, so the process is looked up once."""
    return int(_PROCESS.memory_info().rss)


DEADLINE_S = 1.0


class CoordinatorExport:
    """One call per interval. Failures are counted in `num_failed`; the next export has the same totals."""

    def __init__(
        self,
        coordinator: str,
        take_snapshot: TakeSnapshot,
        resource: Resource,
        *,
        interval_s: float,
        transport: Transport = PLAIN,
    ) -> None:
        self._coordinator, self._transport = coordinator, transport
        self._take_snapshot = take_snapshot
        self._resource = resource
        self._interval_s = interval_s
        self.num_failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        channel = RenewedChannel(self._transport, self._coordinator)
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await self._export(MetricsServiceStub(channel.current()))
        finally:
            await channel.close()

    async def _export(self, stub: Any) -> None:
        request = export_request(self._take_snapshot(), self._resource)
        try:
            response: ExportMetricsServiceResponse = await stub.Export(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.debug("the coordinator does not accept metrics: %s: %s", error.code().name, error.details())
            self.num_failed += 1
        else:
            self.num_failed += response.partial_success.rejected_data_points > 0


class ObservedStage(Protocol):
    """The stage's state, read before each snapshot."""

    @property
    def loaded(self) -> LoadedStage | None: ...

    @property
    def is_idle(self) -> bool:
        """Whether an epoch serves and no frame is queued or computed."""

    @property
    def payload_fallback(self) -> str:
        """Why large hidden states travel over gRPC; empty if nothing is wrong."""


@dataclass(slots=True)
class _Series:
    """Series of one stage. `wait_s` is exact up to the last step; the metric may be microseconds ahead."""

    busy: Number
    wait: Number
    send: Number
    serving: Number
    step_time: Distribution
    received: Number
    sent: Number
    received_bytes: Number
    sent_bytes: Number
    hits: Number
    wanted: Number
    wait_s: float = 0.0


class StageMetrics(StepObserver):
    """Recorded on the event loop. With another stage, the worker continues that stage's series."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = registry.number(definitions.BUSY_TIME)
        self._wait = registry.number(definitions.WAIT_TIME)
        self._send = registry.number(definitions.SEND_TIME)
        self._serving = registry.number(definitions.SERVING_TIME)
        self._step_time = registry.distribution(definitions.STAGE_STEP_TIME)
        self._frames = registry.number(definitions.FRAMES)
        self._bytes = registry.number(definitions.ACTIVATION_BYTES)
        self._hits = registry.number(definitions.PREFIX_HITS)
        self._wanted = registry.number(definitions.PREFIX_WANTED)
        self._blocks = registry.number(definitions.KV_BLOCKS)
        self._states = registry.number(definitions.KV_STATES)
        self._load_time = registry.number(definitions.LOAD_TIME)
        self._memory = registry.number(definitions.STAGE_MEMORY)
        self._how = registry.number(definitions.STAGE_COMPUTE)
        self._graph_steps = registry.number(definitions.GRAPH_STEPS)
        self._graph_eager = registry.number(definitions.GRAPH_EAGER_STEPS)
        self._graphs = registry.number(definitions.GRAPHS)
        self._graph_memory = registry.number(definitions.GRAPH_MEMORY)
        self._fallback = registry.number(definitions.PAYLOAD_FALLBACK)
        self._by_stage: dict[int, _Series] = {}
        self._now: _Series | None = None
        self._counted_s = 0.0
        self._computed_s = 0.0
        self._num_hits = self._num_wanted = 0
        self._stage: ObservedStage | None = None
        registry.read_with(self._read)

    def watch(self, stage: ObservedStage) -> None:
        """Read from this stage. Call once."""
        self._stage = stage

    def epoch_began(self, assignment: Assignment, epoch: int) -> None:
        stage = assignment.stage
        if stage not in self._by_stage:
            self._by_stage[stage] = self._series(str(stage))
        self._now = self._by_stage[stage]
        self._counted_s = self._computed_s = self._clock()
        self._num_hits = self._num_wanted = 0

    def step_done(self, frame: Frame, output: TimedOutput, sent_s: float) -> None:
        series, timing = self._now, output.timing
        if series is None:
            return
        compute_s = timing.ready_s - timing.started_s
        series.busy.value += compute_s
        series.step_time.observe(compute_s)
        series.send.value += sent_s - timing.ready_s
        series.wait_s += max(0.0, timing.received_s - self._computed_s)
        self._computed_s = timing.ready_s
        series.received.value += 1
        series.received_bytes.value += _num_bytes(frame.hidden)
        series.sent.value += 1
        if isinstance(output.output, HandedOn):
            series.sent_bytes.value += _num_bytes(output.output.hidden)

    def epoch_over(self) -> None:
        self._read_counters()
        self._now = None

    def _series(self, stage: str) -> _Series:
        receive, transmit = definitions.DIRECTION.values
        return _Series(
            busy=self._busy.of(stage),
            wait=self._wait.of(stage),
            send=self._send.of(stage),
            serving=self._serving.of(stage),
            step_time=self._step_time.of(stage),
            received=self._frames.of(stage, receive),
            sent=self._frames.of(stage, transmit),
            received_bytes=self._bytes.of(stage, receive),
            sent_bytes=self._bytes.of(stage, transmit),
            hits=self._hits.of(stage),
            wanted=self._wanted.of(stage),
        )

    def _read(self) -> None:
        self._read_counters()
        for family in (
            *(self._blocks, self._load_time, self._memory, self._how, self._fallback),
            *(self._graph_steps, self._graph_eager, self._graphs, self._graph_memory),
        ):
            family.clear()
        if self._stage is not None and (loaded := self._stage.loaded) is not None:
            self._read_stage(loaded)
            self._fallback.of(str(loaded.assignment.stage)).set(bool(self._stage.payload_fallback))

    def _read_counters(self) -> None:
        """Update counters that grow during an epoch even without steps."""
        series, stage = self._now, self._stage
        if series is None or stage is None:
            return
        now_s = self._clock()
        series.serving.value += now_s - self._counted_s
        self._counted_s = now_s
        idle_s = max(0.0, now_s - self._computed_s) if stage.is_idle else 0.0
        # A step may be computed but not reported yet: the counter is then ahead and must not decrease.
        series.wait.value = max(series.wait.value, series.wait_s + idle_s)
        if stage.loaded is not None:
            stats = stage.loaded.executor.stats
            series.hits.value += stats.blocks_hit - self._num_hits
            series.wanted.value += stats.blocks_wanted - self._num_wanted
            self._num_hits, self._num_wanted = stats.blocks_hit, stats.blocks_wanted

    def _read_stage(self, loaded: LoadedStage) -> None:
        stage, stats = str(loaded.assignment.stage), loaded.executor.stats
        for state, count in (
            ("active", stats.blocks_active),
            ("inactive", stats.blocks_inactive),
            ("free", stats.blocks_free),
        ):
            self._blocks.of(stage, state).set(count)
        if loaded.assignment.num_states:
            self._states.of(stage, "live").set(stats.states_live)
            self._states.of(stage, "saved").set(stats.states_saved)
            self._states.of(stage, "free").set(stats.states_free)
        self._load_time.of(stage, "load").set(loaded.load_ms / 1000)
        self._load_time.of(stage, "warmup").set(loaded.warmup_ms / 1000)
        self._memory.of(stage, "weights").set(loaded.weight_bytes)
        self._memory.of(stage, "kv").set(loaded.kv_bytes)
        dtype = loaded.assignment.dtype.value
        self._how.of(loaded.device, dtype, loaded.kernels or "none").set(1)
        if (graphs := stats.graphs) is not None:
            self._read_graphs(stage, graphs)

    def _read_graphs(self, stage: str, graphs: GraphCounts) -> None:
        self._graph_steps.of(stage, "replayed").set(graphs.num_replayed)
        self._graph_steps.of(stage, "eager").set(graphs.num_eager)
        for reason, count in graphs.eager.items():
            self._graph_eager.of(stage, reason.value).set(count)
        self._graphs.of(stage, "recorded").set(graphs.num_recorded)
        self._graphs.of(stage, "failed").set(graphs.num_failed)
        self._graph_memory.of(stage).set(graphs.pool_bytes)


def _num_bytes(hidden: HiddenStates) -> int:
    return sum(memoryview(tensor.data).nbytes for tensor in hidden)


class WorkerMetrics:
    """Used on the event loop only. `stage` observes the sessions; `start` needs the name of the worker."""

    def __init__(self, settings: TelemetrySettings, num_lost_records: Callable[[], int] = lambda: 0) -> None:
        self._settings, self._num_lost_records = settings, num_lost_records
        self._registry = Registry(start_ns=time.time_ns())
        self.stage = StageMetrics(self._registry)
        self._memory = self._registry.number(definitions.RESIDENT_MEMORY).of()
        self._device_memory = self._registry.number(definitions.DEVICE_MEMORY)
        self._read_device: Callable[[], DeviceMemory | None] = lambda: None
        self._dropped_spans = self._registry.number(definitions.DROPPED_SPANS).of()
        self._lost_records = self._registry.number(definitions.LOST_AUDIT_RECORDS).of()
        self._failed_exports = self._registry.number(definitions.FAILED_EXPORTS)
        self._spans: SpanRecorder | None = None
        self._to_coordinator: CoordinatorExport | None = None
        self._to_collector: CollectorExport | None = None
        self._task: asyncio.Task[None] | None = None
        self._registry.read_with(self._read)

    def watch_certificate(self, life: Callable[[], CertificateLife | None]) -> None:
        """Report how long this process's certificate is valid. Call once."""
        watch_certificate(self._registry, life)

    def watch_device(self, read: Callable[[], DeviceMemory | None]) -> None:
        """Report the memory of this process's GPU, if it has one. Call once."""
        self._read_device = read

    def snapshot(self) -> ScopeMetrics:
        return self._registry.snapshot(time.time_ns())

    def start(
        self,
        name: str,
        coordinator: str,
        stage: ObservedStage,
        spans: SpanRecorder,
        transport: Transport = PLAIN,
    ) -> None:
        """Start to export to the coordinator, and to the collector if one is configured."""
        self.stage.watch(stage)
        self._spans = spans
        settings = self._settings
        if settings.is_disabled:
            return
        export, service = settings.metrics, Process.WORKER.value
        self._to_coordinator = CoordinatorExport(
            coordinator,
            self.snapshot,
            Resource({"service.name": service, "service.instance.id": name}),
            interval_s=export.to_coordinator_interval_s,
            transport=transport,
        )
        self._task = asyncio.create_task(self._to_coordinator.run(), name="metrics-to-coordinator")
        if export.collector is None:
            return
        # Imported late: a worker without a collector does not need these megabytes.
        from telemetry.metrics.collector_export import CollectorExport

        resource = new_resource(service, instance=name, version=settings.service_version)
        self._to_collector = CollectorExport(
            export.collector, self.snapshot, resource, interval_s=export.interval_s
        )
        self._to_collector.start()

    async def close(self) -> None:
        """Export once more to the collector, without waiting long."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._to_collector is not None:
            await self._to_collector.close()

    def _read(self) -> None:
        self._memory.set(resident_bytes())
        if (memory := self._read_device()) is not None:
            for kind, size_bytes in (
                ("allocated", memory.allocated_bytes),
                ("reserved", memory.reserved_bytes),
                ("free", memory.free_bytes),
                ("peak", memory.peak_bytes),
                ("pinned", memory.pinned_bytes),
            ):
                self._device_memory.of(kind).set(size_bytes)
        self._lost_records.set(self._num_lost_records())
        if self._spans is not None:
            self._dropped_spans.set(self._spans.num_dropped)
        if self._to_coordinator is not None:
            self._failed_exports.of("coordinator").set(self._to_coordinator.num_failed)
        if self._to_collector is not None:
            self._failed_exports.of("collector").set(self._to_collector.num_failed)
