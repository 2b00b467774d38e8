"""Recent traces of all processes, bounded by number and bytes."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData

from telemetry.spans import HTTP_SPANS, Attr, SpanName
from telemetry.trace_view.read_model import MIN_ID_PART
from wire.errors import InvalidRequest, RequestNotFound
from wire.ids import id_text, parse_request_id

PIECE_SPANS = 64
"""Spans added before the event loop gets a turn; a few microseconds each."""
MAX_DROPPED_IDS = 4096
"""Ids of dropped traces that are remembered, so that late spans do not start an incomplete trace."""
MAX_SOURCES = 128
"""Descriptions of processes that are stored once for all traces."""
MAX_SOURCE_BYTES = 8 * 1024
"""Limit of the description of a process and its scope; ours take a few hundred bytes."""
_OUTCOME_SPANS = frozenset({SpanName.GENERATE, *HTTP_SPANS})
SCOPE = "stageline"
"""The instrumentation scope whose spans are kept. Service names are configurable and identify nothing."""
MAX_TRACE_BYTES = 12 * 1024 * 1024
"""Limit of one trace: it has to fit into one response."""
SPAN_BYTES = 400
"""Memory of a span beside its message: 320 bytes by tracemalloc, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpan:
    """One stored span.

    Attributes:
        source: the serialised ResourceSpans that it arrived in, without spans.
        message: the serialised Span.
        request_id: set for the root span of a request only.
        has_failed: the request of this span, a root or a gateway's, failed.
    """

    span_id: bytes
    parent_id: bytes
    request_id: str | None
    start_ns: int
    source: bytes
    message: bytes
    has_failed: bool = False

    @property
    def size_bytes(self) -> int:
        """Without the source, which many spans share."""
        return len(self.message) + SPAN_BYTES


class TraceKind(Enum):
    """Decides which traces are evicted first."""

    SERVED = "served"
    UNFINISHED = "unfinished"
    """No request's root span has arrived."""
    REFUSED = "refused"
    """All spans are of requests, or of gateways above them, that failed before any work was done."""


@dataclass(slots=True, eq=False)
class KeptTrace:
    """Spans by id in arrival order; root spans by request id. `version` counts changes.

    `size_bytes` counts each source of its spans once.
    """

    id: bytes
    spans: dict[bytes, KeptSpan] = field(default_factory=dict)
    roots: dict[str, KeptSpan] = field(default_factory=dict)
    size_bytes: int = 0
    version: int = 0
    _children: dict[bytes, list[KeptSpan]] = field(default_factory=dict)
    _sources: dict[bytes, int] = field(default_factory=dict)
    _num_failed: int = 0

    @property
    def kind(self) -> TraceKind:
        if self._num_failed == len(self.spans):
            return TraceKind.REFUSED
        return TraceKind.SERVED if self.roots else TraceKind.UNFINISHED

    def add(self, span: KeptSpan) -> bool:
        """Return False for a span that is stored already."""
        if span.span_id in self.spans:
            return False
        self.spans[span.span_id] = span
        self._children.setdefault(span.parent_id, []).append(span)
        self.size_bytes += span.size_bytes
        if span.source not in self._sources:
            self.size_bytes += len(span.source)
        self._sources[span.source] = self._sources.get(span.source, 0) + 1
        self._num_failed += span.has_failed
        self.version += 1
        if span.request_id is not None:
            self.roots.setdefault(span.request_id, span)
        return True

    def drop_oldest(self) -> KeptSpan:
        """Remove and return the span that arrived first."""
        span = self.spans.pop(next(iter(self.spans)))
        siblings = self._children[span.parent_id]
        siblings.remove(span)
        if not siblings:
            del self._children[span.parent_id]
        self.size_bytes -= span.size_bytes
        self._sources[span.source] -= 1
        if not self._sources[span.source]:
            del self._sources[span.source]
            self.size_bytes -= len(span.source)
        self._num_failed -= span.has_failed
        self.version += 1
        if span.request_id is not None and self.roots.get(span.request_id) is span:
            del self.roots[span.request_id]
        return span

    def spans_of(self, request_id: str) -> tuple[KeptSpan, ...]:
        """The root span of a request, all spans below it, and its gateway's.

        In a trace with one request, also the spans whose parent is missing.
        """
        if len(self.roots) == 1:
            return tuple(self.spans.values())
        root = self.roots[request_id]
        above = self.spans.get(root.parent_id)
        return (*self._below(root), *(() if above is None else (above,)))

    def _below(self, root: KeptSpan) -> Iterator[KeptSpan]:
        waiting = [root]
        while waiting:
            span = waiting.pop()
            yield span
            # A root below another one is a request of its own. Skipping it also rules out a cycle.
            children = self._children.get(span.span_id, ())
            waiting += [child for child in children if child.request_id is None]


class KeptTraces:
    """All traces by id in arrival order, and the total size of each kind."""

    def __init__(self) -> None:
        self._by_kind: dict[TraceKind, dict[bytes, KeptTrace]] = {kind: {} for kind in TraceKind}
        self._kinds: dict[bytes, TraceKind] = {}
        self._sizes = dict.fromkeys(TraceKind, 0)
        self._known_sizes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def get(self, trace_id: bytes) -> KeptTrace | None:
        kind = self._kinds.get(trace_id)
        return None if kind is None else self._by_kind[kind][trace_id]

    def put(self, trace: KeptTrace) -> None:
        """Insert or update a trace. It keeps its place unless its kind has changed."""
        before = self._kinds.get(trace.id)
        if before is not None:
            self._sizes[before] -= self._known_sizes[trace.id]
        if before is not trace.kind:
            if before is not None:
                del self._by_kind[before][trace.id]
            self._by_kind[trace.kind][trace.id] = trace
            self._kinds[trace.id] = trace.kind
        self._known_sizes[trace.id] = trace.size_bytes
        self._sizes[trace.kind] += trace.size_bytes

    def remove(self, trace: KeptTrace) -> None:
        kind = self._kinds.pop(trace.id)
        del self._by_kind[kind][trace.id]
        self._sizes[kind] -= self._known_sizes.pop(trace.id)

    def next_to_evict(self, *, num_traces: int, size_bytes: int) -> KeptTrace:
        """The next trace to evict.

        The oldest refused or unfinished one if its kind has several traces and more than a quarter of a
        limit, else the oldest of all.
        """
        for kind in (TraceKind.REFUSED, TraceKind.UNFINISHED):
            traces = self._by_kind[kind]
            has_too_much = 4 * len(traces) > num_traces or 4 * self._sizes[kind] > size_bytes
            if has_too_much and len(traces) > 1:
                return next(iter(traces.values()))
        oldest = next(iter(self._kinds))
        return self._by_kind[self._kinds[oldest]][oldest]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits for all traces together."""

    num_traces: int = 512
    size_bytes: int = 64 * 1024 * 1024

    @property
    def trace_bytes(self) -> int:
        """The bound of one trace."""
        return min(MAX_TRACE_BYTES, max(1, self.size_bytes // 4))


@dataclass(slots=True)
class StoreCounts:
    """Spans since the coordinator started.

    `dropped` spans belonged to a dropped trace, or were evicted from a trace over its limit; `refused` spans
    had invalid ids or another scope.
    """

    taken: int = 0
    repeated: int = 0
    dropped: int = 0
    refused: int = 0
    dropped_traces: int = 0


@dataclass(slots=True)
class AddResult:
    """Result of adding spans: how many were dropped with their trace, and how many refused, by reason."""

    num_dropped: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    def refuse(self, reason: str, num_spans: int = 1) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + num_spans


@dataclass(frozen=True, slots=True)
class FoundTrace:
    """One request's spans as they were exported. `version` changes when spans are added to its trace."""

    request_id: str
    trace_id: str
    version: int
    spans: tuple[KeptSpan, ...]

    def data(self) -> TracesData:
        """Build one message; about 10 us per span."""
        by_source: dict[bytes, list[bytes]] = {}
        for span in self.spans:
            by_source.setdefault(span.source, []).append(span.message)
        return TracesData(resource_spans=[_resource_spans(*source) for source in by_source.items()])


@dataclass(slots=True)
class _DroppedIds:
    """The newest ids of dropped traces, a bounded number."""

    ids: dict[bytes, None] = field(default_factory=dict)

    def add(self, trace_id: bytes) -> None:
        self.ids[trace_id] = None
        if len(self.ids) > MAX_DROPPED_IDS:
            del self.ids[next(iter(self.ids))]


class TraceStore:
    """Traces by id and by request. Thread-safe; spans may arrive late, repeatedly and in any order.

    The oldest trace is evicted first, and within a trace over its own limit the oldest span. Traces without a
    request's root span, and spans of refused requests, are evicted before others as soon as either kind holds
    more than a quarter of a limit.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.counts = StoreCounts()
        self._lock = threading.Lock()
        self._traces = KeptTraces()
        self._requests: dict[str, KeptTrace] = {}
        self._dropped = _DroppedIds()
        self._sources: dict[bytes, bytes] = {}

    @property
    def size_bytes(self) -> int:
        """Approximate size of all spans, and of each trace's process descriptions."""
        return self._traces.size_bytes

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def add(self, resource_spans: Iterable[ResourceSpans]) -> AddResult:
        """Add spans; a few microseconds each."""
        taken = AddResult()
        for _ in self.add_in_pieces(resource_spans, taken):
            pass
        return taken

    def add_in_pieces(self, resource_spans: Iterable[ResourceSpans], taken: AddResult) -> Iterator[None]:
        """Add spans in pieces, so that an event loop can run between them."""
        num_spans = 0
        for message in resource_spans:
            for scope_spans in message.scope_spans:
                source = self._accepted_source(message, scope_spans, taken)
                if source is None:
                    continue
                for span in scope_spans.spans:
                    self._add(source, span, taken)
                    num_spans += 1
                    if num_spans % PIECE_SPANS == 0:
                        yield

    def recent(self, num_requests: int | None = None) -> list[FoundTrace]:
        """Requests with a stored trace, newest start first."""
        with self._lock:
            newest = sorted(
                (
                    (trace.roots[request_id].start_ns, request_id)
                    for request_id, trace in self._requests.items()
                ),
                reverse=True,
            )[:num_requests]
        found = []
        for _, request_id in newest:
            with self._lock:
                if request_id in self._requests:
                    found.append(self._found(request_id))
        return found

    def find(self, wanted: str) -> FoundTrace:
        """Find a request by its id, the beginning or end of its id, or its trace id.

        Raises:
            RequestNotFound: no stored request matches.
            InvalidRequest: the text is too short, or several requests match.
        """
        with self._lock:
            return self._found(self._request_id(wanted))

    def _request_id(self, wanted: str) -> str:
        wanted = wanted.strip().lower()
        if wanted in self._requests:
            return wanted
        if len(wanted) < MIN_ID_PART:
            raise InvalidRequest(
                f"{wanted!r} is too short: at least {MIN_ID_PART} characters of a request's id are needed"
            )
        found = [
            request_id
            for request_id, trace in self._requests.items()
            if request_id.startswith(wanted) or request_id.endswith(wanted) or trace.id.hex() == wanted
        ]
        if not found:
            raise RequestNotFound(f"no trace of request {wanted} is stored")
        if len(found) > 1:
            raise InvalidRequest(f"{wanted} matches {len(found)} requests: {found[0]}, {found[1]} ...")
        return found[0]

    def _found(self, request_id: str) -> FoundTrace:
        trace = self._requests[request_id]
        return FoundTrace(request_id, trace.id.hex(), trace.version, trace.spans_of(request_id))

    def _accepted_source(
        self, message: ResourceSpans, scope_spans: ScopeSpans, taken: AddResult
    ) -> bytes | None:
        """The source of these spans, or None if they are refused."""
        num_spans = len(scope_spans.spans)
        if scope_spans.scope.name != SCOPE:
            reason = f"of a scope that is not {SCOPE}"
        else:
            source = _source(message, scope_spans)
            if len(source) <= MAX_SOURCE_BYTES:
                return self._shared(source)
            reason = f"of a process whose description takes more than {MAX_SOURCE_BYTES} bytes"
        if num_spans:
            taken.refuse(reason, num_spans)
            self.counts.refused += num_spans
        return None

    def _shared(self, source: bytes) -> bytes:
        """Store equal sources once for all traces; `size_bytes` counts them per trace."""
        known = self._sources.get(source)
        if known is not None:
            return known
        if len(self._sources) >= MAX_SOURCES:
            self._sources.clear()
        return self._sources.setdefault(source, source)

    def _add(self, source: bytes, span: Span, taken: AddResult) -> None:
        try:
            request_id = _checked(span)
        except ValueError as error:
            taken.refuse(str(error))
            self.counts.refused += 1
            return
        kept = KeptSpan(
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            request_id=request_id,
            start_ns=span.start_time_unix_nano,
            source=source,
            message=span.SerializeToString(),
            has_failed=span.name in _OUTCOME_SPANS and _text(span, Attr.OUTCOME) == "failed",
        )
        self._take(span.trace_id, kept, taken)

    def _take(self, trace_id: bytes, span: KeptSpan, taken: AddResult) -> None:
        with self._lock:
            is_too_large = span.size_bytes + len(span.source) > self.limits.trace_bytes
            if trace_id in self._dropped.ids or is_too_large:
                taken.num_dropped += 1
                self.counts.dropped += 1
                return
            trace = self._traces.get(trace_id) or KeptTrace(trace_id)
            if not trace.add(span):
                self.counts.repeated += 1
                return
            self.counts.taken += 1
            if span.request_id is not None:
                self._requests.setdefault(span.request_id, trace)
            self._evict(trace)

    def _evict(self, latest: KeptTrace) -> None:
        while latest.size_bytes > self.limits.trace_bytes:
            oldest = latest.drop_oldest()
            self.counts.dropped += 1
            self._forget_request(oldest.request_id, latest)
        self._traces.put(latest)
        bounds = self.limits
        while len(self._traces) > bounds.num_traces or self._traces.size_bytes > bounds.size_bytes:
            self._drop_trace(
                self._traces.next_to_evict(num_traces=bounds.num_traces, size_bytes=bounds.size_bytes)
            )

    def _drop_trace(self, trace: KeptTrace) -> None:
        self._traces.remove(trace)
        self.counts.dropped += len(trace.spans)
        self.counts.dropped_traces += 1
        self._dropped.add(trace.id)
        for request_id in trace.roots:
            self._forget_request(request_id, trace)

    def _forget_request(self, request_id: str | None, trace: KeptTrace) -> None:
        if request_id is not None and self._requests.get(request_id) is trace:
            del self._requests[request_id]


def _source(message: ResourceSpans, scope_spans: ScopeSpans) -> bytes:
    """The process and scope that recorded a span: `ResourceSpans` without spans."""
    return ResourceSpans(
        resource=message.resource,
        scope_spans=[ScopeSpans(scope=scope_spans.scope, schema_url=scope_spans.schema_url)],
        schema_url=message.schema_url,
    ).SerializeToString(deterministic=True)


def _checked(span: Span) -> str | None:
    """The request id of a root span, None for other spans. Raises ValueError with the reason for refusal."""
    if len(span.trace_id) != 16 or len(span.span_id) != 8:
        raise ValueError("without a trace id of 16 bytes and a span id of 8")
    if span.name != SpanName.GENERATE:
        return None
    text = _text(span, Attr.REQUEST_ID)
    try:
        is_ours = id_text(parse_request_id(text)) == text
    except ValueError:
        is_ours = False
    if not is_ours:
        raise ValueError("of requests whose id is no UUIDv7")
    return text


def _text(span: Span, key: Attr) -> str:
    return next((pair.value.string_value for pair in span.attributes if pair.key == key), "")


def _resource_spans(source: bytes, messages: Iterable[bytes]) -> ResourceSpans:
    resource_spans = ResourceSpans.FromString(source)
    for message in messages:
        resource_spans.scope_spans[0].spans.add().MergeFromString(message)
    return resource_spans
