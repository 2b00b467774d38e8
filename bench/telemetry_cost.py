"""Cost of telemetry: a step on the coordinator and on a worker, a span, a snapshot, an export, a scrape.

    python -m bench.telemetry_cost [--steps 2000]

Times are medians in microseconds, of processor time where a step is measured. "step" is the total time in
the coordinator's observers, from scheduling to the answer: a real engine sends steps and receives answers in
which every sequence gets a token. "SDK" is the same with the values of a step recorded through
OpenTelemetry's instruments. "text" is written on a thread beside the event loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import starmap

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from bench.figures.coordinator_cost import _kv_log, _limits, _request
from checkpoint import DType
from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.engine import Engine
from coordinator.engine.observer import EngineObserver
from coordinator.observability.facts import FactObserver, FactRecorder
from coordinator.observability.metrics import PipelineMetrics, RequestMetrics, WorkerMetricsStore
from coordinator.observability.request_traces import RequestTraces
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.batch import SequenceUpdate
from stage_worker.assignment import Assignment, ModelShape
from stage_worker.backends.contract import HandedOn, StepTiming, TimedOutput
from stage_worker.metrics import ObservedStage, StageMetrics
from stage_worker.spans import StageSpans
from telemetry.metrics import definitions
from telemetry.metrics.definitions import Metric, Process
from telemetry.metrics.otlp import export_request
from telemetry.metrics.prometheus import Exposed, prometheus_text
from telemetry.metrics.registry import Attributes, Distribution, Family, Number, Registry
from telemetry.span_recorder import SpanRecorder, new_resource, ratio_sampler
from telemetry.span_sinks import SpanSink
from wire.clock import ClusterClock
from wire.frames import Frame
from wire.ids import SequenceKey, StageRole, new_request_id
from wire.sampling import StepSampling
from wire.steps import (
    Decode,
    Prefill,
    SliceResult,
    StageTime,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
)
from wire.tensors import TensorView
from wire.trace_context import format_traceparent, span_context

NUM_STAGES = 8
STAGE_TIMES = (StageTime(100, 20_000, 200, 30),) * NUM_STAGES
WARM_UP = 50


class TimedObserver(EngineObserver):
    """Forwards the engine's events, and measures the CPU time of observing each step."""

    def __init__(self, inner: EngineObserver) -> None:
        self._inner = inner
        self._spent_ns = 0
        self.steps_us: list[float] = []
        self.accepted = self._inner.accepted  # type: ignore[method-assign]

    def step_scheduled(self, duration_s: float) -> None:
        began = time.thread_time_ns()
        self._inner.step_scheduled(duration_s)
        self._spent_ns += time.thread_time_ns() - began

    def step_sent(self, step: Step, now_s: float) -> None:
        began = time.thread_time_ns()
        self._inner.step_sent(step, now_s)
        self._spent_ns += time.thread_time_ns() - began
        self.steps_us.append(self._spent_ns / 1e3)
        self._spent_ns = 0

    def step_completed(
        self, result: StepResult, progress: Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        began = time.thread_time_ns()
        self._inner.step_completed(result, progress, sent_s, now_s)
        self._spent_ns += time.thread_time_ns() - began


METER = MeterProvider(metric_readers=[InMemoryMetricReader()]).get_meter("bench")


class SdkNumber(Number):
    """Records each change with an SDK instrument, too."""

    __slots__ = ("_counter", "_sdk_attributes", "_total")

    def __init__(self, metric: Metric, attributes: Attributes) -> None:
        self._counter = METER.create_up_down_counter(metric.name)
        self._sdk_attributes = attributes
        self._total = 0.0
        super().__init__(metric, attributes)

    @property
    def value(self) -> float:
        return self._total

    @value.setter
    def value(self, total: float) -> None:
        self._counter.add(total - self._total, self._sdk_attributes)
        self._total = total


class SdkDistribution(Distribution):
    """Records each value with an SDK instrument, too."""

    __slots__ = ("_histogram", "_sdk_attributes")

    def __init__(self, metric: Metric, attributes: Attributes) -> None:
        bounds = list(metric.bounds)
        self._histogram = METER.create_histogram(metric.name, explicit_bucket_boundaries_advisory=bounds)
        self._sdk_attributes = attributes
        super().__init__(metric, attributes)

    def observe(self, value: float, count: int = 1) -> None:
        for _ in range(count):
            self._histogram.record(value, self._sdk_attributes)


class SdkRegistry(Registry):
    """Records through the SDK's instruments."""

    def number(self, metric: Metric) -> Family[Number]:
        family: Family[Number] = Family(metric, SdkNumber)
        self._register(family)
        return family

    def distribution(self, metric: Metric) -> Family[Distribution]:
        family: Family[Distribution] = Family(metric, SdkDistribution)
        self._register(family)
        return family


class NoSink(SpanSink):
    """Discards all spans."""

    num_dropped = 0

    def offer(self, span: ReadableSpan) -> None:
        pass

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _recorder(sink: SpanSink) -> SpanRecorder:
    return SpanRecorder(new_resource("bench", instance="bench", version="0"), ClusterClock(), (sink,))


def metric_observers(registry: Registry) -> tuple[FactObserver, ...]:
    return (RequestMetrics(registry), PipelineMetrics(registry))


def trace_observers() -> tuple[FactObserver, ...]:
    """Metrics and spans: both read the same records."""
    traces = RequestTraces(_recorder(NoSink()), ratio_sampler(1.0), model="bench")
    return (traces, *metric_observers(Registry(start_ns=0)))


def coordinator_step_us(observers: tuple[FactObserver, ...], num_sequences: int, num_steps: int) -> float:
    """One step in flight at a time, with all sequences."""
    observer = TimedObserver(FactRecorder(observers))
    limits = AdmissionLimits(queue_size=2 * num_sequences, max_unread_tokens=1 << 30)
    engine = Engine(limits, policy=DEFAULT_POLICY, observer=observer, call_soon=lambda callback: None)
    sent: list[Step] = []
    engine.start_epoch(1, _kv_log(), _limits(1), sent.append, max_sequence_tokens=1 << 20)
    for index in range(num_sequences):
        engine.submit(_request(index))
    steady = 0
    while steady < num_steps + WARM_UP:
        step = sent.pop()
        steady = steady + 1 if step.num_slices == num_sequences and not step.starts else 0
        results = tuple(
            SliceResult(part.sequence, part.restart_count, 7) for part in step.slices if part.is_answered
        )
        engine.complete(StepResult.of(step.epoch, step.step_id, results, STAGE_TIMES))
        engine.deliver()
    return statistics.median(observer.steps_us[-num_steps:])


def span_step_us(num_sequences: int, num_steps: int) -> float:
    """A decode step of traced sequences on a stage: the mean, including the spans that it ends."""
    spans = StageSpans(_recorder(NoSink()), NoStage(), worker="bench")
    spans.epoch_began(_assignment(0), 1)
    keys = [SequenceKey(new_request_id(), 0) for _ in range(num_sequences)]
    parent = format_traceparent(span_context(1, 2))
    starts = tuple(StartRecord(key, 0, 1, (1,), StepSampling(), parent) for key in keys)
    output = TimedOutput(HandedOn(0, 0, ()), (), 0, StepTiming(1.0, 1.1, 1.2, 1.3, 0.1))
    spans.step_done(Frame(Step(epoch=1, step_id=0, starts=starts), ()), output, 1.4)
    slices = tuple(StepSlice(key, 0, (1,), Decode(1)) for key in keys)
    frames = [Frame(Step.of(slices, epoch=1, step_id=step_id), ()) for step_id in range(num_steps)]
    began = time.perf_counter_ns()
    for frame in frames:
        spans.step_done(frame, output, 1.4)
    return (time.perf_counter_ns() - began) / 1e3 / num_steps


def encoded_span_us() -> float:
    """Time to encode a stage span in a batch of 16."""
    sink = KeptSpans()
    spans = StageSpans(_recorder(sink), NoStage(), worker="bench")
    spans.epoch_began(_assignment(0), 1)
    parent = format_traceparent(span_context(1, 2))
    output = TimedOutput(HandedOn(0, 0, ()), (), 0, StepTiming(1.0, 1.1, 1.2, 1.3, 0.1))
    for _ in range(16):
        key = SequenceKey(new_request_id(), 0)
        start = StartRecord(key, 0, 1, (1,), StepSampling(), parent)
        part = StepSlice(key, 0, (1,), Prefill(0, 1, 1))
        step = Step.of((part,), epoch=1, step_id=0, starts=(start,))
        spans.step_done(Frame(step, ()), output, 1.4)
    return _median_us(lambda: encode_spans(sink.spans).SerializeToString(), 200) / 16


class NoStage(ObservedStage):
    """A worker without a stage."""

    loaded = None
    is_idle = True
    payload_fallback = ""


class KeptSpans(NoSink):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def offer(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def worker_step_us(registry: Registry, num_steps: int) -> float:
    metrics = _stage_metrics(registry)
    hidden = (TensorView(DType.BF16, (16, 64), bytes(16 * 64 * 2)),)
    frame = Frame(Step(epoch=1, step_id=0), hidden)
    times = []
    for index in range(num_steps):
        output = TimedOutput(HandedOn(0, 0, hidden), (), 0, StepTiming(index, index, index, index + 0.5, 0))
        times.append(_median_us(lambda output=output: metrics.step_done(frame, output, 1.0), 1))  # type: ignore[misc]
    return statistics.median(times)


def _stage_metrics(registry: Registry, stage: int = 0) -> StageMetrics:
    metrics = StageMetrics(registry)
    metrics.epoch_began(_assignment(stage), 1)
    return metrics


def _assignment(stage: int) -> Assignment:
    return Assignment(
        plan_id=1,
        stage=stage,
        num_stages=NUM_STAGES,
        role=StageRole.of_stage(stage, NUM_STAGES),
        layer_begin=stage,
        layer_end=stage + 1,
        model_directory="",
        fingerprint="",
        dtype=DType.BF16,
        block_size=16,
        num_blocks=64,
        max_step_tokens=64,
        max_step_sequences=8,
        max_sequence_tokens=64,
        model_shape=ModelShape(hidden_size=64, vocab_size=64, eos_token_ids=()),
    )


def _worker_registry(stage: int) -> Registry:
    """A registry with about as many series as a worker has."""
    registry = Registry(start_ns=0)
    _stage_metrics(registry, stage % NUM_STAGES)
    registry.number(definitions.RESIDENT_MEMORY).of().set(7e7)
    registry.number(definitions.FAILED_EXPORTS).of("coordinator").set(1)
    return registry


def _coordinator_registry() -> Registry:
    registry = Registry(start_ns=0)
    RequestMetrics(registry)
    pipeline = PipelineMetrics(registry)
    facts = FactRecorder((pipeline,))
    facts.step_sent(Step(epoch=1, step_id=0), 0.0)
    facts.step_completed(StepResult.of(1, 0, (), STAGE_TIMES), (), 0.0, 1.0)
    registry.read_with(lambda: pipeline.read(1.0))
    return registry


def _median_us(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(times)


def scrape_us(num_workers: int) -> tuple[float, float, float, int]:
    """Time to take a worker's export, a snapshot and the text, and the text's size in bytes."""
    kept = WorkerMetricsStore(lambda: {f"w{index}" for index in range(num_workers)})
    for index in range(num_workers):
        resource = Resource({"service.name": Process.WORKER.value, "service.instance.id": f"w{index}"})
        request = export_request(_worker_registry(index).snapshot(1), resource)
        assert kept.take(request, 0.0) == 0
    taking_us = _median_us(lambda: kept.take(request, 0.0), 200)
    registry = _coordinator_registry()
    snapshot_us = _median_us(lambda: registry.snapshot(1), 200)
    snapshot = registry.snapshot(1)

    def text() -> bytes:
        (coordinator,) = export_request(snapshot, Resource({})).resource_metrics
        return prometheus_text([Exposed("", coordinator), *starmap(Exposed, kept.last().items())], "")[0]

    return taking_us, snapshot_us, _median_us(text, 10), len(text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    num_steps = parser.parse_args().steps
    for num_sequences in (4, 64, 256):
        metrics_us = coordinator_step_us(metric_observers(Registry(start_ns=0)), num_sequences, num_steps)
        sdk_us = coordinator_step_us(metric_observers(SdkRegistry(start_ns=0)), num_sequences, num_steps)
        traces_us = coordinator_step_us(trace_observers(), num_sequences, num_steps) - metrics_us
        of_stage_us = span_step_us(num_sequences, num_steps)
        print(
            f"a step of {num_sequences:>3} sequences: coordinator {metrics_us:.1f} us metrics "
            f"(SDK {sdk_us:.1f}), {traces_us:.1f} us spans; stage {of_stage_us:.1f} us spans"
        )
    own_us = worker_step_us(Registry(start_ns=0), num_steps)
    sdk_us = worker_step_us(SdkRegistry(start_ns=0), num_steps)
    print(f"worker, metrics of a step           {own_us:8.1f} us (SDK {sdk_us:.1f})")
    print(f"worker, a span encoded              {encoded_span_us():8.1f} us")
    registry = _worker_registry(0)
    print(f"worker, a snapshot                  {_median_us(lambda: registry.snapshot(1), 500):8.1f} us")
    snapshot = registry.snapshot(1)
    encoding_us = _median_us(lambda: export_request(snapshot, Resource({})).SerializeToString(), 500)
    print(f"worker, its message                 {encoding_us:8.1f} us")
    for num_workers in (8, 64):
        taking_us, snapshot_us, text_us, size = scrape_us(num_workers)
        print(
            f"coordinator with {num_workers:>2} workers: an export taken {taking_us:.1f} us, a snapshot "
            f"{snapshot_us:.1f} us, the text {text_us / 1000:.1f} ms on its thread, {size} bytes"
        )


if __name__ == "__main__":
    main()
