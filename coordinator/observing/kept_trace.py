"""One trace as it is kept: its spans, and which requests they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass, field

SPAN_BYTES = 400
"""What a span takes beside its message: 320 bytes by tracemalloc, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpan:
    """`message` is the serialised Span, `source` the ResourceSpans that it came in, without spans.

    `request_id` is set for the root of a request only.
    """

    span_id: bytes
    parent_id: bytes
    request_id: str | None
    start_ns: int
    source: bytes
    message: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.message) + SPAN_BYTES


@dataclass(slots=True, eq=False)
class KeptTrace:
    """Spans by their id, in the order in which they came; `roots` by request id. `version` counts changes."""

    id: bytes
    spans: dict[bytes, KeptSpan] = field(default_factory=dict)
    roots: dict[str, KeptSpan] = field(default_factory=dict)
    size_bytes: int = 0
    version: int = 0
    _children: dict[bytes, list[KeptSpan]] = field(default_factory=dict)

    def add(self, span: KeptSpan) -> bool:
        """False for a span that is here already."""
        if span.span_id in self.spans:
            return False
        self.spans[span.span_id] = span
        self._children.setdefault(span.parent_id, []).append(span)
        self.size_bytes += span.size_bytes
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
