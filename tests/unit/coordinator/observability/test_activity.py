"""Recent activity, from the events of the engine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields

import pytest

from coordinator.engine.observer import EndCause
from coordinator.engine.request import Request
from coordinator.observability.activity import (
    MAX_ENDED,
    ActivityRecorder,
    RequestPhase,
    Snapshot,
    steps_after,
)
from coordinator.observability.facts import FactRecorder
from coordinator.observability.rates import KEPT_S
from coordinator.observability.request_traces import RequestTraces
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import SequenceState
from telemetry.span_recorder import ratio_sampler
from tests.unit.coordinator.engine.engine_model import EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase
from tests.unit.coordinator.observability.makers import new_request, result, sequence_of, step
from tests.unit.telemetry.recording import ListSink, recorder_into
from wire.errors import ClusterUnavailable, RequestCancelled, ServingError
from wire.interceptors import sent_reason


class Story:
    """Feeds a recorder with engine events."""

    def __init__(self) -> None:
        self.recorder = ActivityRecorder(1000.0)
        self.facts = FactRecorder((self.recorder,))
        self._num_steps = 0

    def accept(self, now_s: float, **settings: int) -> Request:
        request = new_request(**settings)
        self.facts.accepted(request, now_s)
        return request

    def prefill(self, request: Request, *, sent_s: float, answered_s: float) -> None:
        chunks = [choice.sequence for choice in request.choices]
        self._step(sent_s, answered_s, chunks=chunks, starts=chunks, tokens=chunks)

    def decode(self, *requests: Request, sent_s: float, answered_s: float) -> None:
        sequences = [sequence_of(request) for request in requests]
        self._step(sent_s, answered_s, decodes=sequences, tokens=sequences)

    def end(self, request: Request, now_s: float, error: ServingError | None = None) -> None:
        for sequence in request.live_sequences:
            sequence.end(SequenceState.CANCELLED)
        self.facts.ended(request, error, now_s)

    def at(self, now_s: float) -> Snapshot:
        return self.recorder.snapshot(now_s, now_unix_s=0.0, workers=("a", "b"))

    def _step(self, sent_s: float, answered_s: float, *, tokens: list[object], **parts: list[object]) -> None:
        made = step(self._num_steps, **parts)  # type: ignore[arg-type]
        answer = result(self._num_steps, 1, 1)
        self._num_steps += 1
        self.facts.step_sent(made, sent_s)
        progress = [SequenceUpdate(sequence, token=5) for sequence in tokens]  # type: ignore[arg-type]
        self.facts.step_completed(answer, progress, sent_s, answered_s)


def test_milestones_and_waits_of_a_request() -> None:
    story = Story()
    request = story.accept(1000.0)
    story.prefill(request, sent_s=1000.25, answered_s=1000.5)
    story.decode(request, sent_s=1000.5, answered_s=1000.6)
    story.decode(request, sent_s=1000.6, answered_s=1000.7)
    snapshot = story.at(1001.0)
    (shown,) = snapshot.live
    assert (shown.arrived_s, shown.started_s, shown.first_token_s, shown.ended_s) == (
        1000.0,
        1000.25,
        1000.5,
        None,
    )
    assert snapshot.rates.first_token.p50_s == pytest.approx(0.5, rel=0.011)
    assert snapshot.rates.inter_token.count == 2
    assert snapshot.rates.inter_token.p95_s == pytest.approx(0.1, rel=0.011)


def test_tokens_and_requests_are_counted_in_their_seconds() -> None:
    story = Story()
    requests = [story.accept(1000.0) for _ in range(3)]
    for request in requests:
        story.prefill(request, sent_s=1000.2, answered_s=1000.4)
    for index in range(4):
        story.decode(*requests, sent_s=1001.0, answered_s=1001.0 + index / 10)
    story.end(requests[0], 1001.5)
    story.end(requests[1], 1001.5, RequestCancelled("left"))
    first, second = story.at(1002.0).seconds
    assert (first.start_s, first.num_prefill_tokens, first.num_generated_tokens, first.num_accepted) == (
        1000,
        9,
        3,
        3,
    )
    assert (second.num_generated_tokens, second.num_steps, second.num_finished, second.num_unfinished) == (
        12,
        4,
        1,
        1,
    )
    rates = story.at(1004.0).rates
    assert rates.window_s == pytest.approx(4.0)
    assert rates.generated_tokens == pytest.approx(15 / 4)


def test_rates_cover_the_last_ten_seconds() -> None:
    story = Story()
    request = story.accept(1000.0)
    story.prefill(request, sent_s=1000.2, answered_s=1000.4)
    assert story.at(1009.9).rates.generated_tokens > 0
    after = story.at(1010.1)
    assert (after.rates.generated_tokens, after.rates.inter_token.p50_s) == (0.0, None)
    assert len(after.seconds) == 1
    assert story.at(1000.0 + KEPT_S + 1).seconds == ()


def test_the_pauses_of_each_sequence_are_between_its_own_tokens() -> None:
    story = Story()
    slow, quick = story.accept(1000.0), story.accept(1000.0)
    for request in (slow, quick):
        story.prefill(request, sent_s=1000.0, answered_s=1000.0)
    story.decode(quick, sent_s=1000.1, answered_s=1000.2)
    story.decode(slow, quick, sent_s=1000.2, answered_s=1000.4)
    found = story.at(1001.0).rates.inter_token
    assert found.count == 3
    assert found.p50_s == pytest.approx(0.2, rel=0.011)
    assert found.p99_s == pytest.approx(0.4, rel=0.011)


def test_of_several_choices_the_first_token_counts_once() -> None:
    story = Story()
    request = story.accept(1000.0, num_choices=3)
    story.prefill(request, sent_s=1000.0, answered_s=1000.3)
    snapshot = story.at(1001.0)
    assert snapshot.rates.first_token.count == 1
    assert snapshot.seconds[0].num_generated_tokens == 3


def test_queue_and_first_token_begin_with_the_call_as_in_traces() -> None:
    recorder, now_s = ActivityRecorder(0.0), 7.0
    facts = FactRecorder((recorder,))
    traces = RequestTraces(recorder_into(ListSink()), ratio_sampler(0.0), model="m")
    request = new_request()
    with traces.arrival(request.id, None, 4.0) as request.trace:
        facts.accepted(request, now_s)
    sequence = sequence_of(request)
    facts.step_sent(step(0, chunks=[sequence], starts=[sequence]), 8.0)
    facts.step_completed(result(0, 1), [SequenceUpdate(sequence, token=5)], 8.0, 9.0)
    snapshot = recorder.snapshot(10.0, now_unix_s=0.0)
    (shown,) = snapshot.live
    assert (shown.arrived_s, shown.started_s, shown.first_token_s) == (4.0, 8.0, 9.0)
    assert snapshot.rates.first_token.p50_s == pytest.approx(5.0, rel=0.011)


def test_waiting_for_a_new_epoch_is_not_a_preemption() -> None:
    recorder = ActivityRecorder(0.0)
    seen = set[RequestPhase]()

    def phases(model: EngineModel) -> set[RequestPhase]:
        return {request.phase for request in recorder.snapshot(model.now_s, now_unix_s=0.0).live}

    with closing(EngineModel(num_blocks=8, observer=FactRecorder((recorder,)))) as model:
        for first in (1, 2):
            model.submit(RequestCase(prompt=(first,) * 8, max_tokens=14).request(arrival=first))
        while RequestPhase.PREEMPTED not in seen:
            assert model.advance(0)
            assert model.deliver()
            seen |= phases(model)
        assert RequestPhase.RECOVERING not in seen
        model.die("worker b is lost")
        assert phases(model) == {RequestPhase.RECOVERING, RequestPhase.PREEMPTED}
        model.start(64)
        while not phases(model) <= {RequestPhase.PREFILL, RequestPhase.DECODE}:
            assert model.advance(0)
            assert model.deliver()
        model.die("worker b is lost again")
        assert phases(model) == {RequestPhase.RECOVERING}


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (None, RequestPhase.FINISHED),
        (RequestCancelled("the client disconnected"), RequestPhase.CANCELLED),
        (ClusterUnavailable("no pipeline"), RequestPhase.FAILED),
    ],
)
def test_a_request_that_has_ended_is_remembered_with_its_end(
    error: ServingError | None, phase: RequestPhase
) -> None:
    story = Story()
    request = story.accept(1000.0)
    story.end(request, 1002.0, error)
    snapshot = story.at(1003.0)
    assert snapshot.live == ()
    (ended,) = snapshot.ended
    assert (ended.request_id, ended.phase, ended.ended_s) == (request.id, phase, 1002.0)
    assert ended.error == ("" if error is None else str(error))
    assert ended.reason == ("" if error is None else sent_reason(error))


def test_an_ended_request_keeps_no_exception() -> None:
    """Its traceback would hold the frames of the call, and so the request with its output."""
    story = Story()
    request = story.accept(1000.0)
    story.end(request, 1002.0, RequestCancelled("cancelled"))
    (ended,) = story.at(1003.0).ended
    assert not any(isinstance(getattr(ended, field.name), BaseException) for field in fields(ended))


def test_only_the_last_of_many_requests_are_kept() -> None:
    story = Story()
    for index in range(MAX_ENDED + 50):
        request = story.accept(1000.0 + index)
        story.prefill(request, sent_s=1000.0 + index, answered_s=1000.1 + index)
        story.end(request, 1000.2 + index)
    assert story.facts._token_s == {}
    assert story.facts._active == {}
    assert story.recorder._requests._active == {}
    assert len(story.recorder._requests.ended(10_000)) == MAX_ENDED
    newest = story.at(1400.0).ended[0]
    assert newest.arrived_s == 1000.0 + MAX_ENDED + 49


def test_a_stopped_epoch_voids_steps_in_flight() -> None:
    story = Story()
    story.facts.epoch_started(3, 1000.0)
    story.facts.step_sent(step(0), 1000.1)
    story.facts.epoch_stopped(EndCause.DEATH, "worker w1 is lost", 1000.5)
    story.facts.epoch_started(4, 1001.0)
    snapshot = story.at(1002.0)
    assert snapshot.in_flight == ()
    assert [
        (epoch.epoch, epoch.started_s, epoch.stopped_s, epoch.cause, epoch.reason)
        for epoch in snapshot.epochs
    ] == [
        (3, 1000.0, 1000.5, EndCause.DEATH, "worker w1 is lost"),
        (4, 1001.0, None, None, ""),
    ]


def test_a_repeated_query_returns_only_newer_steps() -> None:
    story = Story()
    request = story.accept(1000.0)
    story.prefill(request, sent_s=1000.0, answered_s=1000.1)
    for index in range(5):
        story.decode(request, sent_s=1000.2, answered_s=1000.3 + index / 10)
    steps = story.at(1001.0).steps
    assert [step.number for step in steps_after(steps, 0)] == [1, 2, 3, 4, 5, 6]
    assert [step.number for step in steps_after(steps, 4)] == [5, 6]


def test_one_answer_has_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.observability.activity.MAX_STAGE_TIMES", 6)
    story = Story()
    request = story.accept(1000.0)
    for index in range(9):
        story.decode(request, sent_s=1000.2, answered_s=1000.3 + index / 100)
    assert [step.number for step in steps_after(story.at(1001.0).steps, 0)] == [7, 8, 9]
