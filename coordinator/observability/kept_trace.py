"""One trace as it is kept: its spans, and which requests they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

SPAN_BYTES = 400
"""What a span takes beside its message: 320 bytes by tracemalloc, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpan:
    """`message` is the serialised Span, `source` the ResourceSpans that it came in, without spans.

    `request_id` is set for the root of a request only, and `has_failed` says how that request ended.
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
    """What a trace is worth when room is needed."""

    SERVED = "served"
    UNFINISHED = "unfinished"
    """No request's root has come."""
    REFUSED = "refused"
    """Roots of requests that failed before anything was done for them, and nothing else."""


@dataclass(slots=True, eq=False)
class KeptTrace:
    """Spans by their id, in the order in which they came; `roots` by request id. `version` counts changes.

    `size_bytes` has every source of its spans once.
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
        if not self.roots:
            return TraceKind.UNFINISHED
        return TraceKind.REFUSED if self._num_failed == len(self.spans) else TraceKind.SERVED

    def add(self, span: KeptSpan) -> bool:
        """False for a span that is here already."""
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
        """Of those that are here, the one that came first."""
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
        """A trace may have many requests: the spans below the root of this one, and the root. With no other
        request here, also those whose parent has not come yet, or never will.
        """
        if len(self.roots) == 1:
            return tuple(self.spans.values())
        return tuple(self._below(self.roots[request_id]))

    def _below(self, root: KeptSpan) -> Iterator[KeptSpan]:
        waiting = [root]
        while waiting:
            span = waiting.pop()
            yield span
            # A root below another one is a request of its own; and so nobody gets into a circle.
            children = self._children.get(span.span_id, ())
            waiting += [child for child in children if child.request_id is None]


class KeptTraces:
    """All of them by id, in the order in which they came, and what each kind takes together."""

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
        """A new one, or one that has changed: it keeps its place unless its kind is another now."""
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

    def first_to_go(self, *, num_traces: int, size_bytes: int) -> KeptTrace:
        """The oldest of a kind that is worth less and has more than a quarter of these bounds, and than one
        trace; else the oldest of all.
        """
        for kind in (TraceKind.REFUSED, TraceKind.UNFINISHED):
            traces = self._by_kind[kind]
            has_too_much = 4 * len(traces) > num_traces or 4 * self._sizes[kind] > size_bytes
            if has_too_much and len(traces) > 1:
                return next(iter(traces.values()))
        oldest = next(iter(self._kinds))
        return self._by_kind[self._kinds[oldest]][oldest]
