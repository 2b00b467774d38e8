"""After a worker loss, suspects run alone; only a request that crashes workers repeatedly fails."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from coordinator.engine.request import Request
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.sequence import SequenceState
from tests.unit.coordinator.engine.conftest import NewModel
from tests.unit.coordinator.engine.engine_model import Call, EngineModel, check_whole, ended_as
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import RequestPoisoned, StepFailed, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.steps import Step


def case_of(number: int, *, n: int = 1) -> RequestCase:
    """Some differ in length and begin alike."""
    return RequestCase(prompt=(number % 3,) * (3 + number % 7), max_tokens=4 + number % 5, n=n)


def submit_all(model: EngineModel, cases: list[RequestCase]) -> tuple[list[Request], list[Call]]:
    requests = [case.request(arrival=arrival) for arrival, case in enumerate(cases)]
    return requests, [model.submit(request) for request in requests]


def run_to(model: EngineModel, kills: Callable[[Step], bool], *, most_deaths: int) -> int:
    """Runs until idle; workers crash on steps that kill. Returns the number of crashes."""
    num_deaths = 0
    for _ in range(20_000):
        stage = next((i for i in reversed(range(len(model.queues))) if model.queues[i]), None)
        if model.deliver():
            check_isolation(model)
        elif stage is None:
            return num_deaths
        elif kills(model.queues[stage][0]):
            num_deaths += 1
            assert num_deaths <= most_deaths, "the cluster goes round in circles"
            model.die()
            model.start(64)
            check_isolation(model)
        else:
            model.advance(stage)
    raise AssertionError("the steps do not end")


def check_isolation(model: EngineModel) -> None:
    """Only suspects run, and an isolated suspect runs alone."""
    scheduler = model.engine.scheduler
    if scheduler.isolation.is_active:
        assert scheduler.isolation.others(scheduler.running) == []
    if (alone := scheduler.isolated_sequence) is not None:
        assert scheduler.running == (alone,)
        keys = {part.sequence for queue in model.queues for step in queue for part in step.slices}
        assert keys <= {alone.key}, "another sequence is still computed"


def killing(request_id: RequestId) -> Callable[[Step], bool]:
    return lambda step: any(part.sequence.request_id == request_id for part in step.slices)


# Poison


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize(("poisonous", "most_deaths"), [(0, 3), (7, 4), (15, 4)])
def test_of_sixteen_requests_only_the_one_that_kills_workers_fails(
    new_model: NewModel, num_stages: int, poisonous: int, most_deaths: int
) -> None:
    """The first crash is in a mixed step, the second in a group of suspects."""
    model = new_model(num_stages=num_stages)
    cases = [case_of(number) for number in range(16)]
    requests, calls = submit_all(model, cases)
    bad = requests[poisonous]
    num_deaths = run_to(model, killing(bad.id), most_deaths=most_deaths)
    assert num_deaths == most_deaths
    assert isinstance(bad.error, RequestPoisoned)
    assert str(bad.error) == ("2 workers were lost while this request alone ran; the last: worker b is lost")
    assert ended_as(bad) is SequenceState.FAILED
    for number, (call, case) in enumerate(zip(calls, cases, strict=True)):
        if number != poisonous:
            check_whole(call, case)
    assert model.totals == (15, 0, 1)
    model.check_idle()


def test_a_request_with_choices_that_kills_late_fails_alone(new_model: NewModel) -> None:
    """One of its choices kills, at its third token."""
    model = new_model(num_stages=2)
    cases = [case_of(number, n=1 + number % 3) for number in range(8)]
    requests, calls = submit_all(model, cases)
    bad = requests[5]

    def kills(step: Step) -> bool:
        keys = [part.sequence for part in step.slices]
        return any(
            key.request_id == bad.id and key.choice == 1 and bad.choices[1].sequence.num_generated_tokens >= 2
            for key in keys
        )

    assert run_to(model, kills, most_deaths=4) == 4
    assert isinstance(bad.error, RequestPoisoned)
    for call, case, request in zip(calls, cases, requests, strict=True):
        if request is not bad:
            check_whole(call, case)
    model.check_idle()


@pytest.mark.parametrize("seed", range(10))
def test_random_worker_failures_fail_no_request(new_model: NewModel, seed: int) -> None:
    """A token between two crashes proves that the request is not the cause."""
    chance = random.Random(seed)
    model = new_model(num_stages=2)
    cases = [case_of(number, n=1 + number % 2) for number in range(16)]
    requests, calls = submit_all(model, cases)
    last_tokens: dict[SequenceKey, int] = {}

    def kills(step: Step) -> bool:
        alone = model.engine.scheduler.isolated_sequence
        if chance.random() > 0.2:
            return False
        if alone is not None:
            # Two crashes at the same token would not be random.
            if last_tokens.get(alone.key) == alone.num_tokens:
                return False
            last_tokens[alone.key] = alone.num_tokens
        return True

    assert run_to(model, kills, most_deaths=1000) > 5
    assert [request.error for request in requests] == [None] * 16
    for call, case in zip(calls, cases, strict=True):
        check_whole(call, case)
    model.check_idle()


# Suspects


def test_suspects_run_one_at_a_time_before_new_requests(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    cases = [RequestCase(prompt=(number,) * 5, max_tokens=6) for number in range(3)]
    requests, calls = submit_all(model, cases[:2])
    model.run_step()
    model.die()
    late = cases[2].request(arrival=9)
    calls.append(model.submit(late))
    model.start(64)
    scheduler = model.engine.scheduler
    for request in requests:
        sequence = request.choices[0].sequence
        assert scheduler.isolated_sequence is sequence
        assert scheduler.running == (sequence,)
        model.run_step()
    assert scheduler.isolated_sequence is None
    assert len(scheduler.running) == 3
    model.run()
    for call, case in zip(calls, cases, strict=True):
        check_whole(call, case)
    model.check_idle()


def test_suspects_run_in_groups_after_one_failure_and_alone_after_two(new_model: NewModel) -> None:
    """Nine suspects run in three groups; those of the crashed group then run alone."""
    model = new_model(num_stages=2)
    cases = [RequestCase(prompt=(number,) * 4, max_tokens=6) for number in range(9)]
    requests, calls = submit_all(model, cases)
    while not all(request.num_generated_tokens for request in requests):
        model.run_step()
    model.die()
    model.start(64)
    scheduler = model.engine.scheduler
    first = [request.choices[0].sequence for request in requests[:3]]
    assert list(scheduler.running) == first
    assert scheduler.isolated_sequence is None
    model.die()
    model.start(64)
    for sequence in first:
        assert scheduler.isolated_sequence is sequence
        model.run_step()
    for turn in (requests[3:6], requests[6:9]):
        assert list(scheduler.running) == [request.choices[0].sequence for request in turn]
        while set(scheduler.running) & {request.choices[0].sequence for request in turn} and (
            scheduler.isolation.is_active
        ):
            model.run_step()
            check_isolation(model)
    model.run()
    assert [request.failures.num_deaths_alone for request in requests] == [0] * 9
    for call, case in zip(calls, cases, strict=True):
        check_whole(call, case)
    model.check_idle()


def test_a_request_is_tried_once_more_for_each_worker_that_was_lost_without_it(new_model: NewModel) -> None:
    """If workers also crash while idle, a crash while it runs alone is weaker evidence."""
    model = new_model()
    (request,), _ = submit_all(model, [case_of(1)])
    model.die()
    for num_alone in range(1, DEFAULT_POLICY.max_deaths_alone + DEFAULT_POLICY.max_unrelated_deaths):
        model.start(64)
        assert model.engine.scheduler.isolated_sequence is request.choices[0].sequence
        model.die()
        for _ in range(3):
            model.attribution.record_unrelated_loss()
        assert (request.error, request.failures.num_deaths_alone) == (None, num_alone)
    model.start(64)
    model.die()
    assert isinstance(request.error, RequestPoisoned), "chance has its limits"


def test_faults_long_ago_are_forgiven(new_model: NewModel) -> None:
    model = new_model()
    case = RequestCase(prompt=(1,) * 3, max_tokens=4 * DEFAULT_POLICY.forgiving_tokens)
    (request,), (call,) = submit_all(model, [case])
    for num_before in range(0, 3 * DEFAULT_POLICY.forgiving_tokens, DEFAULT_POLICY.forgiving_tokens):
        while request.num_generated_tokens < num_before:
            model.run_step()
        model.fault(model.sent[-1].step_id)
        model.start(64)
        assert request.failures.num_faults == 1
    model.run()
    check_whole(call, case)


def test_queued_requests_are_not_suspects(new_model: NewModel) -> None:
    model = new_model(num_blocks=6)
    first, second = RequestCase(prompt=(1,) * 15, max_tokens=3), RequestCase(prompt=(2,) * 15, max_tokens=3)
    _, calls = submit_all(model, [first, second])
    model.die()
    model.start(64)
    model.run_step()
    assert model.engine.scheduler.isolated_sequence is None
    model.run()
    check_whole(calls[0], first)
    check_whole(calls[1], second)


def test_suspects_stay_suspects_when_the_epoch_ends_for_another_reason(new_model: NewModel) -> None:
    model = new_model()
    requests, calls = submit_all(model, [case_of(1), case_of(2)])
    model.run_step()
    model.die()
    for _ in range(2):
        model.start(64)
        assert model.engine.scheduler.isolated_sequence is requests[0].choices[0].sequence
        model.stop()
    assert [request.failures.num_deaths_alone for request in requests] == [0, 0]
    model.start(64)
    model.run()
    check_whole(calls[0], case_of(1))
    check_whole(calls[1], case_of(2))
    model.check_idle()


@pytest.mark.parametrize("runs", [True, False])
def test_a_cancelled_suspect_delays_no_request(new_model: NewModel, runs: bool) -> None:
    """Both a running and a waiting suspect."""
    model = new_model(num_stages=2)
    requests, calls = submit_all(model, [case_of(number) for number in range(3)])
    model.run_step()
    model.die()
    model.start(64)
    cancelled = 0 if runs else 1
    model.engine.cancel(requests[cancelled].id)
    check_isolation(model)
    model.run()
    for number in {0, 1, 2} - {cancelled}:
        check_whole(calls[number], case_of(number))
    model.check_idle()


def test_failures_of_a_cancelled_suspect_do_not_blame_its_successor(new_model: NewModel) -> None:
    """The step that kills is in transit when its client cancels."""
    model = new_model(num_stages=2)
    requests, calls = submit_all(model, [case_of(1), case_of(2)])
    model.run_step()
    for _ in range(2):
        model.die()
        model.start(64)
        assert model.engine.scheduler.isolated_sequence is requests[0].choices[0].sequence
    model.engine.cancel(requests[0].id)
    model.die()
    assert requests[1].failures.num_deaths_alone == 0
    model.start(64)
    model.run()
    check_whole(calls[1], case_of(2))
    model.check_idle()


# Devices


def fail_device(model: EngineModel, *, num_stages: int) -> None:
    model.attribution.record_device_failure("its device failed", num_stages=num_stages)
    model.stop()


def test_devices_of_all_stages_may_fail_under_one_request_that_runs_alone(new_model: NewModel) -> None:
    model = new_model(num_stages=3)
    requests, calls = submit_all(model, [case_of(1), case_of(2)])
    model.run_step()
    fail_device(model, num_stages=3)
    for _ in range(3):
        model.start(64)
        assert model.engine.scheduler.isolated_sequence is requests[0].choices[0].sequence
        fail_device(model, num_stages=3)
    model.start(64)
    model.run()
    check_whole(calls[0], case_of(1))
    check_whole(calls[1], case_of(2))
    model.check_idle()


def test_a_request_with_more_device_failures_than_stages_fails_alone(
    new_model: NewModel,
) -> None:
    model = new_model(num_stages=1)
    requests, calls = submit_all(model, [case_of(1), case_of(2)])
    model.run_step()
    for _ in range(3):
        fail_device(model, num_stages=1)
        model.start(64)
    assert isinstance(requests[0].error, RequestPoisoned)
    assert "2 devices failed while this request alone ran" in str(requests[0].error)
    model.run()
    check_whole(calls[1], case_of(2))
    model.check_idle()


# Faults


@pytest.mark.parametrize("kind", list(StepFaultKind))
def test_the_last_try_after_faults_is_alone(new_model: NewModel, kind: StepFaultKind) -> None:
    model = new_model()
    _, calls = submit_all(model, [case_of(1), case_of(2)])
    for is_alone in (False, True):
        model.run_step()
        all_ids = tuple(request.id for request in model.engine.registry.live)
        model.fault(model.sent[-1].step_id, kind=kind, request_ids=all_ids)
        model.start(64)
        assert (model.engine.scheduler.isolated_sequence is not None) == is_alone
    model.run()
    check_whole(calls[0], case_of(1))
    check_whole(calls[1], case_of(2))


def test_of_sixteen_requests_only_the_one_that_breaks_its_step_fails(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    cases = [case_of(number) for number in range(16)]
    requests, calls = submit_all(model, cases)
    bad, num_faults = requests[3], 0
    is_faulty = killing(bad.id)
    while any(model.queues):
        step = next(queue[0] for queue in reversed(model.queues) if queue)
        if is_faulty(step):
            num_faults += 1
            model.fault(step.step_id, kind=StepFaultKind.NON_FINITE)
            model.start(64)
        else:
            model.run_step()
        check_isolation(model)
    model.run()
    assert num_faults == 3
    assert isinstance(bad.error, StepFailed)
    for call, case, request in zip(calls, cases, requests, strict=True):
        if request is not bad:
            check_whole(call, case)
    model.check_idle()


def test_a_request_alone_in_non_finite_steps_is_retried_beside_others_and_outlives_the_stage(
    new_model: NewModel,
) -> None:
    model = new_model()
    requests, calls = submit_all(model, [case_of(1)])
    for _ in range(DEFAULT_POLICY.max_step_retries):
        model.fault(model.sent[-1].step_id, kind=StepFaultKind.NON_FINITE, request_ids=(requests[0].id,))
        model.start(64)
    assert not model.engine.scheduler.isolation.is_active
    model.stop()
    other = case_of(2).request(arrival=1)
    calls.append(model.submit(other))
    model.start(64)
    both = (requests[0].id, other.id)
    assert tuple(part.sequence.request_id for part in model.sent[-1].slices) == both
    model.fault(
        model.sent[-1].step_id, kind=StepFaultKind.NON_FINITE, request_ids=both, is_worker_avoided=True
    )
    model.start(64)
    model.run()
    check_whole(calls[0], case_of(1))
    check_whole(calls[1], case_of(2))


# Finishing what runs


def test_draining_starts_no_queued_request(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    _, calls = submit_all(model, [case_of(1), case_of(2)])
    model.run_step()
    assert not model.engine.is_idle
    model.stop()
    assert not model.engine.is_idle, "it has started and continues in the next epoch"
    model.start(64)
    model.engine.stop_admitting()
    late = case_of(3).request(arrival=9)
    late_call = model.submit(late)
    model.run()
    for call, case in zip(calls, [case_of(1), case_of(2)], strict=True):
        check_whole(call, case)
    assert model.engine.is_idle
    assert (late.is_live, late.num_queued) == (True, 1)
    model.stop()
    model.start(64, admits_new=False)
    model.run()
    assert late.num_queued, "a new epoch changes nothing of that by itself"
    model.stop()
    model.start(64)
    model.run()
    check_whole(late_call, case_of(3))
    model.check_idle()


def test_draining_finishes_preempted_requests(new_model: NewModel) -> None:
    model = new_model(num_blocks=8)
    cases = [RequestCase(prompt=(number,) * 9, max_tokens=11) for number in range(2)]
    _, calls = submit_all(model, cases)
    while not model.engine.scheduler.counts.num_preemptions:
        assert model.run_step()
    assert [sequence.state for sequence in model.engine.scheduler.queue] == [SequenceState.PREEMPTED]
    model.engine.stop_admitting()
    assert not model.engine.is_idle
    model.run()
    for call, case in zip(calls, cases, strict=True):
        check_whole(call, case)
    assert model.engine.is_idle


# Overdue


def test_the_engine_asks_its_clock_whether_a_step_is_overdue(new_model: NewModel) -> None:
    model = new_model()
    request = case_of(1).request()
    model.submit(request)
    assert model.engine.overdue_step(unknown_s=5.0) is None
    model.now_s += 5.5
    late = model.engine.overdue_step(unknown_s=5.0)
    assert late is not None
    assert (late.step, late.waited_s, late.limit_s) == (model.sent[-1], 5.5, 5.0)
    model.stop()
    assert model.engine.overdue_step(unknown_s=5.0) is None


# Streams that break


def run_over_breaks(model: EngineModel, breaks: Callable[[Step], bool], *, most: int) -> int:
    """Runs until nothing moves; the stream breaks when it is to carry a step that `breaks`. Returns how often
    it broke; from the third time in a row without a token on that is taken for lasting.
    """
    num_breaks = num_in_a_row = 0
    for _ in range(20_000):
        stage = next((i for i in reversed(range(len(model.queues))) if model.queues[i]), None)
        if model.deliver():
            num_in_a_row = 0
        elif stage is None:
            return num_breaks
        elif breaks(model.queues[stage][0]):
            num_breaks, num_in_a_row = num_breaks + 1, num_in_a_row + 1
            assert num_breaks <= most, "the cluster goes round in circles"
            model.attribution.record_break("it broke", is_lasting=num_in_a_row >= 3)
            model.stop()
            model.start(64)
        else:
            model.advance(stage)
    raise AssertionError("the steps do not end")


def test_a_request_that_breaks_every_stream_fails_and_the_others_are_served(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    cases = [case_of(number) for number in range(6)]
    requests, calls = submit_all(model, cases)
    bad = requests[0]
    num_breaks = run_over_breaks(model, killing(bad.id), most=12)
    assert num_breaks >= 3
    assert isinstance(bad.error, StepFailed)
    assert str(bad.error) == "3 streams broke while this request alone ran; the last: it broke"
    for call, case in list(zip(calls, cases, strict=True))[1:]:
        call.read_all()
        check_whole(call, case)
    model.check_idle()


def test_no_request_is_blamed_where_every_stream_breaks(
    new_model: NewModel,
) -> None:
    model = new_model()
    requests, _ = submit_all(model, [case_of(number) for number in range(3)])
    for _ in range(3):
        model.attribution.record_break("it broke", is_lasting=True)
        model.stop()
        model.start(64)
    alone: list[RequestId] = []
    for _ in range(9):
        suspect = model.engine.scheduler.isolated_sequence
        assert suspect is not None
        alone.append(suspect.key.request_id)
        model.attribution.record_break("it broke", is_lasting=True)
        model.stop()
        model.start(64)
    assert all(alone.count(request.id) >= 3 for request in requests)
    assert all(request.error is None for request in requests)
