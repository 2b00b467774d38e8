"""A request ends once, with the reason of its end, and its pages are freed."""

from __future__ import annotations

import pytest

from coordinator.engine.admission import AdmissionLimits
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import SequenceState
from tests.unit.coordinator.engine.conftest import NewModel
from tests.unit.coordinator.engine.engine_model import check_whole, ended_as
from tests.unit.coordinator.engine.request_cases import RequestCase, solo
from wire.errors import DeadlinePassed, RequestCancelled, RequestNotFound
from wire.steps import EndRecord

CANCELLED, FINISHED = SequenceState.CANCELLED, SequenceState.FINISHED
ONE_AT_A_TIME = SchedulerLimits(max_step_tokens=16, max_step_sequences=8, max_steps_in_flight=1)


# Cancel


def test_a_cancel_frees_the_pages_with_the_next_step(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(prompt=(1, 2, 3, 4, 5), n=2, max_tokens=9).request()
    call = model.submit(request)
    model.run_step()
    model.run_step()
    sent = len(model.sent)
    model.engine.cancel(request.id)
    assert model.kv.num_active == 0
    assert ended_as(request) is CANCELLED
    model.run()
    ends = [end for step in model.sent[sent:] for end in step.ends]
    assert ends == [EndRecord(choice.sequence.key, 0) for choice in request.choices]
    call.read_all()
    assert isinstance(call.error, RequestCancelled)
    assert str(call.error) == "the request was cancelled"
    assert model.totals == (0, 1, 0)
    model.check_idle()


def test_tokens_of_steps_that_were_sent_before_a_cancel_are_dropped(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=1).request()
    call = model.submit(request)
    model.advance(0)
    model.engine.cancel(request.id)
    assert len(model.results) == 1
    model.run()
    assert call.read_all() == []
    assert isinstance(call.error, RequestCancelled)
    assert request.choices[0].sequence.generated_tokens == ()
    assert model.totals == (0, 1, 0)
    model.check_idle()


def test_a_cancel_after_the_finish_finds_nothing(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=1).request()
    call = model.submit(request)
    model.run_step()
    with pytest.raises(RequestNotFound):
        model.engine.cancel(request.id)
    check_whole(call, RequestCase(max_tokens=1))
    assert (ended_as(request), model.totals) == (FINISHED, (1, 0, 0))


@pytest.mark.parametrize("keep_s", [None, 60.0])
@pytest.mark.parametrize("is_serving", [True, False])
def test_an_explicit_cancel_ends_a_request_once_under_any_disconnect_policy(
    new_model: NewModel, keep_s: float | None, is_serving: bool
) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9, keep_s=keep_s).request()
    call = model.submit(request)
    model.run_step()
    if not is_serving:
        model.stop()
    model.engine.cancel(request.id)
    call.close()
    assert (ended_as(request), model.totals) == (CANCELLED, (0, 1, 0))
    if keep_s is not None:
        model.engine.cancel(request.id)
    with pytest.raises(RequestNotFound):
        model.engine.cancel(request.id)
    assert model.totals == (0, 1, 0)
    model.run()
    model.check_idle()


def test_a_preempted_request_is_cancelled_once_and_the_queue_forgets_it(new_model: NewModel) -> None:
    model = new_model(num_blocks=4)
    first, second = (
        RequestCase(prompt=(number,) * 7, max_tokens=8).request(arrival=number) for number in (0, 1)
    )
    calls = [model.submit(request) for request in (first, second)]
    while second.choices[0].sequence.state is not SequenceState.PREEMPTED:
        assert model.run_step()
    model.engine.cancel(second.id)
    assert model.engine.scheduler.queue == ()
    model.run()
    check_whole(calls[0], RequestCase(prompt=(0,) * 7, max_tokens=8))
    calls[1].read_all()
    assert isinstance(calls[1].error, RequestCancelled)
    assert model.totals == (1, 1, 0)
    model.check_idle()


def test_a_disconnect_cancels_unless_detached(new_model: NewModel) -> None:
    model = new_model()
    kept, dropped = (
        RequestCase(max_tokens=9, keep_s=60.0).request(),
        RequestCase(max_tokens=9).request(arrival=1),
    )
    for request in (kept, dropped):
        model.submit(request).close()
    assert (kept.is_live, kept.is_detached) == (True, True)
    assert (ended_as(dropped), str(dropped.error)) == (CANCELLED, "the client disconnected")
    model.run()
    assert model.totals == (1, 1, 0)


def test_an_end_before_the_disconnect_is_not_counted_as_cancelled(new_model: NewModel) -> None:
    model = new_model()
    call = model.submit(RequestCase(max_tokens=1).request())
    model.run()
    call.close()
    assert model.totals == (1, 0, 0)


# Deadlines


def test_a_call_that_ends_at_its_deadline_ends_the_request_for_that_reason(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9, keep_s=60.0).request()
    call = model.submit(request, deadline_s=model.now_s + 5)
    model.now_s += 4.99  # gRPC's timer and the engine's clock can differ by a millisecond
    call.close()
    assert isinstance(request.error, DeadlinePassed)
    assert (ended_as(request), model.totals) == (CANCELLED, (0, 1, 0))


def test_a_detached_request_is_cancelled_at_its_deadline(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9, keep_s=60.0).request()
    model.submit(request, deadline_s=model.now_s + 5).close()
    model.engine.sweep()
    assert request.is_live
    model.now_s += 5
    model.engine.sweep()
    assert isinstance(request.error, DeadlinePassed)
    model.run()
    assert model.totals == (0, 1, 0)
    model.check_idle()


@pytest.mark.parametrize("deadline_s", [None, 2000.0])
def test_the_deadline_of_an_attaching_call_replaces_the_previous_one(
    new_model: NewModel, deadline_s: float | None
) -> None:
    model = new_model()
    request = RequestCase(max_tokens=9, keep_s=60.0).request()
    model.submit(request, deadline_s=model.now_s + 5)
    model.attach(request.id, deadline_s=deadline_s).close()
    model.now_s += 6
    model.engine.sweep()
    assert request.is_live
    assert request.deadline_s == deadline_s


# Slow readers


def test_a_slow_reader_is_cancelled_with_the_numbers_and_delays_no_other(new_model: NewModel) -> None:
    model = new_model(admission=AdmissionLimits(queue_size=8, max_unread_tokens=5))
    slow, fast = RequestCase(max_tokens=20), RequestCase(prompt=(4, 4), max_tokens=20)
    slow_call = model.submit(slow.request())
    fast_call = model.submit(fast.request(arrival=1))
    while model.run_step():
        fast_call.read_all()
    check_whole(fast_call, fast)
    # Earlier output is still delivered.
    slow_call.read_all()
    assert slow_call.tokens() == solo(slow).tokens[:6]
    assert isinstance(slow_call.error, RequestCancelled)
    assert str(slow_call.error) == "the client reads too slowly: 6 tokens are unread, the limit is 5"
    assert model.totals == (1, 1, 0)
    model.check_idle()


def test_occasional_readers_and_detached_requests_are_not_slow(new_model: NewModel) -> None:
    model = new_model(admission=AdmissionLimits(queue_size=8, max_unread_tokens=5), limits=ONE_AT_A_TIME)
    reads, detached = RequestCase(max_tokens=20), RequestCase(max_tokens=20, keep_s=60.0)
    call = model.submit(reads.request())
    request = detached.request(arrival=1)
    model.submit(request).close()
    while all(model.run_step() for _ in range(5)):
        call.read()
    check_whole(call, reads)
    check_whole(model.attach(request.id), detached)


def test_a_backlog_does_not_count_against_an_attaching_reader(new_model: NewModel) -> None:
    model = new_model(admission=AdmissionLimits(queue_size=8, max_unread_tokens=5), limits=ONE_AT_A_TIME)
    case = RequestCase(max_tokens=30, keep_s=60.0)
    request = case.request()
    model.submit(request).close()
    for _ in range(20):
        model.run_step()
    call = model.attach(request.id)
    for _ in range(5):
        model.run_step()
    assert request.is_live
    call.read_all()
    model.run()
    call.read_all()
    assert call.error is None
    check_whole(call, case)


# The sweeper


def test_an_orphaned_request_is_counted_and_ended(
    new_model: NewModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model()
    orphan, watched = RequestCase(max_tokens=9, n=2).request(), RequestCase(max_tokens=9).request(arrival=1)
    detached = RequestCase(max_tokens=9, keep_s=60.0).request(arrival=2)
    for request in (orphan, watched, detached):
        model.submit(request)
    model.attach(detached.id).close()
    model.run_step()
    model.engine.sweep()
    assert model.engine.totals.orphaned == 0
    # No event causes this: it stands for a defect, which the sweeper repairs.
    orphan.stream = None
    model.engine.sweep()
    assert model.engine.totals.orphaned == 1
    assert "cancelled orphan" in caplog.text
    assert (ended_as(orphan), model.totals) == (CANCELLED, (0, 1, 0))
    assert {sequence.key.request_id for sequence in model.engine.live_sequences} == {watched.id, detached.id}
    model.run()
    assert model.totals == (2, 1, 0)
    assert model.kv.num_active == 0
    model.engine.sweep()
    assert model.engine.totals.orphaned == 1


@pytest.mark.parametrize("is_running", [True, False])
def test_a_sequence_without_a_request_is_counted_and_its_pages_are_freed(
    new_model: NewModel, is_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model()
    if not is_running:
        model.stop()
    request = RequestCase(max_tokens=9).request()
    model.engine.scheduler.add(request.choices[0].sequence)
    model.engine.sweep()
    assert model.engine.totals.orphaned == 1
    assert str(request.choices[0].sequence.key) in caplog.text
    assert request.choices[0].sequence.state is CANCELLED
    model.run()
    assert (model.engine.scheduler.queue, model.engine.scheduler.running) == ((), ())
    if is_running:
        assert model.kv.num_active == 0
        model.stages[0].check_idle()
