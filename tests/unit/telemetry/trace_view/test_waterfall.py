"""Rows and segments of prefill and decode."""

import itertools

import pytest

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.waterfall import STAGE_KINDS, Segment, SegmentKind, lanes, waterfall
from tests.otlp_spans import SpanMaker, Times, served


def test_segments_of_a_stage_add_up_to_its_spans() -> None:
    trace = served((0.2, 0.4, 0.2)).trace()
    rows = [row for row in waterfall(trace).rows if row.place is not None]
    assert [row.place for row in rows] == [work.place for work in trace.stages]
    for row, work in zip(rows, trace.stages, strict=True):
        times = work.times
        expected = (times.hop_s, times.receive_s, times.wait_s, times.compute_s, times.send_s)
        assert [row.total_s(kind) for kind in STAGE_KINDS] == pytest.approx(expected, abs=1e-9)


def test_prefill_segments_keep_their_times() -> None:
    maker = SpanMaker()
    maker.chunk(0.5, [Times(0.2, wait=0.1, hop=0.05, receive=0.02, send=0.01), Times(0.3)])
    maker.root(2.0)
    first, second = (row for row in waterfall(maker.trace()).rows if row.place is not None)
    ends = [(segment.kind.value, segment.start_s, segment.end_s) for segment in first.segments]
    assert ends == [
        ("hop", pytest.approx(0.5), pytest.approx(0.55)),
        ("receive", pytest.approx(0.55), pytest.approx(0.57)),
        ("wait", pytest.approx(0.57), pytest.approx(0.67)),
        ("compute", pytest.approx(0.67), pytest.approx(0.87)),
        ("send", pytest.approx(0.87), pytest.approx(0.88)),
    ]
    assert not any(segment.is_share for segment in first.segments)
    (compute,) = second.segments
    assert (compute.start_s, compute.end_s) == (pytest.approx(0.87), pytest.approx(1.17))


def test_decode_segments_are_shares_starting_at_the_first_step() -> None:
    maker = SpanMaker()
    maker.decode(1.0, 3.0, [Times(0.8, hop=0.16)], steps=16)
    maker.root(3.0)
    (row,) = (row for row in waterfall(maker.trace()).rows if row.place is not None)
    hop, compute = row.segments
    assert hop.start_s == pytest.approx(1.0)
    assert (hop.duration_s, compute.duration_s) == (pytest.approx(0.16), pytest.approx(0.8))
    assert hop.is_share
    assert compute.is_share
    assert compute.num_steps == 16


def test_a_hop_of_negative_duration_is_not_drawn() -> None:
    maker = SpanMaker()
    maker.chunk(0.5, [Times(0.2, hop=-0.05)])
    maker.root(2.0)
    (row,) = (row for row in waterfall(maker.trace()).rows if row.place is not None)
    (compute,) = row.segments
    assert compute.kind is SegmentKind.COMPUTE
    assert (compute.start_s, compute.end_s) == (pytest.approx(0.45), pytest.approx(0.65))


def test_the_coordinator_has_rows_for_every_phase() -> None:
    maker = SpanMaker()
    maker.add(SpanName.INTAKE, 0.0, 0.1)
    maker.queue(0.1, 0.2, choice=1)
    maker.chunk(0.2, [Times(0.1)])
    maker.decode(0.3, 0.4, [Times(0.1)])
    maker.add(SpanName.PREEMPTION, 0.4, 0.5, {Attr.CHOICE: 0})
    maker.add(SpanName.RECOVERY, 0.5, 0.6, {Attr.CHOICE: 0})
    maker.root(1.0)
    view = waterfall(maker.trace())
    titles = [row.title for row in view.rows]
    assert titles == ["intake", "queue", "prefill", "decode", "preemption", "recovery", "stage 0"]
    (queue,) = view.rows[1].segments
    assert (queue.kind, queue.choice) == (SegmentKind.QUEUE, 1)
    assert (queue.start_s, queue.end_s) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (view.duration_s, view.end_s) == (1.0, 1.0)


def test_the_axis_reaches_to_the_last_segment() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.5, [Times(0.1)])
    maker.root(1.0)
    view = waterfall(maker.trace())
    assert (view.duration_s, view.end_s) == (1.0, 1.5)


def test_segments_of_a_lane_do_not_overlap() -> None:
    segments = [_segment(0.0, 2.0), _segment(1.0, 3.0), _segment(2.0, 2.5), _segment(3.0, 4.0)]
    found = lanes(segments)
    assert len(found) == 2
    assert sorted(itertools.chain(*found), key=lambda segment: segment.start_s) == segments
    for lane in found:
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(lane))


def _segment(start_s: float, end_s: float) -> Segment:
    return Segment(
        kind=SegmentKind.PREFILL,
        start_s=start_s,
        end_s=end_s,
        span_id="",
        choice=0,
        num_steps=1,
        num_tokens=1,
    )


GATEWAY_TIMES = {
    Attr.BODY_DURATION: 0.05,
    Attr.PROMPT_DURATION: 0.3,
    Attr.ACCEPT_DURATION: 0.1,
    Attr.TIME_TO_OUTPUT: 1.0,
}


def test_the_gateway_is_the_first_row_and_begins_the_time() -> None:
    maker = served((0.2, 0.4))
    before = waterfall(maker.trace())
    maker.gateway(-0.4, before.duration_s + 0.2, GATEWAY_TIMES)
    view = waterfall(maker.trace())
    assert view.duration_s == pytest.approx(before.duration_s + 0.6)
    assert [row.title for row in view.rows] == ["gateway", *(row.title for row in before.rows)]
    first = view.rows[0]
    assert [(segment.kind.value, segment.start_s, segment.end_s) for segment in first.segments] == [
        ("body", 0.0, pytest.approx(0.05)),
        ("prompt", pytest.approx(0.05), pytest.approx(0.35)),
        ("accept", pytest.approx(0.35), pytest.approx(0.45)),
        ("response", pytest.approx(1.0), pytest.approx(view.duration_s)),
    ]
    for row, same in zip(view.rows[1:], before.rows, strict=True):
        for segment, other in zip(row.segments, same.segments, strict=True):
            assert segment.start_s == pytest.approx(other.start_s + 0.4)


def test_a_gateway_that_answered_before_the_request_began_has_its_row() -> None:
    maker = SpanMaker()
    maker.decode(1.0, 3.0, [Times(0.8)])
    maker.root(3.0)
    maker.gateway(-0.4, 0.01, {Attr.BODY_DURATION: 0.1, Attr.TIME_TO_OUTPUT: 9.0})
    view = waterfall(maker.trace())
    assert view.duration_s == pytest.approx(3.4)
    assert [segment.kind.value for segment in view.rows[0].segments] == ["body", "response"]
    assert all(0 <= segment.start_s <= segment.end_s <= 0.41 for segment in view.rows[0].segments)
