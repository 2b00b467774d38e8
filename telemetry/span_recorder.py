"""Records finished spans; ratio sampling."""

import random
from collections.abc import Sequence

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)

from telemetry.settings import StandardSampler, TelemetrySettings
from telemetry.span_sinks import CollectorSink, SpanSink, new_exporter
from telemetry.spans import SpanName
from wire.clock import ClusterClock


def ratio_sampler(ratio: float) -> Sampler:
    """Follow the caller's decision; sample `ratio` of the requests without one."""
    return StandardSampler("parentbased_traceidratio", ratio)


def is_sampled(sampler: Sampler, trace_id: int, parent: SpanContext | None, name: str) -> bool:
    """Whether the trace is recorded. `parent` is the caller's span."""
    context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
    return bool(sampler.should_sample(context, trace_id, name).decision.is_sampled())


Attributes = dict[str, str | int | float | bool]
"""Keys are in `telemetry.spans.Attr`."""

_SCOPE = InstrumentationScope("stageline")
_OK = Status(StatusCode.UNSET)


class SpanRecorder:
    """Records spans when they end, so none is kept open. One per process.

    Times are on the clock of `time.monotonic` and converted to the coordinator's clock.
    """

    def __init__(self, resource: Resource, clock: ClusterClock, sinks: Sequence[SpanSink]) -> None:
        self._resource = resource
        self._clock = clock
        self._sinks = tuple(sinks)

    @property
    def clock(self) -> ClusterClock:
        return self._clock

    def at_us(self, time_s: float) -> int:
        """Convert a time of `time.monotonic` to the coordinator's clock."""
        return self._clock.at_us(time_s)

    @property
    def num_dropped(self) -> int:
        """Spans that a sink dropped, counted once per sink."""
        return sum(sink.num_dropped for sink in self._sinks)

    def start(self) -> None:
        """Start the sinks."""
        for sink in self._sinks:
            sink.start()

    async def close(self) -> None:
        """Flush and close the sinks."""
        for sink in self._sinks:
            await sink.close()

    def record(
        self,
        name: SpanName,
        context: SpanContext,
        parent: SpanContext | None,
        *,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str | None = None,
        events: Sequence[tuple[str, float]] = (),
        is_server: bool = False,
    ) -> None:
        """Record a finished span. `error` is the reason of a failure; `events` are names and times."""
        at_us = self._clock.at_us
        span = ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            events=[Event(event, timestamp=at_us(when_s) * 1000) for event, when_s in events],
            kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            status=_OK if error is None else Status(StatusCode.ERROR, error),
            start_time=at_us(start_s) * 1000,
            end_time=at_us(end_s) * 1000,
            instrumentation_scope=_SCOPE,
        )
        for sink in self._sinks:
            sink.offer(span)


def new_resource(service: str, *, instance: str, version: str) -> Resource:
    """The resource of this process's spans and metrics.

    OTEL_RESOURCE_ATTRIBUTES adds attributes; it and OTEL_SERVICE_NAME override `service`.
    """
    default = Resource({"service.namespace": "stageline", "service.name": service})
    own = Resource({"service.instance.id": instance, "service.version": version})
    return default.merge(OTELResourceDetector().detect()).merge(own)


def new_span_id() -> int:
    """A random id; never 0."""
    return random.getrandbits(64) or 1


def new_trace_id() -> int:
    """A random id; never 0."""
    return random.getrandbits(128) or 1


def new_recorder(
    service: str, own: SpanSink, settings: TelemetrySettings, clock: ClusterClock, *, instance: str
) -> SpanRecorder:
    """The recorder of this process: exports to `own`, and to a collector if `settings` name one."""
    resource = new_resource(service, instance=instance, version=settings.service_version)
    sinks: list[SpanSink] = []
    if not settings.is_disabled:
        sinks.append(own)
        if settings.protocol is not None:
            sinks.append(CollectorSink(new_exporter(settings.protocol)))
    return SpanRecorder(resource, clock, sinks)
