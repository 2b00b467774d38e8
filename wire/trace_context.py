"""W3C trace contexts on the wire, and span ids that two processes derive independently.

Source: https://www.w3.org/TR/trace-context/
"""

import struct

import xxhash
from opentelemetry.trace import SpanContext, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

DECODE = 0xFFFFFFFF
"""Start value of decode work, in the place of a prefill chunk's first position."""

_PROPAGATOR = TraceContextTextMapPropagator()
_CHILD = struct.Struct("<QQIII")


def parse_traceparent(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Return the remote span of the two headers; None for invalid ones, as the standard requires."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    context = get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def format_traceparent(context: SpanContext) -> str:
    """Format the `traceparent` header, version 00."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def span_context(
    trace_id: int, span_id: int, *, is_sampled: bool = True, tracestate: TraceState | None = None
) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=tracestate)


def work_span(request: SpanContext, *, choice: int, restart_count: int, start: int) -> SpanContext:
    """Return the coordinator's span of one prefill chunk (from `start` on) or of decode work (`DECODE`).

    Its id is the XXH3-64 of the arguments, so stages derive their parent span without a field in the frame.
    """
    packed = _CHILD.pack(
        request.trace_id & (1 << 64) - 1, request.span_id, choice, restart_count & DECODE, start
    )
    return SpanContext(
        request.trace_id,
        xxhash.xxh3_64_intdigest(packed) or 1,
        is_remote=True,
        trace_flags=request.trace_flags,
        trace_state=request.trace_state,
    )


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return the current span as call metadata; empty outside of a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())
