"""The spans of one request, read from OTLP messages."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status, TracesData

from telemetry.spans import Attr, SpanName

Value: TypeAlias = str | bool | int | float

SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
NS_PER_S = 1_000_000_000
MOST_LEVELS = 8
"""Spans of a request are nested three levels deep; deeper nesting means a cycle."""

_OF_REQUEST = frozenset(SpanName) - {SpanName.GENERATE, SpanName.CLUSTER_RECOVERY}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One finished span. Ids are hexadecimal, `parent_id` is "" without a parent; times are Unix time.

    `process` is the service.name and `instance` the service.instance.id of who recorded it; `error` is the
    text of a status ERROR, and None for any other status.
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
        """A duration in seconds, or a mean, no less than 0; None where it is absent."""
        value = self.signed(key)
        return None if value is None else max(0.0, value)

    def signed(self, key: Attr) -> float | None:
        """The same for what is between two hosts: it is negative where their clocks differ by more."""
        value = self.attributes.get(key)
        if isinstance(value, str | bool | None) or not math.isfinite(value):
            return None
        return float(value)

    def number(self, key: Attr, default: int = 0) -> int:
        """A count or an index."""
        value = self.attributes.get(key)
        if isinstance(value, str | bool | None) or not math.isfinite(value):
            return default
        return int(value)

    def text(self, key: Attr) -> str:
        value = self.attributes.get(key, "")
        return value if isinstance(value, str) else str(value)

    @property
    def choice(self) -> int | None:
        """Which choice of the request it is about; None for the request as a whole."""
        return self.number(Attr.CHOICE) if Attr.CHOICE in self.attributes else None

    @property
    def is_stage(self) -> bool:
        return self.name in (SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)


@dataclass(frozen=True, slots=True, order=True)
class StagePlace:
    """A stage as one worker ran it; `layer_end` is one past its last layer."""

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
        """As people write them, the last one included: 8-11."""
        last = self.layer_end - 1
        return str(last) if last <= self.layer_begin else f"{self.layer_begin}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds; docs/telemetry.md says where each begins and ends. A hop may be negative: see `signed`."""

    hop_s: float = 0.0
    receive_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    send_s: float = 0.0

    @classmethod
    def of(cls, span: TraceSpan) -> "StageTimes":
        """What is absent counts as nothing."""
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
            hop_s=math.fsum(each.hop_s for each in times),
            receive_s=math.fsum(each.receive_s for each in times),
            wait_s=math.fsum(each.wait_s for each in times),
            compute_s=math.fsum(each.compute_s for each in times),
            send_s=math.fsum(each.send_s for each in times),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one worker did for the request on one stage. `spans` in the order of their start."""

    place: StagePlace
    spans: tuple[TraceSpan, ...]
    times: StageTimes
    num_steps: int
    num_tokens: int
    mean_batch_size: float


@dataclass(frozen=True)
class RequestTrace:
    """All spans of one request; `spans` are those below `root`, in the order of their start."""

    root: TraceSpan
    spans: tuple[TraceSpan, ...]

    @property
    def request_id(self) -> str:
        return self.root.text(Attr.REQUEST_ID)

    @property
    def trace_id(self) -> str:
        return self.root.trace_id

    @property
    def duration_s(self) -> float:
        return self.root.duration_s

    @property
    def outcome(self) -> str:
        """How it ended, in one word: what the coordinator says, else what the status of the span says."""
        stated = self.root.text(Attr.OUTCOME)
        return stated or ("finished" if self.root.error is None else "failed")

    def since_start_s(self, time_ns: int) -> float:
        """Seconds since the request's start."""
        return (time_ns - self.root.start_ns) / NS_PER_S

    def named(self, *names: SpanName) -> tuple[TraceSpan, ...]:
        return tuple(span for span in self.spans if span.name in names)

    @cached_property
    def children(self) -> Mapping[str, tuple[TraceSpan, ...]]:
        """Spans by the id of their parent."""
        found: dict[str, list[TraceSpan]] = defaultdict(list)
        for span in self.spans:
            found[span.parent_id].append(span)
        return MappingProxyType({parent: tuple(spans) for parent, spans in found.items()})

    @cached_property
    def stages(self) -> tuple[StageWork, ...]:
        """In the order of their indices, and where a stage has moved, of their first span."""
        by_place: dict[StagePlace, list[TraceSpan]] = {}
        for span in self.spans:
            if span.is_stage:
                by_place.setdefault(StagePlace.of(span), []).append(span)
        works = [_stage_work(place, spans) for place, spans in by_place.items()]
        return tuple(sorted(works, key=lambda work: (work.place.index, work.spans[0].start_ns)))


def printable(text: str) -> str:
    """Without what a terminal would obey: spans come from anybody. Line breaks and tabs become blanks."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else " " if each.isspace() else "\N{REPLACEMENT CHARACTER}"
        for each in text
    )


def read_spans(data: TracesData | Iterable[ResourceSpans]) -> list[TraceSpan]:
    """Every span of these messages, as they come; texts are `printable`."""
    messages = data.resource_spans if isinstance(data, TracesData) else data
    return [
        _read_span(span, resource)
        for message in messages
        for resource in (_attributes(message.resource.attributes),)
        for scope_spans in message.scope_spans
        for span in scope_spans.spans
    ]


def request_trace(spans: Iterable[TraceSpan], request_id: str) -> RequestTrace:
    """The spans below the root of this request. Raises ValueError when the root is not among them.

    A client may put many requests into one trace. A span whose parent is missing belongs to the only request
    there is, or else to none.
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
    return RequestTrace(root, tuple(sorted(found, key=lambda span: (span.start_ns, span.span_id))))


def _belongs(span: TraceSpan, root: TraceSpan, spans: Mapping[str, TraceSpan], *, is_only: bool) -> bool:
    at = span
    for _ in range(MOST_LEVELS):
        if at.parent_id == root.span_id:
            return True
        parent = spans.get(at.parent_id)
        if parent is None:
            return is_only and _is_ours(at)
        at = parent
    return False


def _is_ours(span: TraceSpan) -> bool:
    return span.name in _OF_REQUEST


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
    """Those with one value that is a text or a finite number; lists and maps are none of ours."""
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
