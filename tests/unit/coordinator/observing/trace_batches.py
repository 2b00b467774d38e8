"""Requests' spans as they would be sent, each request in a trace of its own."""

from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from coordinator.observing.trace_store import FoundTrace
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace
from tests.otlp_spans import SpanMaker, served


def request_id(number: int) -> str:
    return f"01890a5d-0000-7000-8000-{number:012x}"


def trace_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def request(number: int) -> SpanMaker:
    """Request `number`: it began so many seconds after request 0, and has 11 spans."""
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
