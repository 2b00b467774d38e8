"""Spans of a request, read from OTLP messages in any order and mixed with other spans."""

import random

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.read_model import StageTimes, read_spans, request_trace
from tests.otlp_spans import REQUEST_ID, SpanMaker, Times, served


def test_stages_have_the_sums_of_their_spans() -> None:
    trace = served((0.2, 0.4)).trace()
    assert [work.place.worker for work in trace.stages] == ["worker-0", "worker-1"]
    slow = trace.stages[1]
    assert slow.times.compute_s == pytest.approx(0.44)
    assert slow.times.hop_s == pytest.approx(0.005)
    assert (slow.num_steps, slow.num_tokens, slow.mean_batch_size) == (17, 80, 2.0)
    assert slow.place.layers == "4-7"


def test_spans_may_arrive_in_any_order_and_repeatedly() -> None:
    maker = served()
    expected = maker.trace()
    shuffled = [*maker.spans, *maker.spans]
    random.Random(1).shuffle(shuffled)
    assert request_trace(read_spans(shuffled), REQUEST_ID) == expected


def test_requests_of_one_client_trace_are_separated() -> None:
    mine, other = served((0.1, 0.3)), served((0.5, 0.5), request_id="other", first_span=1000)
    orphan = SpanMaker(first_span=5000)
    orphan.stage(SpanName.STAGE_DECODE, b"\xee" * 8, 1, 0.0, Times(1.0))
    trace = request_trace(read_spans([*other.spans, *mine.spans, *orphan.spans]), REQUEST_ID)
    assert trace == mine.trace()


def test_stages_without_a_parent_belong_to_the_only_request() -> None:
    maker = served((0.1, 0.3))
    without_decode = [span for span in maker.spans if span.scope_spans[0].spans[0].name != SpanName.DECODE]
    trace = request_trace(read_spans(without_decode), REQUEST_ID)
    assert len(without_decode) == len(maker.spans) - 1
    assert trace.stages == maker.trace().stages


def test_spans_of_no_request_are_left_out() -> None:
    maker = served()
    expected = maker.trace()
    maker.add("client call", -0.1, 2.0, parent=b"", span_id=b"\xff" * 8)
    maker.add(SpanName.CLUSTER_RECOVERY, 0.0, 1.0, parent=b"")
    assert maker.trace().spans == expected.spans


def test_cyclic_parents_are_ignored() -> None:
    maker = served()
    expected = maker.trace()
    maker.add(SpanName.QUEUE, 0.0, 1.0, span_id=b"a" * 8, parent=b"b" * 8)
    maker.add(SpanName.QUEUE, 0.0, 1.0, span_id=b"b" * 8, parent=b"a" * 8)
    assert maker.trace().spans == expected.spans


def test_a_stage_that_moved_to_another_worker_is_shown_twice() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(0.2), Times(0.2)], workers=("a", "b"))
    maker.decode(1.0, 2.0, [Times(0.2), Times(0.2)], workers=("a", "c"), epoch=2)
    maker.root(2.0)
    assert [(work.place.index, work.place.worker) for work in maker.trace().stages] == [
        (0, "a"),
        (1, "b"),
        (1, "c"),
    ]


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), "long"])
def test_invalid_durations_count_as_zero(value: float | str) -> None:
    maker = SpanMaker()
    maker.add(SpanName.STAGE_DECODE, 0.0, 1.0, {Attr.COMPUTE_DURATION: value})
    (span,) = read_spans(maker.spans)
    assert StageTimes.of(span).compute_s == 0.0


def test_attributes_with_several_values_are_left_out() -> None:
    maker = SpanMaker()
    maker.root(1.0)
    attributes = maker.spans[0].scope_spans[0].spans[0].attributes
    attributes.append(KeyValue(key="list", value=AnyValue(array_value=ArrayValue())))
    attributes.append(KeyValue(key="flag", value=AnyValue(bool_value=True)))
    (span,) = read_spans(maker.data())
    assert "list" not in span.attributes
    assert span.attributes["flag"] is True


def test_a_request_without_its_root_is_rejected() -> None:
    with pytest.raises(ValueError, match="none of 10 spans is the root of request other"):
        request_trace(read_spans(served().spans), "other")


def test_the_outcome_is_read_from_the_root_span() -> None:
    failed = SpanMaker(outcome="")
    failed.root(1.0, error="no stages")
    assert failed.trace().outcome == "failed"
    assert failed.trace().root.error == "no stages"
    cancelled = SpanMaker(outcome="cancelled")
    cancelled.root(1.0)
    assert cancelled.trace().outcome == "cancelled"


def test_the_gateways_span_is_above_the_request() -> None:
    maker = served()
    before = maker.trace()
    maker.gateway(-0.5, 9.0)
    trace = maker.trace()
    assert trace.gateway is not None
    assert trace.root.parent_id == trace.gateway.span_id
    assert trace.spans == before.spans
    assert (trace.duration_s, before.gateway) == (pytest.approx(9.5), None)


def test_requests_of_one_gateways_span_are_separated() -> None:
    mine, other = served((0.1, 0.3)), served((0.5, 0.5), request_id="other", first_span=1000)
    mine.gateway(-0.5, 9.0)
    trace = request_trace(read_spans([*other.spans, *mine.spans]), REQUEST_ID)
    assert trace == mine.trace()
    assert trace.gateway is not None
