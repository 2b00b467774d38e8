"""Read model of one request, built from the spans of OTLP messages."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status, TracesData

from telemetry.spans import HTTP_SPANS, Attr, SpanName

Value: TypeAlias = str | bool | int | float

SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
NS_PER_S = 1_000_000_000
MIN_ID_PART = 4
"""Minimum characters of the beginning or end of a request id that identify a trace."""
MAX_LEVELS = 8
"""Spans of a request are nested three levels deep; deeper nesting means a cycle."""

_REQUEST_SPANS = frozenset(SpanName) - {SpanName.GENERATE, SpanName.CLUSTER_RECOVERY, *HTTP_SPANS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One finished span.

    Ids are hexadecimal, `parent_id` is "" without a parent; times are Unix time. `process` is the
    service.name and `instance` the service.instance.id of the recording process; `error` is the text of a
    status ERROR, else None.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    process: str = ""
    instance: str = ""
    error: str | None = None

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S

    def measure(self, key: Attr) -> float | None:
        """A non-negative duration in seconds, or a mean; None if absent."""
        value = self.signed(key)
        return None if value is None else max(0.0, value)

    def signed(self, key: Attr) -> float | None:
        """A duration in seconds; negative between two hosts whose clock offset exceeds it. None if absent."""
        value = self.attributes.get(key)
        if isinstance(value, str | bool | None) or not math.isfinite(value):
            return None
        return float(value)

    def number(self, key: Attr, default: int = 0) -> int:
        value = self.attributes.get(key)
        if isinstance(value, str | bool | None) or not math.isfinite(value):
            return default
        return int(value)

    def text(self, key: Attr) -> str:
        value = self.attributes.get(key, "")
        return value if isinstance(value, str) else str(value)

    @property
    def choice(self) -> int | None:
        """Index of the choice; None for spans of the whole request."""
        return self.number(Attr.CHOICE) if Attr.CHOICE in self.attributes else None

    @property
    def is_stage(self) -> bool:
        return self.name in (SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)


@dataclass(frozen=True, slots=True, order=True)
class StagePlace:
    """A stage on one worker; `layer_end` is one past its last layer."""

    index: int
    worker: str
    layer_begin: int
    layer_end: int
    role: str

    @classmethod
    def of(cls, span: TraceSpan) -> "StagePlace":
        return cls(
            span.number(Attr.STAGE_INDEX),
            span.text(Attr.WORKER) or span.instance,
            span.number(Attr.LAYER_BEGIN),
            span.number(Attr.LAYER_END),
            span.text(Attr.STAGE_ROLE),
        )

    @property
    def layers(self) -> str:
        """Layers with the last one included: 8-11."""
        last = self.layer_end - 1
        return str(last) if last <= self.layer_begin else f"{self.layer_begin}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times in seconds, as defined in docs/telemetry.md; `hop_s` may be negative (see `TraceSpan.signed`)."""

    hop_s: float = 0.0
    receive_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    send_s: float = 0.0

    @classmethod
    def of(cls, span: TraceSpan) -> "StageTimes":
        """Absent times are 0."""
        return cls(
            hop_s=span.signed(Attr.HOP_DURATION) or 0.0,
            receive_s=span.measure(Attr.RECEIVE_DURATION) or 0.0,
            wait_s=span.measure(Attr.WAIT_DURATION) or 0.0,
            compute_s=span.measure(Attr.COMPUTE_DURATION) or 0.0,
            send_s=span.measure(Attr.SEND_DURATION) or 0.0,
        )

    @classmethod
    def sum_of(cls, parts: Iterable["StageTimes"]) -> "StageTimes":
        times = list(parts)
        return cls(
            hop_s=math.fsum(part.hop_s for part in times),
            receive_s=math.fsum(part.receive_s for part in times),
            wait_s=math.fsum(part.wait_s for part in times),
            compute_s=math.fsum(part.compute_s for part in times),
            send_s=math.fsum(part.send_s for part in times),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """All steps of the request on one stage of one worker; `spans` are in order of their start."""

    place: StagePlace
    spans: tuple[TraceSpan, ...]
    times: StageTimes
    num_steps: int
    num_tokens: int
    mean_batch_size: float


@dataclass(frozen=True)
class RequestTrace:
    """All spans of one request; `spans` are those below `root`, in order of their start.

    `gateway` is the span of the HTTP request above `root`; None for a request that came by gRPC. The request
    begins and ends with the outer one of the two: a response may end before its request, or long after it.
    """

    root: TraceSpan
    spans: tuple[TraceSpan, ...]
    gateway: TraceSpan | None = None

    @property
    def request_id(self) -> str:
        return self.root.text(Attr.REQUEST_ID)

    @property
    def trace_id(self) -> str:
        return self.root.trace_id

    @property
    def start_ns(self) -> int:
        return self.root.start_ns if self.gateway is None else min(self.root.start_ns, self.gateway.start_ns)

    @property
    def end_ns(self) -> int:
        return self.root.end_ns if self.gateway is None else max(self.root.end_ns, self.gateway.end_ns)

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S

    @property
    def outcome(self) -> str:
        """The outcome that the coordinator recorded, else derived from the status of the root span."""
        stated = self.root.text(Attr.OUTCOME)
        return stated or ("finished" if self.root.error is None else "failed")

    def since_start_s(self, time_ns: int) -> float:
        """Seconds since the request's start."""
        return (time_ns - self.start_ns) / NS_PER_S

    def named(self, *names: SpanName) -> tuple[TraceSpan, ...]:
        return tuple(span for span in self.spans if span.name in names)

    @cached_property
    def children(self) -> Mapping[str, tuple[TraceSpan, ...]]:
        """Spans by parent id."""
        found: dict[str, list[TraceSpan]] = defaultdict(list)
        for span in self.spans:
            found[span.parent_id].append(span)
        return MappingProxyType({parent: tuple(spans) for parent, spans in found.items()})

    @cached_property
    def stages(self) -> tuple[StageWork, ...]:
        """In order of stage index, and for a moved stage of the first span."""
        by_place: dict[StagePlace, list[TraceSpan]] = {}
        for span in self.spans:
            if span.is_stage:
                by_place.setdefault(StagePlace.of(span), []).append(span)
        works = [_stage_work(place, spans) for place, spans in by_place.items()]
        return tuple(sorted(works, key=lambda work: (work.place.index, work.spans[0].start_ns)))


def printable(text: str) -> str:
    """Replace control characters of untrusted span texts; line breaks and tabs become blanks."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def read_spans(data: TracesData | Iterable[ResourceSpans]) -> list[TraceSpan]:
    """Read every span, in order; texts are `printable`."""
    messages = data.resource_spans if isinstance(data, TracesData) else data
    return [
        _read_span(span, resource)
        for message in messages
        for resource in (_attributes(message.resource.attributes),)
        for scope_spans in message.scope_spans
        for span in scope_spans.spans
    ]


def request_trace(spans: Iterable[TraceSpan], request_id: str) -> RequestTrace:
    """Collect the spans below the request's root, and a gateway's span above it.

    Raises ValueError without a root.

    A client may put several requests into one trace. A span without its parent belongs to the request only if
    the trace has no other request.
    """
    unique = {span.span_id: span for span in spans}
    roots = [span for span in unique.values() if span.name == SpanName.GENERATE]
    of_request = [span for span in roots if span.text(Attr.REQUEST_ID) == request_id]
    if not of_request:
        raise ValueError(f"none of {len(unique)} spans is the root of request {request_id}")
    root = min(of_request, key=lambda span: span.start_ns)
    found = [
        span
        for span in unique.values()
        if span is not root and _belongs(span, root, unique, is_only=len(roots) == 1)
    ]
    above = unique.get(root.parent_id)
    gateway = above if above is not None and above.name in HTTP_SPANS else None
    return RequestTrace(root, tuple(sorted(found, key=lambda span: (span.start_ns, span.span_id))), gateway)


def _belongs(span: TraceSpan, root: TraceSpan, spans: Mapping[str, TraceSpan], *, is_only: bool) -> bool:
    at = span
    for _ in range(MAX_LEVELS):
        if at.parent_id == root.span_id:
            return True
        parent = spans.get(at.parent_id)
        if parent is None:
            return is_only and _is_request_span(at)
        at = parent
    return False


def _is_request_span(span: TraceSpan) -> bool:
    return span.name in _REQUEST_SPANS


def _stage_work(place: StagePlace, spans: list[TraceSpan]) -> StageWork:
    num_steps = sum(span.number(Attr.NUM_STEPS, 1) for span in spans)
    return StageWork(
        place=place,
        spans=tuple(spans),
        times=StageTimes.sum_of(map(StageTimes.of, spans)),
        num_steps=num_steps,
        num_tokens=sum(span.number(Attr.TOKENS) for span in spans),
        mean_batch_size=sum(
            (span.measure(Attr.BATCH_SIZE) or 0.0) * span.number(Attr.NUM_STEPS, 1) for span in spans
        )
        / max(1, num_steps),
    )


def _read_span(span: Span, resource: Mapping[str, Value]) -> TraceSpan:
    return TraceSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=printable(span.name),
        start_ns=span.start_time_unix_nano,
        end_ns=max(span.start_time_unix_nano, span.end_time_unix_nano),
        attributes=_attributes(span.attributes),
        process=str(resource.get(SERVICE_NAME, "")),
        instance=str(resource.get(SERVICE_INSTANCE, "")),
        error=printable(span.status.message) if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _attributes(pairs: Iterable[KeyValue]) -> Mapping[str, Value]:
    """Attributes with a string, boolean or finite number; lists and maps are skipped."""
    found: dict[str, Value] = {}
    for pair in pairs:
        match pair.value.WhichOneof("value"):
            case "string_value":
                found[printable(pair.key)] = printable(pair.value.string_value)
            case "bool_value":
                found[printable(pair.key)] = pair.value.bool_value
            case "int_value":
                found[printable(pair.key)] = pair.value.int_value
            case "double_value" if math.isfinite(pair.value.double_value):
                found[printable(pair.key)] = pair.value.double_value
    return MappingProxyType(found)
