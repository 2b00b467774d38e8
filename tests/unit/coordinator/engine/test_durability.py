"""Requests survive coordinator restarts: no token is lost or repeated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.journal import journal as journal_module
from tests.properties import examples
from tests.unit.coordinator.engine.coordinators import GRACE_S, Coordinators
from tests.unit.coordinator.engine.customers import Customer
from tests.unit.coordinator.engine.engine_model import check_whole
from tests.unit.coordinator.engine.request_cases import RequestCase, request_cases
from wire.errors import (
    DeadlinePassed,
    RequestCancelled,
    RequestNotFound,
    RequestSuspended,
)


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[Coordinators]:
    coordinators = Coordinators(tmp_path)
    yield coordinators
    coordinators.close()


@settings(max_examples=examples(0.75))
@given(
    cases=st.lists(request_cases(), min_size=1, max_size=4),
    crashes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans()), min_size=1, max_size=3),
    folds=st.booleans(),
)
def test_clients_get_the_output_of_an_undisturbed_run_after_any_crash(
    cases: list[RequestCase], crashes: list[tuple[int, int, bool]], folds: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if folds:
            patch.setattr(journal_module, "LOG_ROWS", 2)
        world = Coordinators(Path(directory))
        try:
            _serve_across_crashes(world, cases, crashes)
        finally:
            world.close()


def _serve_across_crashes(
    world: Coordinators, cases: list[RequestCase], crashes: list[tuple[int, int, bool]]
) -> None:
    customers = []
    for case in cases:
        call = world.submit(case)
        customers.append(Customer(case, call.stream.request, call, None))
    for num_steps, num_reads, is_orderly in crashes:
        for _ in range(num_steps):
            world.model.run_step()
            world.model.engine.sweep()
        for customer in customers:
            for _ in range(num_reads):
                customer.read(world.now_s)
        if is_orderly:
            world.stop()
        else:
            world.crash()
        for customer in customers:
            if not all(customer.has_last):
                customer.request = world.request(customer.request.id)
                customer.attach(world.model, customer.num_tokens, customer.num_scores, None)
    world.model.run()
    for customer in customers:
        while not all(customer.has_last) and customer.read(world.now_s):
            pass
        assert all(customer.has_last)
    world.model.check_idle()


def test_unread_output_survives_a_crash(coordinators: Coordinators) -> None:
    case = RequestCase(max_tokens=6, n=2, logprobs=2, prompt_logprobs=1)
    request_id = coordinators.submit(case).stream.request.id
    coordinators.model.run()
    coordinators.crash()
    assert not coordinators.request(request_id).is_live
    check_whole(coordinators.model.attach(request_id), case)


def test_a_finished_request_is_kept_for_reattaching_and_then_forgotten(
    coordinators: Coordinators,
) -> None:
    read = coordinators.submit(RequestCase(max_tokens=2)).stream.request.id
    unread = coordinators.submit(RequestCase(max_tokens=2)).stream.request.id
    coordinators.model.run()
    coordinators.crash()
    coordinators.model.attach(read).read_all()
    coordinators.pass_time(1.0)
    with pytest.raises(RequestNotFound):
        coordinators.request(read)
    assert coordinators.request(unread)
    coordinators.pass_time(GRACE_S)
    with pytest.raises(RequestNotFound):
        coordinators.request(unread)
    assert coordinators.journal.ids == []


def test_without_a_crash_finished_requests_leave_the_journal_after_a_while(
    coordinators: Coordinators,
) -> None:
    call = coordinators.submit(RequestCase(max_tokens=2))
    coordinators.model.run()
    call.read_all()
    coordinators.pass_time(GRACE_S - 1)
    assert coordinators.journal.ids == [call.stream.request.id]
    coordinators.pass_time(1)
    assert coordinators.journal.ids == []


def test_a_request_whose_client_does_not_reattach_is_cancelled(
    coordinators: Coordinators,
) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=9)).stream.request.id
    coordinators.crash()
    coordinators.pass_time(GRACE_S - 1)
    request = coordinators.request(request_id)
    assert request.is_live
    assert request.is_detached
    coordinators.pass_time(1)
    assert isinstance(request.error, RequestCancelled)
    assert coordinators.model.engine.totals.orphaned == 0
    coordinators.model.run()
    coordinators.model.check_idle()


def test_a_disconnect_after_reattaching_cancels(coordinators: Coordinators) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=9)).stream.request.id
    coordinators.crash()
    coordinators.model.attach(request_id).close()
    coordinators.pass_time(0)
    with pytest.raises(RequestNotFound):
        coordinators.request(request_id)
    coordinators.crash()
    with pytest.raises(RequestNotFound):
        coordinators.request(request_id)


def test_a_detached_request_is_kept_for_the_requested_time(coordinators: Coordinators) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=3, keep_s=500.0)).stream.request.id
    coordinators.crash()
    coordinators.model.run()
    coordinators.pass_time(GRACE_S + 1)
    coordinators.crash()
    coordinators.pass_time(499)
    assert coordinators.request(request_id)
    coordinators.pass_time(2)
    with pytest.raises(RequestNotFound):
        coordinators.request(request_id)


@pytest.mark.parametrize("keep_s", [None, 500.0])
def test_a_cancelled_request_stays_cancelled(coordinators: Coordinators, keep_s: float | None) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=9, keep_s=keep_s)).stream.request.id
    coordinators.model.run_step()
    coordinators.model.engine.cancel(request_id)
    coordinators.crash()
    assert not coordinators.model.engine.registry.live
    if keep_s is not None:
        call = coordinators.model.attach(request_id)
        call.read_all()
        assert isinstance(call.error, RequestCancelled)
        assert str(call.error) == "the request was cancelled"


def test_the_deadline_of_the_last_call_applies_after_a_restart(
    coordinators: Coordinators,
) -> None:
    late, early = (
        coordinators.submit(RequestCase(max_tokens=9, keep_s=5.0), deadline_s=1010.0).stream.request.id
        for _ in range(2)
    )
    coordinators.model.attach(late, deadline_s=1100.0)
    coordinators.crash()
    coordinators.pass_time(50)
    assert isinstance(coordinators.request(early).error, DeadlinePassed)
    assert coordinators.request(late).is_live


def test_the_queue_order_survives_a_restart(coordinators: Coordinators) -> None:
    ids = [
        coordinators.submit(RequestCase(prompt=(1,) * 9, max_tokens=9)).stream.request.id for _ in range(12)
    ]
    coordinators.model.run_step()
    coordinators.crash()
    assert [request.id for request in coordinators.model.engine.registry.live] == ids
    started = [sequence.key.request_id for sequence in coordinators.model.engine.scheduler.running]
    assert started == ids[: len(started)]


def test_a_restart_is_counted_and_cached_tokens_are_kept(
    coordinators: Coordinators,
) -> None:
    case = RequestCase(prompt=(1,) * 9, max_tokens=9)
    coordinators.submit(case)
    coordinators.model.run()
    request_id = coordinators.submit(case).stream.request.id
    coordinators.model.run_step()
    coordinators.model.run_step()
    before = coordinators.request(request_id).choices[0].sequence
    assert before.num_cached_tokens == 8
    assert 0 < before.num_generated_tokens < 4
    for num_restarts in (1, 2):
        coordinators.crash()
        sequence = coordinators.request(request_id).choices[0].sequence
        assert (sequence.num_restarts, sequence.num_cached_tokens) == (num_restarts, 8)
        coordinators.model.run_step()
    coordinators.model.run()
    assert sequence.num_restarts == 2


def test_readers_get_a_reattach_hint_when_the_coordinator_stops(coordinators: Coordinators) -> None:
    case = RequestCase(max_tokens=9)
    call = coordinators.submit(case)
    for _ in range(3):
        coordinators.model.run_step()
    engine = coordinators.model.engine
    engine.suspend()
    call.read_all()
    assert isinstance(call.error, RequestSuspended)
    assert len(call.tokens()) == 3
    with pytest.raises(RequestSuspended):
        coordinators.model.attach(call.stream.request.id)
    with pytest.raises(RequestSuspended):
        coordinators.submit(RequestCase())
