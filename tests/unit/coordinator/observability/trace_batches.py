"""Exported spans of requests, each request in a separate trace."""

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from coordinator.observability.trace_store import FoundTrace
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace
from tests.otlp_spans import SpanMaker, served


def request_id(number: int) -> str:
    return f"01890a5d-0000-7000-8000-{number:012x}"


def trace_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def request(number: int) -> SpanMaker:
    """Request `number`: starts `number` seconds after request 0, and has 11 spans."""
    return served(
        request_id=request_id(number),
        trace_id=trace_id(number),
        begin_ns=1_790_000_000_000_000_000 + number * 10**9,
        first_span=1 + 100 * number,
    )


def batch(number: int) -> list[ResourceSpans]:
    return request(number).spans


def read(found: FoundTrace) -> RequestTrace:
    return request_trace(read_spans(found.data()), found.request_id)


def of_scope(*spans: Span, scope: str = "stageline") -> ResourceSpans:
    """These spans in one message, of a process without resource attributes."""
    return ResourceSpans(scope_spans=[ScopeSpans(scope=InstrumentationScope(name=scope), spans=spans)])


def size_of(found: FoundTrace) -> int:
    """Size of a request's trace: its spans, plus each source once."""
    sources = {span.source for span in found.spans}
    return sum(span.size_bytes for span in found.spans) + sum(map(len, sources))
