"""Recent traces of all processes, bounded by number and bytes."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData

from coordinator.observability.kept_trace import KeptSpan, KeptTrace, KeptTraces
from coordinator.observability.trace_file import TraceFile
from telemetry.spans import Attr, SpanName
from wire.errors import InvalidRequest, RequestNotFound
from wire.ids import id_text, parse_request_id

PIECE_SPANS = 64
"""So many spans are taken in at once; a few microseconds each."""
REMEMBERED_DROPS = 4096
"""Traces that were dropped and are still known, so that late spans do not bring a stump of them back."""
KNOWN_SOURCES = 128
"""Processes whose description is kept once for all traces."""
MOST_SOURCE_BYTES = 8 * 1024
"""The description of a process and its scope; ours take a few hundred."""
SCOPE = "stageline"
"""Whose spans are kept. Names of services may be changed by whoever runs them, and so do not tell."""
LEAST_PART = 4
"""Characters of an id by which a request is found."""
MOST_TRACE_BYTES = 12 * 1024 * 1024
"""What one trace may have of the store: it has to fit into an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of the store: of all traces together."""

    num_traces: int = 512
    size_bytes: int = 64 * 1024 * 1024

    @property
    def trace_bytes(self) -> int:
        """The bound of one trace."""
        return min(MOST_TRACE_BYTES, max(1, self.size_bytes // 4))


@dataclass(slots=True)
class StoreCounts:
    """Spans since the coordinator started. `dropped` were in a trace that was dropped, came after that, or
    had no room in theirs; `refused` had no valid ids, or were none of ours.
    """

    taken: int = 0
    repeated: int = 0
    dropped: int = 0
    refused: int = 0
    dropped_traces: int = 0


@dataclass(slots=True)
class Taken:
    """What came of spans that were sent: some belong to traces that are gone, some are refused, each for one
    reason.
    """

    num_dropped: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    def refuse(self, reason: str, num_spans: int = 1) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + num_spans


@dataclass(frozen=True, slots=True)
class FoundTrace:
    """One request's spans as they were sent. `version` changes when spans are added to its trace."""

    request_id: str
    trace_id: str
    version: int
    spans: tuple[KeptSpan, ...]

    def data(self) -> TracesData:
        """As one message, which takes about 10 us for each span."""
        by_source: dict[bytes, list[bytes]] = {}
        for span in self.spans:
            by_source.setdefault(span.source, []).append(span.message)
        return TracesData(resource_spans=[_resource_spans(*each) for each in by_source.items()])


@dataclass(slots=True)
class _Dropped:
    """The newest of a bounded number of ids."""

    ids: dict[bytes, None] = field(default_factory=dict)

    def add(self, trace_id: bytes) -> None:
        self.ids[trace_id] = None
        if len(self.ids) > REMEMBERED_DROPS:
            del self.ids[next(iter(self.ids))]


class TraceStore:
    """Spans may come late, repeatedly and in any order. Any thread may call; nobody waits long.

    The oldest trace makes room, and within a trace that alone is too large the oldest span. Traces without a
    request's root, and those of requests that were refused, make room first where they have more than a
    quarter each. What is kept is also written to `file`, and what it has is taken over.
    """

    def __init__(self, limits: StoreLimits | None = None, file: TraceFile | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.counts = StoreCounts()
        self._lock = threading.Lock()
        self._traces = KeptTraces()
        self._requests: dict[str, KeptTrace] = {}
        self._dropped = _Dropped()
        self._sources: dict[bytes, bytes] = {}
        self._file: TraceFile | None = None
        if file is not None:
            self._take_over(file)

    @property
    def size_bytes(self) -> int:
        """What the kept spans take, about, and for each trace who recorded them."""
        return self._traces.size_bytes

    @property
    def num_unwritten(self) -> int:
        """Spans that the file could not take."""
        return 0 if self._file is None else self._file.num_lost

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def add(self, resource_spans: Iterable[ResourceSpans]) -> Taken:
        """Takes spans in; a few microseconds each."""
        taken = Taken()
        for _ in self.adding(resource_spans, taken):
            pass
        return taken

    def adding(self, resource_spans: Iterable[ResourceSpans], taken: Taken) -> Iterator[None]:
        """The same in pieces, for an event loop that has something else to do between them."""
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
        """Requests whose trace is kept, those that began last first."""
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
        """By a request id, by the beginning or the end of one, or by a trace id. Raises RequestNotFound, and
        InvalidRequest where several requests are meant.
        """
        with self._lock:
            return self._found(self._request_id(wanted))

    def close(self) -> None:
        """Writes what is still to be written."""
        if self._file is not None:
            self._file.close()

    def _take_over(self, file: TraceFile) -> None:
        for trace_id, span in file.read():
            if span.request_id is not None:
                span = replace(span, has_failed=_has_failed(Span.FromString(span.message)))
            self._take(trace_id, span, Taken())
        self.counts = StoreCounts()
        self._file = file

    def _request_id(self, wanted: str) -> str:
        wanted = wanted.strip().lower()
        if wanted in self._requests:
            return wanted
        if len(wanted) < LEAST_PART:
            raise InvalidRequest(
                f"{wanted!r} is too short: at least {LEAST_PART} characters of a request's id are needed"
            )
        found = [
            request_id
            for request_id, trace in self._requests.items()
            if request_id.startswith(wanted) or request_id.endswith(wanted) or trace.id.hex() == wanted
        ]
        if not found:
            raise RequestNotFound(f"no trace of request {wanted} is kept")
        if len(found) > 1:
            raise InvalidRequest(f"{wanted} may be any of {len(found)} requests: {found[0]}, {found[1]} ...")
        return found[0]

    def _found(self, request_id: str) -> FoundTrace:
        trace = self._requests[request_id]
        return FoundTrace(request_id, trace.id.hex(), trace.version, trace.spans_of(request_id))

    def _accepted_source(self, message: ResourceSpans, scope_spans: ScopeSpans, taken: Taken) -> bytes | None:
        """None where these spans are refused."""
        num_spans = len(scope_spans.spans)
        if scope_spans.scope.name != SCOPE:
            reason = f"of a scope that is not {SCOPE}"
        else:
            source = _source(message, scope_spans)
            if len(source) <= MOST_SOURCE_BYTES:
                return self._shared(source)
            reason = f"of a process whose description takes more than {MOST_SOURCE_BYTES} bytes"
        if num_spans:
            taken.refuse(reason, num_spans)
            self.counts.refused += num_spans
        return None

    def _shared(self, source: bytes) -> bytes:
        """Equal ones are kept once, whatever the number of traces; `size_bytes` has them for each trace."""
        known = self._sources.get(source)
        if known is not None:
            return known
        if len(self._sources) >= KNOWN_SOURCES:
            self._sources.clear()
        return self._sources.setdefault(source, source)

    def _add(self, source: bytes, span: Span, taken: Taken) -> None:
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
            has_failed=request_id is not None and _has_failed(span),
        )
        self._take(span.trace_id, kept, taken)

    def _take(self, trace_id: bytes, span: KeptSpan, taken: Taken) -> None:
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
            self._make_room(trace)
            if self._file is not None and trace_id not in self._dropped.ids:
                self._file.write(trace_id, span)

    def _make_room(self, latest: KeptTrace) -> None:
        while latest.size_bytes > self.limits.trace_bytes:
            oldest = latest.drop_oldest()
            self.counts.dropped += 1
            self._forget_request(oldest.request_id, latest)
        self._traces.put(latest)
        bounds = self.limits
        while len(self._traces) > bounds.num_traces or self._traces.size_bytes > bounds.size_bytes:
            self._drop_trace(
                self._traces.first_to_go(num_traces=bounds.num_traces, size_bytes=bounds.size_bytes)
            )

    def _drop_trace(self, trace: KeptTrace) -> None:
        self._traces.remove(trace)
        self.counts.dropped += len(trace.spans)
        self.counts.dropped_traces += 1
        self._dropped.add(trace.id)
        if self._file is not None:
            self._file.drop(trace.id)
        for request_id in trace.roots:
            self._forget_request(request_id, trace)

    def _forget_request(self, request_id: str | None, trace: KeptTrace) -> None:
        if request_id is not None and self._requests.get(request_id) is trace:
            del self._requests[request_id]


def _source(message: ResourceSpans, scope_spans: ScopeSpans) -> bytes:
    """Who recorded a span: `ResourceSpans` without spans."""
    return ResourceSpans(
        resource=message.resource,
        scope_spans=[ScopeSpans(scope=scope_spans.scope, schema_url=scope_spans.schema_url)],
        schema_url=message.schema_url,
    ).SerializeToString(deterministic=True)


def _checked(span: Span) -> str | None:
    """Whose root it is; None for every other span. Raises ValueError, which says what spans are refused."""
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


def _has_failed(root: Span) -> bool:
    return _text(root, Attr.OUTCOME) == "failed"


def _text(span: Span, key: Attr) -> str:
    return next((pair.value.string_value for pair in span.attributes if pair.key == key), "")


def _resource_spans(source: bytes, messages: Iterable[bytes]) -> ResourceSpans:
    resource_spans = ResourceSpans.FromString(source)
    for message in messages:
        resource_spans.scope_spans[0].spans.add().MergeFromString(message)
    return resource_spans
