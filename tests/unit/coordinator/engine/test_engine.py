"""Every request ends once, in the right state, and releases all its resources."""

from __future__ import annotations

import pytest

from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.request import Request
from coordinator.scheduler.in_flight import ResultMismatch
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import FinishReason, SequenceState
from tests.unit.coordinator.engine.conftest import NewModel
from tests.unit.coordinator.engine.engine_model import Call, EngineModel, check_whole, ended_as
from tests.unit.coordinator.engine.request_cases import RequestCase, solo
from wire.errors import (
    ClusterUnavailable,
    Overloaded,
    RequestExists,
    RequestNotFound,
    SliceFailed,
    StepFailed,
)
from wire.ids import SequenceKey, new_request_id
from wire.steps import EndRecord, StepResult

FAILED = SequenceState.FAILED
ONE_AT_A_TIME = SchedulerLimits(max_step_tokens=16, max_step_sequences=8, max_steps_in_flight=1)


# End to end


@pytest.mark.parametrize(
    "case",
    [
        RequestCase(max_tokens=9),
        RequestCase(max_tokens=0),
        RequestCase(max_tokens=0, echo=True),
        RequestCase(max_tokens=9, n=3, echo=True),
        RequestCase(max_tokens=30, stop_token_ids=frozenset({solo(RequestCase(max_tokens=9)).tokens[-1]})),
        RequestCase(prompt=tuple(range(7)) * 5, n=2, echo=True, logprobs=3, prompt_logprobs=1),
    ],
)
def test_a_request_gets_the_tokens_of_its_solo_run(new_model: NewModel, case: RequestCase) -> None:
    model = new_model(num_stages=2)
    call = model.submit(case.request())
    model.run()
    check_whole(call, case)
    assert model.totals == (1, 0, 0)
    model.check_idle()


def test_choices_share_the_full_blocks_of_the_prompt(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(prompt=(*range(7), 0, 1), n=3).request()
    model.submit(request)
    assert model.kv.num_active == 2 + 3
    assert [choice.sequence.num_cached_tokens for choice in request.choices] == [0, 8, 8]


# Choices


def test_a_failed_choice_ends_its_request_alone(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    bad, good = (
        RequestCase(prompt=(1,) * 9, n=3, max_tokens=9),
        RequestCase(prompt=(1,) * 9, n=2, max_tokens=9),
    )
    request = bad.request()
    bad_call, good_call = model.submit(request), model.submit(good.request(arrival=1))
    for _ in range(4):
        model.run_step()
    model.error_at = lambda part: part.sequence == SequenceKey(request.id, 1)
    model.run()
    bad_call.read_all()
    assert isinstance(bad_call.error, SliceFailed)
    assert str(bad_call.error) == "stage 1, step 5: made up"
    assert [choice.sequence.state for choice in request.choices] == [FAILED] * 3
    assert 0 < len(bad_call.tokens(0)) < 9
    assert bad_call.tokens(0) == solo(bad, 0).tokens[: len(bad_call.tokens(0))]
    check_whole(good_call, good)
    assert model.totals == (1, 0, 1)
    model.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_choice_that_fails_as_another_finishes_fails_the_request(new_model: NewModel, failing: int) -> None:
    model = new_model()
    request = RequestCase(n=2, max_tokens=1).request()
    call = model.submit(request)
    model.error_at = lambda part: part.sequence.choice == failing
    model.run()
    call.read_all()
    assert isinstance(call.error, SliceFailed)
    assert model.totals == (0, 0, 1)
    model.check_idle()


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_choices_that_finish_in_one_step_are_all_delivered(new_model: NewModel, max_tokens: int) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(n=3, max_tokens=max_tokens)
    call = model.submit(case.request())
    model.run()
    check_whole(call, case)
    assert model.totals == (1, 0, 0)
    model.check_idle()


def test_a_request_is_finished_with_its_last_choice(new_model: NewModel) -> None:
    model = new_model(limits=ONE_AT_A_TIME)
    case = RequestCase(n=4, max_tokens=12, stop_token_ids=frozenset({2, 5}))
    lengths = [len(solo(case, choice).tokens) for choice in range(4)]
    assert len(set(lengths)) > 1
    request = case.request()
    call = model.submit(request)
    while request.is_live:
        assert model.totals == (0, 0, 0)
        assert any(choice.sequence.state.is_live for choice in request.choices)
        assert model.run_step()
    check_whole(call, case)
    model.run()
    assert model.totals == (1, 0, 0)
    model.check_idle()


# Stop strings

LAST_IS_NEW = (6, 5)
"""A prompt whose sixth generated token is none of the first five."""


def test_the_sixth_token_is_new() -> None:
    tokens = solo(RequestCase(prompt=LAST_IS_NEW, max_tokens=6)).tokens
    assert tokens.index(tokens[-1]) == 5


def stopped_by(new_model: NewModel, case: RequestCase) -> tuple[EngineModel, Request, Call]:
    model = new_model()
    request = case.request()
    call = model.submit(request)
    model.run()
    check_whole(call, case)
    model.check_idle()
    return model, request, call


def test_a_stop_string_ends_the_request_and_no_part_of_it_is_sent(new_model: NewModel) -> None:
    plain = solo(RequestCase(max_tokens=20))
    case = RequestCase(max_tokens=20, stops=(plain.text[5:8],))
    at = plain.text.index(case.stops[0])
    model, request, call = stopped_by(new_model, case)
    assert call.text() == plain.text[:at]
    assert call.tokens() == plain.tokens[: at + 3]
    # The tokens that came too late are dropped, and one end record is sent.
    assert request.choices[0].sequence.generated_tokens == call.tokens()
    assert [end for step in model.sent for end in step.ends] == [EndRecord(SequenceKey(request.id, 0), 0)]
    assert model.totals == (1, 0, 0)


@pytest.mark.parametrize("length", [1, 2])
def test_a_stop_string_that_the_last_token_completes_is_why_it_stops(
    new_model: NewModel, length: int
) -> None:
    plain = solo(RequestCase(prompt=LAST_IS_NEW, max_tokens=6))
    end = plain.text[-length:]
    _, request, call = stopped_by(new_model, RequestCase(prompt=LAST_IS_NEW, max_tokens=6, stops=(end,)))
    assert request.choices[0].buffer.finish_reason is FinishReason.STOP
    assert (call.tokens(), call.text()) == (plain.tokens, plain.text[:-length])


def test_a_stop_string_in_the_token_that_also_ends_the_sequence_ends_it_once(new_model: NewModel) -> None:
    plain = solo(RequestCase(prompt=LAST_IS_NEW, max_tokens=6))
    stops, stop_token_ids = (plain.text[-2:],), frozenset({plain.tokens[-1]})
    case = RequestCase(prompt=LAST_IS_NEW, max_tokens=20, stops=stops, stop_token_ids=stop_token_ids)
    _, _, call = stopped_by(new_model, case)
    assert (call.tokens(), call.text()) == (plain.tokens, plain.text[:-2])


def test_a_partial_stop_string_is_delivered_at_the_end(new_model: NewModel) -> None:
    plain = solo(RequestCase(max_tokens=6))
    case = RequestCase(max_tokens=6, stops=(plain.text[-2:] + "z",))
    _, request, call = stopped_by(new_model, case)
    assert request.choices[0].buffer.finish_reason is FinishReason.LENGTH
    assert call.text() == plain.text


# Ids


def test_the_id_of_a_live_or_kept_request_is_taken_until_it_is_forgotten(new_model: NewModel) -> None:
    model = new_model()
    request = RequestCase(max_tokens=1, keep_s=5.0).request()
    again = RequestCase(max_tokens=1).request(request_id=request.id)
    call = model.submit(request)
    with pytest.raises(RequestExists, match="is already live"):
        model.submit(again)
    model.run()
    with pytest.raises(RequestExists, match="output is kept"):
        model.submit(again)
    call.close()
    model.now_s += 5
    model.engine.sweep()
    second = model.submit(again)
    assert model.sent[-1].starts[0].restart_count == 1
    model.run()
    check_whole(second, RequestCase(max_tokens=1))
    assert model.totals == (2, 0, 0)
    model.check_idle()


def test_a_full_queue_rejects_without_leftovers(new_model: NewModel) -> None:
    model = new_model(admission=AdmissionLimits(queue_size=1))
    model.stop()
    model.submit(RequestCase(max_tokens=1).request())
    refused = RequestCase(max_tokens=1).request(arrival=1)
    with pytest.raises(Overloaded, match="1 sequences are waiting, the limit is 1"):
        model.submit(refused)
    with pytest.raises(RequestNotFound):
        model.engine.cancel(refused.id)
    model.start(8)
    model.run()
    assert model.totals == (1, 0, 0)
    model.submit(refused)


# Epochs


def test_streams_continue_after_a_lost_pipeline(new_model: NewModel) -> None:
    model = new_model(num_stages=3)
    case = RequestCase(prompt=(3,) * 9, n=2, max_tokens=12, echo=True, logprobs=2, prompt_logprobs=1)
    call = model.submit(case.request())
    for _ in range(5):
        model.run_step()
        call.read_all()
        model.advance(0)
        model.stop()
        assert call.read_all() == []
        model.start(64)
    model.run()
    check_whole(call, case)
    assert [choice.sequence.num_restarts for choice in call.stream.request.choices] == [5, 5]
    model.check_idle()


def test_a_request_too_large_for_a_smaller_plan_fails_alone(new_model: NewModel) -> None:
    model = new_model(num_blocks=8)
    large = RequestCase(prompt=(1,) * 20, max_tokens=12, n=2).request()
    small = RequestCase(max_tokens=5).request(arrival=1)
    large_call = model.submit(large)
    model.submit(small)
    model.stop()
    sent = len(model.sent)
    model.start(4)
    parts = [part.sequence for step in model.sent[sent:] for part in step.slices]
    assert parts == [small.choices[0].sequence.key]
    assert model.engine.live_sequences == [small.choices[0].sequence]
    large_call.read_all()
    assert isinstance(large_call.error, ClusterUnavailable)
    assert "request may need 32 tokens, the limit of the current plan is 16" in str(large_call.error)
    assert (ended_as(large), model.totals) == (FAILED, (0, 0, 1))


def test_a_request_that_was_made_ready_under_a_larger_plan_does_not_enter_the_queue(
    new_model: NewModel,
) -> None:
    """The plan changed while its prompt was tokenized or decoded."""
    model = new_model(num_blocks=4)
    large = RequestCase(prompt=(1,) * 20, max_tokens=12).request()
    with pytest.raises(ClusterUnavailable, match=r"may need 32 tokens, .* current plan is 16"):
        model.submit(large)
    with pytest.raises(RequestNotFound):
        model.engine.cancel(large.id)
    model.stop()
    # The next plan is not known yet.
    call = model.submit(large)
    model.start(8)
    model.run()
    call.read_all()
    assert call.error is None
    assert model.totals == (1, 0, 0)


def test_a_request_that_fits_exactly_is_kept(new_model: NewModel) -> None:
    model = new_model(num_blocks=8)
    request = RequestCase(prompt=(1,) * 10, max_tokens=6).request()
    model.submit(request)
    model.stop()
    model.start(4)
    assert model.engine.live_sequences == [request.choices[0].sequence]


def test_only_requests_of_a_faulty_step_are_retried(new_model: NewModel) -> None:
    model = new_model(num_blocks=8, limits=ONE_AT_A_TIME)
    in_step = RequestCase(prompt=(1,) * 14, max_tokens=9).request()
    named = RequestCase(max_tokens=9).request(arrival=1)
    queued = RequestCase(prompt=(1,) * 20, max_tokens=9).request(arrival=2)
    for request in (in_step, named, queued):
        model.submit(request)
    assert model.sent[-1].request_ids == (in_step.id,)
    model.fault(model.sent[-1].step_id, request_ids=(queued.id, new_request_id()))
    # The report can name any request; one that computes nothing is not in a step.
    assert [sequence.failures.num_faults for sequence in (in_step, named, queued)] == [1, 0, 0]
    model.start(8)
    model.run()
    assert model.totals == (3, 0, 0)
    model.check_idle()


def test_the_third_faulty_step_fails_a_request_and_not_its_successors(new_model: NewModel) -> None:
    model = new_model(num_stages=2, limits=ONE_AT_A_TIME)
    case, other = RequestCase(prompt=(1,) * 9, max_tokens=9, n=2), RequestCase(max_tokens=6)
    request = case.request()
    call = model.submit(request)
    for _ in range(2):
        model.run_step()
        model.fault(model.sent[-1].step_id)
        assert request.is_live
        model.start(64)
    other_call = model.submit(other.request(arrival=1))
    model.run_step()
    model.fault(model.sent[-1].step_id, request_ids=(request.id,))
    assert isinstance(request.error, StepFailed)
    assert str(request.error) == (
        "all 3 steps with this request were rejected; the last: stage 0, step 1: POSITION: "
    )
    assert (ended_as(request), model.totals) == (FAILED, (0, 0, 1))
    assert call.tokens(0) == solo(case, 0).tokens[: len(call.tokens(0))]
    model.start(64)
    model.run()
    check_whole(other_call, other)
    model.check_idle()


def test_all_requests_fail_without_a_pipeline_in_time(new_model: NewModel) -> None:
    model = new_model()
    requests = [RequestCase(max_tokens=9, n=2).request(arrival=number) for number in range(3)]
    calls = [model.submit(request) for request in requests]
    model.run_step()
    model.stop()
    model.engine.fail_all("no stage workers in time")
    for call, request in zip(calls, requests, strict=True):
        call.read_all()
        assert isinstance(call.error, ClusterUnavailable)
        assert ended_as(request) is FAILED
    assert model.totals == (0, 0, 3)
    model.check_idle()


def test_a_result_that_does_not_fit_changes_nothing(new_model: NewModel) -> None:
    model = new_model()
    case = RequestCase(max_tokens=2)
    call = model.submit(case.request())
    model.advance(0)
    with pytest.raises(ResultMismatch):
        model.engine.complete(StepResult.of(model.epoch, 1, model.results[0].results))
    assert call.read_all() == []
    model.run()
    check_whole(call, case)
