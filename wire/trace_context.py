"""W3C trace contexts as they travel, and the ids of spans that two processes know without telling each other.

https://www.w3.org/TR/trace-context/
"""

import struct

import xxhash
from opentelemetry.trace import SpanContext, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

DECODE = 0xFFFFFFFF
"""In the place of a chunk's first position: the decode work that follows the prefill."""

_PROPAGATOR = TraceContextTextMapPropagator()
_CHILD = struct.Struct("<QQIII")


def parse_traceparent(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """The remote span behind the two headers; None for anything that is none, as the standard asks for."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    context = get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def format_traceparent(context: SpanContext) -> str:
    """The header `traceparent`, version 00."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def span_context(
    trace_id: int, span_id: int, *, is_sampled: bool = True, tracestate: TraceState | None = None
) -> SpanContext:
    """A span of this cluster."""
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=tracestate)


def work_span(request: SpanContext, *, choice: int, generation: int, start: int) -> SpanContext:
    """The coordinator's span of a prefill chunk from position `start` on, or of decode work (`DECODE`), below
    that of its request.

    Its id follows from these by XXH3-64, so that stages know it as their parent and no frame has to carry it.
    """
    packed = _CHILD.pack(
        request.trace_id & (1 << 64) - 1, request.span_id, choice, generation & DECODE, start
    )
    return SpanContext(
        request.trace_id,
        xxhash.xxh3_64_intdigest(packed) or 1,
        is_remote=True,
        trace_flags=request.trace_flags,
        trace_state=request.trace_state,
    )


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Of the span that the caller is in, as metadata of a call; nothing outside of one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())
