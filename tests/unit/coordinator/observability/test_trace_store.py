"""The store keeps the newest spans within its bounds, for any order of arrival."""

import random
import threading
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from coordinator.observability import trace_store
from coordinator.observability.trace_store import StoreLimits, TraceStore
from telemetry.spans import SpanName
from tests.otlp_spans import SpanMaker, served
from tests.unit.coordinator.observability.trace_batches import (
    batch,
    of_scope,
    read,
    request,
    request_id,
    size_of,
    trace_id,
)
from wire.errors import InvalidRequest, RequestNotFound

NUM_SPANS = 10


def filled(*numbers: int, **limits: int) -> TraceStore:
    store = TraceStore(StoreLimits(**limits))
    for number in numbers:
        store.add(batch(number))
    return store


def kept(store: TraceStore) -> list[str]:
    return [found.request_id for found in store.recent()]


def test_a_request_is_found_with_all_its_spans() -> None:
    store = filled(1, 2)
    assert read(store.find(request_id(2))) == request(2).trace()
    assert store.find(request_id(2)).trace_id == trace_id(2).hex()
    assert store.counts.taken == 2 * NUM_SPANS


def test_spans_may_arrive_late_and_in_any_order() -> None:
    spans = batch(1)
    random.Random(3).shuffle(spans)
    store = TraceStore()
    for span in spans:
        store.add([span])
        store.add(batch(2))
    assert read(store.find(request_id(1))) == request(1).trace()


def test_a_span_that_is_repeated_is_kept_once() -> None:
    store = filled(1)
    size_bytes = store.size_bytes
    taken = store.add(batch(1))
    assert (store.counts.taken, store.counts.repeated) == (NUM_SPANS, NUM_SPANS)
    assert (taken.num_dropped, taken.num_refused) == (0, 0)
    assert store.size_bytes == size_bytes
    assert len(store.find(request_id(1)).spans) == NUM_SPANS


def test_the_oldest_trace_makes_room_for_one_more() -> None:
    store = filled(1, 2, 3, num_traces=2)
    assert kept(store) == [request_id(3), request_id(2)]
    assert (store.counts.dropped, store.counts.dropped_traces) == (NUM_SPANS, 1)
    with pytest.raises(RequestNotFound, match=f"no trace of request {request_id(1)} is stored"):
        store.find(request_id(1))


def test_the_bytes_of_all_traces_are_bounded() -> None:
    one_bytes = filled(1).size_bytes
    store = filled(*range(1, 21), size_bytes=5 * one_bytes)
    assert store.size_bytes <= 5 * one_bytes
    assert kept(store) == [request_id(number) for number in (20, 19, 18, 17, 16)]
    assert store.counts.dropped_traces == 15
    assert store.size_bytes == sum(map(size_of, store.recent()))


def test_late_spans_of_an_evicted_trace_are_dropped() -> None:
    first, *late = batch(1)
    store = filled(num_traces=1)
    store.add([first])
    store.add(batch(2))
    taken = store.add(late)
    assert taken.num_dropped == len(late)
    assert store.counts.dropped == 1 + len(late)
    assert kept(store) == [request_id(2)]


def test_the_record_of_dropped_traces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MAX_DROPPED_IDS", 3)
    store = filled(*range(1, 11), num_traces=1)
    assert store.add(batch(8)).num_dropped == NUM_SPANS
    assert store.add(batch(2)).num_dropped == 0


def test_a_trace_that_is_too_large_loses_its_oldest_spans() -> None:
    one_bytes = filled(1).size_bytes
    store = TraceStore(StoreLimits(size_bytes=8 * one_bytes))
    for number in range(1, 6):
        maker = served(request_id=request_id(number), trace_id=trace_id(1), first_span=1 + 100 * number)
        store.add(maker.spans)
    assert store.size_bytes <= store.limits.trace_bytes == 2 * one_bytes
    assert kept(store) != []
    assert request_id(5) in kept(store)
    assert request_id(1) not in kept(store)
    assert len(read(store.find(request_id(5))).spans) == NUM_SPANS - 1
    assert 3 * NUM_SPANS <= store.counts.dropped < 4 * NUM_SPANS


def test_a_span_that_is_larger_than_a_trace_may_be_is_dropped() -> None:
    store = TraceStore(StoreLimits(size_bytes=4096))
    span = Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="x" * 5000)
    assert store.add([of_scope(span)]).num_dropped == 1
    assert (store.num_traces, store.size_bytes) == (0, 0)


@pytest.mark.parametrize(("trace_size", "span_size"), [(0, 8), (15, 8), (16, 0), (16, 7)])
def test_spans_without_valid_ids_are_rejected(trace_size: int, span_size: int) -> None:
    store = TraceStore()
    span = Span(trace_id=b"t" * trace_size, span_id=b"s" * span_size)
    assert store.add([of_scope(span)]).num_refused == 1
    assert (store.counts.refused, store.num_traces) == (1, 0)


def test_requests_of_one_trace_are_separated() -> None:
    store = TraceStore()
    makers = [
        served((0.1, number / 10), request_id=request_id(number), first_span=100 * number)
        for number in (1, 2, 3)
    ]
    for maker in makers:
        store.add(maker.spans)
    assert store.num_traces == 1
    for number, maker in zip((1, 2, 3), makers, strict=True):
        found = store.find(request_id(number))
        assert len(found.spans) == len(maker.spans)
        assert read(found) == maker.trace()


def test_stages_without_a_parent_are_shown_with_the_only_request() -> None:
    store = TraceStore()
    store.add(span for span in batch(1) if span.scope_spans[0].spans[0].name != SpanName.DECODE)
    assert [work.num_steps for work in read(store.find(request_id(1))).stages] == [17, 17, 17]


@pytest.mark.parametrize("wanted", ["01890a5d-0000-7000-8000-000000000ab", "0ab1", "0AB1", f" {0xAB1:032x}"])
def test_a_request_is_found_by_a_part_of_its_id_and_by_its_trace(wanted: str) -> None:
    store = filled(0xAB1, 0xCD2)
    assert store.find(wanted).request_id == request_id(0xAB1)


def test_a_part_that_several_ids_have_is_rejected_with_them() -> None:
    store = filled(1, 2)
    with pytest.raises(InvalidRequest, match=f"01890a5d matches 2 requests: {request_id(1)}, "):
        store.find("01890a5d")


@pytest.mark.parametrize("wanted", ["xxxx", "1890a5d"])
def test_a_text_outside_every_id_is_not_found(wanted: str) -> None:
    with pytest.raises(RequestNotFound):
        filled(1).find(wanted)


@pytest.mark.parametrize("wanted", ["", " ", "0", " 018 ", "001"])
def test_a_part_that_is_too_short_is_rejected(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="is too short: at least 4 characters"):
        filled(1).find(wanted)


def test_recent_requests_are_listed_by_their_start_and_not_by_their_arrival() -> None:
    store = filled(2, 3, 1)
    assert kept(store) == [request_id(3), request_id(2), request_id(1)]
    assert [found.request_id for found in store.recent(1)] == [request_id(3)]


def test_the_recording_process_is_kept_with_a_span() -> None:
    maker = request(1)
    for span in maker.spans:
        span.schema_url = "of the resource"
        span.scope_spans[0].schema_url = "of the scope"
        span.scope_spans[0].scope.CopyFrom(InstrumentationScope(name="stageline", version="2"))
    store = TraceStore()
    store.add(maker.spans)
    data = store.find(request_id(1)).data()
    assert len(data.resource_spans) == 4
    before = {_with_source(span) for span in maker.spans}
    assert {_with_source(span) for span in _split(data.resource_spans)} == before


def test_process_attributes_count_and_are_evicted_with_their_traces() -> None:
    store = TraceStore(StoreLimits(size_bytes=256 * 1024))
    for number in range(1, 200):
        for message in (messages := batch(number)):
            message.schema_url = f"{number}" + "x" * 6000
        store.add(messages)
        assert store.size_bytes <= 256 * 1024
        assert store.size_bytes == sum(map(size_of, store.recent()))
    assert sum(map(len, store._sources)) <= 128 * 8 * 1024
    assert len(store._sources) <= 128


def test_a_process_with_oversized_attributes_is_rejected() -> None:
    store = TraceStore()
    message = of_scope(Span(trace_id=b"t" * 16, span_id=b"s" * 8))
    message.schema_url = "x" * 10_000
    assert store.add([message]).refused == {"of a process whose description takes more than 8192 bytes": 1}
    assert (store.num_traces, store.counts.refused) == (0, 1)


def test_spans_of_another_scope_are_rejected_without_evictions() -> None:
    store = filled(1, 2, num_traces=2)
    for number in range(100, 200):
        span = Span(trace_id=trace_id(number), span_id=b"s" * 8)
        assert store.add([of_scope(span, scope="foreign")]).refused == {"of a scope that is not stageline": 1}
    assert kept(store) == [request_id(2), request_id(1)]


@pytest.mark.parametrize(
    "planted", ["[/x]", "\x1b[31m", "", "x", request_id(1).upper(), "{" + request_id(1) + "}", "0" * 36]
)
def test_a_root_of_an_unknown_request_is_rejected(planted: str) -> None:
    store = filled(1)
    taken = store.add(
        [span for span in served(request_id=planted, trace_id=b"p" * 16).spans if _is_root(span)]
    )
    assert taken.refused == {"of requests whose id is no UUIDv7": 1}
    assert kept(store) == [request_id(1)]


def test_traces_without_a_root_have_a_quarter_when_room_is_needed() -> None:
    store = filled(*range(1, 9), num_traces=8)
    for number in range(100, 140):
        store.add([of_scope(Span(trace_id=trace_id(number), span_id=b"s" * 8))])
    assert kept(store) == [request_id(number) for number in (8, 7, 6, 5, 4, 3)]
    assert store.num_traces == 8


def test_traces_without_a_root_have_a_quarter_of_the_bytes() -> None:
    one_bytes = filled(1).size_bytes
    store = filled(*range(1, 9), size_bytes=8 * one_bytes)
    for number in range(100, 140):
        store.add([of_scope(Span(trace_id=trace_id(number), span_id=b"s" * 8, name="x" * (one_bytes // 2)))])
    assert len(kept(store)) >= 5
    assert store.size_bytes <= 8 * one_bytes


def test_requests_that_were_rejected_have_a_quarter_when_room_is_needed() -> None:
    store = filled(*range(1, 9), num_traces=8)
    for number in range(100, 140):
        store.add(_refused(number))
    assert kept(store) == [request_id(number) for number in (139, 138, 8, 7, 6, 5, 4, 3)]
    store.add(batch(200))
    assert kept(store) == [request_id(number) for number in (200, 139, 138, 8, 7, 6, 5, 4)]


def test_what_a_gateway_rejects_evicts_no_active_request() -> None:
    store = filled(1, num_traces=8)
    active = [span for span in batch(2) if span.scope_spans[0].spans[0].name != SpanName.GENERATE]
    store.add(active)
    for number in range(100, 140):
        rejected = SpanMaker(trace_id=trace_id(number), outcome="failed")
        rejected.gateway(0.0, 0.1)
        store.add(rejected.spans)
    store.add(batch(2))
    assert read(store.find(request_id(2))) == request(2).trace()
    assert store.num_traces == 8


def test_requests_of_one_gateways_span_are_found_with_it() -> None:
    store = TraceStore()
    makers = [served(request_id=request_id(number), first_span=100 * number) for number in (1, 2)]
    makers[0].gateway(-0.5, 9.0)
    for maker in makers:
        store.add(maker.spans)
    for number in (1, 2):
        assert read(store.find(request_id(number))).gateway == makers[0].trace().gateway is not None


def test_an_empty_store_keeps_rejected_requests_until_room_is_needed() -> None:
    store = TraceStore(StoreLimits(num_traces=8))
    for number in range(1, 9):
        store.add(_refused(number))
    assert len(kept(store)) == 8
    for number in range(101, 107):
        store.add(batch(number))
    assert kept(store) == [request_id(number) for number in (106, 105, 104, 103, 102, 101, 8, 7)]


def test_spans_are_taken_in_pieces() -> None:
    store = TraceStore()
    spans = [Span(trace_id=b"t" * 16, span_id=number.to_bytes(8, "big")) for number in range(1, 201)]
    sizes = [store.counts.taken for _ in store.add_in_pieces([of_scope(*spans)], trace_store.AddResult())]
    assert sizes == [64, 128, 192]
    assert store.counts.taken == 200


def test_several_threads_may_add_and_read() -> None:
    store = TraceStore(StoreLimits(num_traces=5))

    def work(first: int) -> None:
        for number in range(first, first + 40):
            store.add(batch(number))
            for found in store.recent():
                assert found.data().resource_spans

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 101, 201)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert store.num_traces == 5
    assert store.counts.dropped == 115 * NUM_SPANS
    assert store.size_bytes == sum(map(size_of, store.recent()))


def _refused(number: int) -> list[ResourceSpans]:
    """The coordinator's spans of a request that was rejected for lack of room."""
    maker = SpanMaker(
        request_id=request_id(number),
        trace_id=trace_id(number),
        begin_ns=1_790_000_000_000_000_000 + number * 10**9,
        outcome="failed",
    )
    maker.root(0.0, error="the queue is full")
    return maker.spans


def _is_root(message: ResourceSpans) -> bool:
    return message.scope_spans[0].spans[0].name == SpanName.GENERATE


def _split(messages: Any) -> list[ResourceSpans]:
    """One message for each span."""
    found = []
    for message in messages:
        for span in message.scope_spans[0].spans:
            one = ResourceSpans()
            one.CopyFrom(message)
            one.scope_spans[0].ClearField("spans")
            one.scope_spans[0].spans.add().CopyFrom(span)
            found.append(one)
    return found


def _with_source(message: ResourceSpans) -> bytes:
    return message.SerializeToString(deterministic=True)
