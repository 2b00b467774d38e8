"""Metrics of the coordinator, and the last export of each worker.

Exports are stored as they arrive and parsed on the thread that writes the text for `/metrics`.
"""

import asyncio
import itertools
import time
from collections import Counter, abc, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from opentelemetry.sdk.metrics.export import ScopeMetrics
from opentelemetry.sdk.resources import Resource

from coordinator.cluster.controller import Controller
from coordinator.cluster.membership import Members
from coordinator.engine.engine import Engine
from coordinator.engine.observer import EndCause
from coordinator.engine.request import Request
from coordinator.observability.facts import FactObserver, RequestRecord, SentStep, StepRecord
from coordinator.observability.steps import BubbleWindow
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import SequenceState
from telemetry.metrics import definitions
from telemetry.metrics.definitions import WORKER, Process
from telemetry.metrics.otlp import export_request, resource_attributes
from telemetry.metrics.prometheus import Exposed, prometheus_text
from telemetry.metrics.registry import Registry, watch_certificate
from telemetry.settings import TelemetrySettings
from telemetry.span_recorder import new_resource
from wire.audit import NO_AUDIT, AuditLog
from wire.errors import (
    ClusterUnavailable,
    InvalidRequest,
    JournalUnavailable,
    Overloaded,
)
from wire.peer_secrets import RefusedPeers
from wire.steps import StageTime, Step
from wire.transport import CertificateLife

if TYPE_CHECKING:
    from telemetry.metrics.collector_export import CollectorExport


@dataclass(slots=True)
class _StageTotals:
    """Total times of all answered steps at one stage, in microseconds."""

    hop: int = 0
    receive: int = 0
    wait: int = 0
    compute: int = 0


class PipelineMetrics(FactObserver):
    """Metrics of steps, stages and recoveries."""

    def __init__(self, registry: Registry) -> None:
        self._step_time = registry.distribution(definitions.STEP_TIME).of()
        self._scheduler_time = registry.distribution(definitions.SCHEDULER_TIME).of()
        self._part_time = registry.number(definitions.STEP_PART_TIME)
        self._active_time = registry.number(definitions.ACTIVE_TIME).of()
        self._recoveries = registry.number(definitions.RECOVERIES)
        self._recovery_time = registry.distribution(definitions.RECOVERY_TIME)
        for reason in definitions.REASON.values:
            self._recoveries.of(reason)
        self._bubble = registry.number(definitions.BUBBLE)
        self._window = BubbleWindow()
        self._stages: list[_StageTotals] = []
        self._num_in_flight = 0
        self._counted_s = 0.0
        self._broken: tuple[float, str] | None = None

    def step_scheduled(self, duration_s: float) -> None:
        self._scheduler_time.observe(duration_s)

    def step_sent(self, sent: SentStep, step: Step) -> None:
        if self._num_in_flight:
            self._count_active(sent.sent_s)
        self._num_in_flight += 1
        self._counted_s = sent.sent_s

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        self._step_time.observe(record.duration_s)
        computed_us = self._add_times(record.stage_times)
        self._count_active(record.answered_s, computed_s=computed_us / 1e6)
        self._num_in_flight -= 1

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        if self._num_in_flight:
            self._count_active(now_s)
        self._num_in_flight = 0
        if cause is not None:
            label = cause.name.lower()
            self._recoveries.of(label).add()
            self._broken = (now_s, label)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        if self._broken is not None:
            broken_s, label = self._broken
            self._recovery_time.of(label).observe(now_s - broken_s)
            self._broken = None

    def read(self, now_s: float) -> None:
        """Update the metrics that do not change with every step."""
        share = self.bubble_share(now_s)
        for stage, totals in enumerate(self._stages):
            for part in definitions.STEP_PART.values:
                self._part_time.of(str(stage), part).set(getattr(totals, part) / 1e6)
        self._bubble.clear()
        if share is not None:
            self._bubble.of().set(share)

    def bubble_share(self, now_s: float) -> float | None:
        """Share of the time with steps in flight in which stages computed nothing, over the last seconds.

        None without steps in flight.
        """
        if self._num_in_flight:
            self._count_active(now_s)
        return self._window.share(now_s)

    def _count_active(self, now_s: float, *, computed_s: float = 0.0) -> None:
        active_s = now_s - self._counted_s
        self._counted_s = now_s
        self._active_time.add(active_s)
        self._window.add(now_s, active_s=active_s, computed_s=computed_s)

    def _add_times(self, times: abc.Sequence[StageTime]) -> float:
        """Add a step's times. Returns the mean compute time of the stages in microseconds."""
        if not times:
            return 0.0
        while len(self._stages) < len(times):
            self._stages.append(_StageTotals())
        computed_us = 0
        for totals, this_time in zip(self._stages, times, strict=False):
            totals.hop += max(0, this_time.hop_us)
            totals.receive += this_time.receive_us
            totals.wait += this_time.wait_us
            totals.compute += this_time.compute_us
            computed_us += this_time.compute_us
        return computed_us / len(times)


class RequestMetrics(FactObserver):
    """Counters and histograms of requests."""

    def __init__(self, registry: Registry) -> None:
        self._queue_time = registry.distribution(definitions.QUEUE_TIME).of()
        self._first_token_time = registry.distribution(definitions.FIRST_TOKEN_TIME).of()
        self._inter_token_time = registry.distribution(definitions.INTER_TOKEN_TIME).of()
        self._request_time = registry.distribution(definitions.REQUEST_TIME)
        self._num_generated = registry.number(definitions.GENERATED_TOKENS).of()
        self._refused = registry.number(definitions.REQUESTS_REFUSED)
        for reason in definitions.REFUSAL.values:
            self._refused.of(reason)

    def count_refusal(self, error: Exception) -> None:
        """Count a request that was not accepted because of `error`."""
        self._refused.of(_refusal(error)).add()

    def request_started(self, record: RequestRecord) -> None:
        assert record.started_s is not None
        self._queue_time.observe(record.started_s - record.accepted_s)

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        self._num_generated.add(record.num_tokens_generated)
        for wait_s, count in record.inter_token:
            self._inter_token_time.observe(wait_s, count)
        for token in record.first_tokens:
            self._first_token_time.observe(token.since_accepted_s)

    def request_ended(self, record: RequestRecord) -> None:
        assert record.ended_s is not None
        assert record.outcome is not None
        self._request_time.of(record.outcome.value).observe(record.ended_s - record.accepted_s)


def _refusal(error: Exception) -> str:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "unavailable" if isinstance(error, ClusterUnavailable | JournalUnavailable) else "other"


class Gauges:
    """Metrics that are read from engine and controller before each snapshot."""

    def __init__(
        self, registry: Registry, engine: Engine, controller: Controller, num_dropped_spans: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._members = controller.state.workers
        self._availability = controller.availability
        self._num_dropped_spans = num_dropped_spans
        self._serving = registry.number(definitions.SERVING).of()
        self._requests = registry.number(definitions.REQUESTS)
        self._ended = registry.number(definitions.REQUESTS_ENDED)
        self._num_prompt = registry.number(definitions.PROMPT_TOKENS).of()
        self._num_cached = registry.number(definitions.CACHED_TOKENS).of()
        self._num_preemptions = registry.number(definitions.PREEMPTIONS).of()
        self._num_in_flight = registry.number(definitions.STEPS_IN_FLIGHT).of()
        self._workers = registry.number(definitions.WORKERS)
        self._dropped_spans = registry.number(definitions.DROPPED_SPANS).of()
        self._journal_failing = registry.number(definitions.JOURNAL_FAILING).of()
        self._num_unwritten = registry.number(definitions.JOURNAL_UNWRITTEN).of()
        registry.read_with(self._read)

    def _read(self) -> None:
        self._serving.set(self._availability.serves_new)
        numbers = self._engine.snapshot()
        states = Counter(map(request_state, self._engine.live_requests))
        states["preparing"] = numbers.num_preparing
        for state in definitions.REQUEST_STATE.values:
            self._requests.of(state).set(states[state])
        self._ended.of("finished").set(numbers.ended.finished)
        self._ended.of("cancelled").set(numbers.ended.cancelled)
        self._ended.of("failed").set(numbers.ended.failed)
        self._num_prompt.set(numbers.scheduled.num_prompt_tokens)
        self._num_cached.set(numbers.scheduled.num_cached_tokens)
        self._num_preemptions.set(numbers.scheduled.num_preemptions)
        self._num_in_flight.set(numbers.num_steps_in_flight)
        self._dropped_spans.set(self._num_dropped_spans())
        self._journal_failing.set(self._engine.journal_failure is not None)
        self._num_unwritten.set(self._engine.num_unwritten_records)
        workers = worker_states(self._members)
        for state in definitions.WORKER_STATE.values:
            self._workers.of(state).set(workers[state])


def worker_states(members: Members) -> Counter[str]:
    """Number of workers by state. Lost workers count, workers that left do not."""
    return Counter(record.shown_state.name.lower() for record in (*members, *members.lost))


def request_state(request: Request) -> str:
    """The state of the least advanced choice."""
    states = [sequence.state for sequence in request.live_sequences]
    if any(state.is_queued for state in states):
        return "queued"
    return "prefill" if SequenceState.PREFILL in states else "decode"


LAG_INTERVAL_S = 0.025
"""Between two measurements of the loop's lag; one takes a few microseconds."""
LAG_WINDOW_S = 10.0
"""Window of the lag in the status."""


class LoopLag:
    """Measures how late the event loop runs a timer."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is finer than the loop's own, which uvloop reads once per turn, in milliseconds."""
        self._lag = registry.distribution(definitions.LOOP_LAG).of()
        self._recent = deque[float](maxlen=round(LAG_WINDOW_S / LAG_INTERVAL_S))
        self._clock = clock
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure until `stop`."""
        self._due_s = self._clock() + LAG_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(LAG_INTERVAL_S, self._measure)

    def stop(self) -> None:
        """Stop measuring; may be called in every state."""
        if self._timer is not None:
            self._timer.cancel()

    def recent(self) -> tuple[float, float] | None:
        """Median and p99 of the last `LAG_WINDOW_S`, in seconds; None before the first measurement."""
        if not self._recent:
            return None
        lags = sorted(self._recent)
        return lags[len(lags) // 2], lags[len(lags) * 99 // 100]

    def _measure(self) -> None:
        lag_s = max(0.0, self._clock() - self._due_s)
        self._lag.observe(lag_s)
        self._recent.append(lag_s)
        self.start()


KEPT_S = 60.0
"""How long the metrics of a disconnected worker are shown."""
MAX_BYTES = 512 * 1024
"""Limit of one worker's export; usually some 5 kB."""


@dataclass(slots=True)
class _Kept:
    metrics: ResourceMetrics
    seen_s: float


class WorkerMetricsStore:
    """The last export of each connected worker, and for a while of disconnected ones."""

    def __init__(self, known: Callable[[], Collection[str]]) -> None:
        """`known` returns the names of the connected workers."""
        self._known = known
        self._kept: dict[str, _Kept] = {}

    def take(self, request: ExportMetricsServiceRequest, now_s: float) -> int:
        """Store the exports of connected workers. Returns the number of rejected points."""
        known = self._known()
        num_refused = 0
        for metrics in request.resource_metrics:
            resource = resource_attributes(metrics)
            name = resource.get("service.instance.id", "")
            is_worker = resource.get("service.name") == Process.WORKER.value
            if not is_worker or name not in known or not self._has_room(name, metrics):
                num_refused += num_points(metrics)
                continue
            self._kept[name] = _Kept(metrics, now_s)
        return num_refused

    def forget_old(self, now_s: float) -> None:
        """Remove exports of workers that disconnected more than `KEPT_S` ago."""
        known = self._known()
        for name, kept in list(self._kept.items()):
            if name in known:
                kept.seen_s = now_s
            elif now_s - kept.seen_s > KEPT_S:
                del self._kept[name]

    def last(self) -> dict[str, ResourceMetrics]:
        """By worker name. These messages do not change afterwards."""
        return {name: kept.metrics for name, kept in sorted(self._kept.items())}

    def _has_room(self, name: str, metrics: ResourceMetrics) -> bool:
        is_there = name in self._kept or len(self._kept) < WORKER.num_values
        return is_there and metrics.ByteSize() <= MAX_BYTES


def num_points(message: ResourceMetrics) -> int:
    """Number of points; every kind of metric has them in `data_points`."""
    metrics = (metric for scope in message.scope_metrics for metric in scope.metrics)
    kinds = ((metric, metric.WhichOneof("data")) for metric in metrics)
    return sum(len(getattr(metric, kind).data_points) for metric, kind in kinds if kind is not None)


class CoordinatorMetrics:
    """Used from the event loop only. `observers` are for a `FactRecorder`; `watch` it before `start`."""

    def __init__(self, settings: TelemetrySettings, *, instance: str, audit: AuditLog = NO_AUDIT) -> None:
        """`instance` identifies this process in a collector; `audit` gets what is refused."""
        self._settings, self._audit = settings, audit
        self._instance = instance
        self._registry = Registry(start_ns=time.time_ns())
        self.requests = RequestMetrics(self._registry)
        self.pipeline = PipelineMetrics(self._registry)
        self.loop_lag = LoopLag(self._registry)
        self.observers: tuple[FactObserver, ...] = (self.requests, self.pipeline)
        self._memory = self._registry.number(definitions.RESIDENT_MEMORY).of()
        self._process = psutil.Process()
        self._failed_exports = self._registry.number(definitions.FAILED_EXPORTS)
        lost = self._registry.number(definitions.LOST_AUDIT_RECORDS).of()
        self._registry.read_with(lambda: lost.set(audit.num_lost))
        access = self._registry.number(definitions.ACCESS_REFUSED)
        self._refused_access = {secret: access.of(secret) for secret in definitions.ACCESS.values}
        self._export: CollectorExport | None = None
        self._workers: WorkerMetricsStore | None = None

    def watch_certificate(self, life: Callable[[], CertificateLife | None]) -> None:
        """Report how long this process's certificate is valid. Call once."""
        watch_certificate(self._registry, life)

    def watch(
        self, engine: Engine, controller: Controller, *, num_dropped_spans: Callable[[], int] = lambda: 0
    ) -> None:
        """Read gauges from these two. Call once."""
        Gauges(self._registry, engine, controller, num_dropped_spans)
        self._workers = WorkerMetricsStore(lambda: controller.connections)
        self._registry.read_with(lambda: self.pipeline.read(engine.now_s()))
        self._registry.read_with(self._read)

    def refused_peers(self, secret: str) -> RefusedPeers:
        """Count and log wrong secrets of this kind, a value of the label."""
        return RefusedPeers(time.monotonic, self._refused_access[secret].add, self._audit)

    def start(self) -> None:
        """Start to measure the loop, and to export to the collector if one is configured."""
        self.loop_lag.start()
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
        """Export once more, without waiting long."""
        self.loop_lag.stop()
        if self._export is not None:
            await self._export.close()

    def take(self, request: ExportMetricsServiceRequest) -> int:
        """Store an export of workers. Returns the number of rejected points."""
        assert self._workers is not None, "take before watch"
        now_s = time.monotonic()
        self._workers.forget_old(now_s)
        return self._workers.take(request, now_s)

    def snapshot(self) -> ScopeMetrics:
        """The coordinator's own metrics."""
        return self._registry.snapshot(time.time_ns())

    async def metrics_text(self, accept: str) -> tuple[bytes, str]:
        """Return `/metrics` of all processes as text, and the content type for the header `accept`."""
        assert self._workers is not None, "metrics_text before watch"
        self._workers.forget_old(time.monotonic())
        return await asyncio.to_thread(_text, self.snapshot(), self._workers.last(), accept)

    def _read(self) -> None:
        self._memory.set(self._process.memory_info().rss)
        if self._export is not None:
            self._failed_exports.of("collector").set(self._export.num_failed)


def _text(own: ScopeMetrics, workers: dict[str, ResourceMetrics], accept: str) -> tuple[bytes, str]:
    (coordinator,) = export_request(own, Resource({})).resource_metrics
    return prometheus_text([Exposed("", coordinator), *itertools.starmap(Exposed, workers.items())], accept)
