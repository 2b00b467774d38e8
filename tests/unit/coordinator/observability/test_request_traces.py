"""The coordinator's spans of a request, on a clock that a test drives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from coordinator.observability.facts import FactRecorder, Outcome
from coordinator.observability.request_traces import REQUEUED, RequestTraces
from coordinator.scheduler.policy import SchedulerLimits
from telemetry.span_recorder import ratio_sampler
from telemetry.spans import Attr, SpanName
from tests.unit.coordinator.engine.engine_model import EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase
from tests.unit.telemetry.recording import ListSink, recorder_into
from wire.errors import DeadlinePassed, InvalidRequest, Overloaded
from wire.ids import id_text, new_request_id
from wire.steps import Step
from wire.trace_context import format_traceparent, parse_traceparent, span_context

NewTraced: TypeAlias = "type[Traced]"

LIMITS = SchedulerLimits(max_step_tokens=8, max_step_sequences=4, max_steps_in_flight=1)


@pytest.fixture
def new_traced() -> Iterator[type[Traced]]:
    yield Traced
    while Traced.models:
        Traced.models.pop().close()


class Traced:
    """An engine whose steps take a second each."""

    models: ClassVar[list[EngineModel]] = []

    def __init__(self, *, sampled: float = 1.0, num_blocks: int = 64) -> None:
        self.sink = ListSink()
        self.traces = RequestTraces(recorder_into(self.sink), ratio_sampler(sampled), model="m")
        self.facts = FactRecorder((self.traces,))
        self.model = EngineModel(limits=LIMITS, num_blocks=num_blocks, observer=self.facts)
        self.models.append(self.model)

    def run(self, num_steps: int = 1000) -> None:
        for _ in range(num_steps):
            self.model.now_s += 1.0
            if not (self.model.advance(0) and self.model.deliver()):
                return

    def spans(self, name: SpanName) -> list[ReadableSpan]:
        return self.sink.named(name)

    @property
    def starts(self) -> list[str]:
        """Start records sent to the stages."""
        return [start.traceparent for step in self.model.sent for start in step.starts]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_its_queue_its_chunks_and_its_decode_work(new_traced: NewTraced) -> None:
    traced = new_traced()
    request = RequestCase(prompt=tuple(range(20)), max_tokens=5).request()
    traced.model.submit(request)
    traced.run()
    (root,) = traced.spans(SpanName.GENERATE)
    chunks, (decode,) = traced.spans(SpanName.PREFILL_CHUNK), traced.spans(SpanName.DECODE)
    assert [(chunk.attributes or {})[Attr.TOKENS] for chunk in chunks] == [8, 8, 4]
    assert [seconds(chunk) for chunk in chunks] == pytest.approx([1, 1, 1])
    assert (decode.attributes or {})[Attr.TOKENS] == 4
    assert (decode.attributes or {})[Attr.STEP_DURATION] == pytest.approx(4)
    assert seconds(decode) == pytest.approx(4)
    attributes = root.attributes or {}
    assert attributes[Attr.REQUEST_ID] == id_text(request.id)
    assert attributes[Attr.TIME_TO_FIRST_TOKEN] == pytest.approx(3)
    assert attributes[Attr.E2E] == pytest.approx(7)
    assert len(traced.starts) == 1
    reported = parse_traceparent(traced.starts[0])
    assert reported is not None
    assert root.context is not None
    assert reported.span_id == root.context.span_id


def test_unsampled_requests_are_neither_sent_to_stages_nor_recorded(new_traced: NewTraced) -> None:
    traced = new_traced(sampled=0.0)
    traced.model.submit(RequestCase(max_tokens=5).request())
    traced.run()
    assert traced.starts == [""]
    assert traced.sink.spans == []


def test_an_interruption_is_recorded_with_the_work_before_it(new_traced: NewTraced) -> None:
    traced = new_traced(sampled=0.0)
    traced.model.submit(RequestCase(max_tokens=9).request())
    traced.run(3)
    traced.model.die("worker b is lost")
    traced.model.now_s += 10.0
    traced.model.start(64)
    traced.run()
    assert [span.name for span in traced.sink.spans if span.parent] == [
        *(SpanName.INTAKE, SpanName.QUEUE, SpanName.PREFILL_CHUNK, SpanName.DECODE),
        *(SpanName.RECOVERY, SpanName.PREFILL_CHUNK, SpanName.DECODE),
    ]
    (recovery,) = traced.spans(SpanName.RECOVERY)
    assert seconds(recovery) == pytest.approx(10)
    assert traced.starts[0] == ""
    assert traced.starts[1] != ""
    (root,) = traced.spans(SpanName.GENERATE)
    assert {span.parent.span_id for span in traced.sink.spans if span.parent} == {root.context.span_id}  # type: ignore[union-attr]
    (cluster,) = traced.spans(SpanName.CLUSTER_RECOVERY)
    assert (cluster.attributes or {})[Attr.NUM_REQUESTS] == 1


def test_a_preemption_is_a_wait_and_the_spans_add_up(new_traced: NewTraced) -> None:
    traced = new_traced(num_blocks=8)
    requests = [RequestCase(prompt=(first,) * 8, max_tokens=14).request(arrival=first) for first in (1, 2)]
    for request in requests:
        traced.model.submit(request)
    traced.run()
    (waited,) = traced.spans(SpanName.PREEMPTION)
    assert seconds(waited) > 0
    for root in traced.spans(SpanName.GENERATE):
        decodes = [
            span
            for span in traced.spans(SpanName.DECODE)
            if span.parent is not None and span.parent.span_id == root.context.span_id  # type: ignore[union-attr]
        ]
        tokens = sum(int((decode.attributes or {})[Attr.TOKENS]) for decode in decodes)  # type: ignore[call-overload]
        assert tokens + len(decodes) == 14


def test_requeueing_for_suspects_is_not_a_preemption(new_traced: NewTraced) -> None:
    traced = new_traced()
    for first in (1, 2):
        traced.model.submit(RequestCase(prompt=(first,) * 4, max_tokens=12).request(arrival=first))
    traced.run(4)
    traced.model.die("worker b is lost")
    traced.model.start(64)
    traced.run()
    assert traced.spans(SpanName.PREEMPTION) == []
    reasons = [(span.attributes or {}).get(Attr.REASON) for span in traced.spans(SpanName.RECOVERY)]
    assert REQUEUED in reasons
    roots = [span.attributes or {} for span in traced.spans(SpanName.GENERATE)]
    assert [(root[Attr.NUM_PREEMPTIONS], root[Attr.NUM_RECOVERIES]) for root in roots] == [(0, 1)] * 2


def test_an_error_is_recorded_with_its_reason(new_traced: NewTraced) -> None:
    traced = new_traced(sampled=0.0)
    request = RequestCase(max_tokens=9).request()
    traced.model.submit(request)
    traced.model.stop()
    traced.model.engine.fail_all("no pipeline")
    (root,) = traced.spans(SpanName.GENERATE)
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "no pipeline"
    assert (root.attributes or {})[Attr.OUTCOME] == "failed"


async def test_rejections_are_recorded_and_disconnects_are_not() -> None:
    reported: list[Exception] = []
    traces = RequestTraces(
        recorder_into(ListSink()), ratio_sampler(1.0), model="m", on_refusal=reported.append
    )
    errors = [Overloaded("full"), InvalidRequest("no prompt"), asyncio.CancelledError(), GeneratorExit()]
    for error in errors:
        with pytest.raises(type(error)), traces.arrival(new_request_id(), None, 0.0):
            raise error
    with pytest.raises(InvalidRequest), traces.nameless_arrival():
        raise InvalidRequest("no id")
    assert list(map(str, reported)) == ["full", "no prompt", "no id"]


def test_a_restarted_coordinator_continues_the_same_span(new_traced: NewTraced) -> None:
    started, caller = span_context(11, 12), span_context(11, 13)
    traced = new_traced()
    request = RequestCase(max_tokens=3).request()
    trace = traced.traces.resumed(format_traceparent(started), format_traceparent(caller), 500.0)
    assert trace is not None
    assert (trace.traceparent, trace.caller_traceparent) == tuple(map(format_traceparent, (started, caller)))
    request.trace = trace
    traced.model.engine.restore(request, ended=None)
    traced.run()
    (root,) = traced.spans(SpanName.GENERATE)
    assert root.context is not None
    assert root.parent is not None
    assert (root.context.span_id, root.parent.span_id) == (12, 13)
    assert (root.attributes or {})[Attr.NUM_RECOVERIES] == 1
    assert len(traced.spans(SpanName.RECOVERY)) == 1
    assert traced.spans(SpanName.INTAKE) == []
    assert traced.traces.resumed("", "", 0.0) is None


def test_a_step_without_slices_has_no_span(new_traced: NewTraced) -> None:
    traced = new_traced()
    traced.facts.step_sent(Step(epoch=1, step_id=99), 1.0)
    assert traced.sink.spans == []


def test_the_outcome_of_a_span_equals_that_in_metrics(new_traced: NewTraced) -> None:
    traced = new_traced()
    request = RequestCase(max_tokens=5).request()
    traced.model.submit(request)
    error = DeadlinePassed("deadline passed")
    traced.facts.ended(request, error, 3.0)
    (root,) = traced.spans(SpanName.GENERATE)
    assert (root.attributes or {})[Attr.OUTCOME] == Outcome.of(error) == Outcome.CANCELLED
