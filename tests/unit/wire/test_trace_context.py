"""Encoding of trace contexts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from wire.trace_context import (
    DECODE,
    format_traceparent,
    parse_traceparent,
    span_context,
    trace_headers,
    work_span,
)

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_header_is_read_and_written() -> None:
    context = parse_traceparent(HEADER, "vendor=1")
    assert context is not None
    assert f"{context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert context.trace_flags.sampled
    assert context.trace_state.get("vendor") == "1"
    assert format_traceparent(context) == HEADER


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x" * 10_000,
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    ],
)
def test_an_invalid_header_is_ignored(header: str) -> None:
    assert parse_traceparent(header) is None


@given(st.text())
def test_no_header_text_raises(header: str) -> None:
    parse_traceparent(header)


def test_work_has_a_unique_id_known_to_both_ends() -> None:
    request = span_context(1 << 100, 7)
    places = [
        (choice, restart_count, start)
        for choice in range(3)
        for restart_count in range(3)
        for start in (0, 512, DECODE)
    ]
    spans = {
        work_span(request, choice=choice, restart_count=restart_count, start=start).span_id
        for choice, restart_count, start in places
    }
    assert len(spans) == len(places)
    stage_side = parse_traceparent(format_traceparent(request))
    assert stage_side is not None
    one, other = (
        work_span(context, choice=1, restart_count=2, start=64) for context in (request, stage_side)
    )
    assert (one.trace_id, one.span_id, one.trace_flags) == (other.trace_id, other.span_id, other.trace_flags)


def test_call_metadata_carries_the_current_span() -> None:
    assert trace_headers() == ()
    context = SpanContext(5, 6, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with use_span(NonRecordingSpan(context)):
        assert dict(trace_headers())["traceparent"] == format_traceparent(context)
