"""A journal that cannot be written for a while: accepted requests survive it, new ones are rejected."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.coordinator.engine.coordinators import Coordinators
from tests.unit.coordinator.engine.customers import Customer
from tests.unit.coordinator.engine.engine_model import check_whole
from tests.unit.coordinator.engine.request_cases import RequestCase, request_cases
from tests.unit.coordinator.journal.faulty_disk import FULL, FaultyDisk
from wire.errors import JournalUnavailable, RequestCancelled, RequestSuspended, reason_of

ERRORS = (FULL, "disk I/O error", "database is locked", "attempt to write a readonly database")
CASE = RequestCase(max_tokens=9)
EVENTS = ("outage", "recovery", "crash", "loss", "loss during an outage")


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    with pytest.MonkeyPatch.context() as patch:
        yield FaultyDisk(patch)


@pytest.fixture
def coordinators(tmp_path: Path, disk: FaultyDisk) -> Iterator[Coordinators]:
    coordinators = Coordinators(tmp_path)
    yield coordinators
    coordinators.close()


@pytest.mark.parametrize("error", ERRORS)
def test_new_requests_are_rejected_and_running_ones_pause_until_there_is_room(
    coordinators: Coordinators, disk: FaultyDisk, error: str
) -> None:
    calls = [coordinators.submit(CASE) for _ in range(2)]
    coordinators.model.run_step()
    coordinators.model.run_step()
    disk.error = error
    with pytest.raises(JournalUnavailable, match=rf"journal\.db cannot be written: {error}") as refused:
        coordinators.submit(CASE)
    assert reason_of(refused.value) == "JOURNAL_UNAVAILABLE"
    coordinators.model.run()
    assert coordinators.model.engine.scheduler.num_steps_in_flight == 0
    assert all(call.stream.request.is_live for call in calls)
    disk.error = None
    coordinators.recover()
    third = coordinators.submit(CASE)
    coordinators.model.run()
    for call in (*calls, third):
        check_whole(call, CASE)
    coordinators.model.check_idle()


def test_tokens_are_read_only_once_they_are_written(coordinators: Coordinators, disk: FaultyDisk) -> None:
    call = coordinators.submit(CASE)
    coordinators.model.run_step()
    call.read_all()
    num_durable = len(call.tokens())
    assert num_durable > 0
    disk.error = FULL
    coordinators.model.run()
    coordinators.pass_time(1.0)
    call.read_all()
    assert len(call.tokens()) == num_durable
    assert coordinators.durability.num_unwritten == 1
    disk.error = None
    coordinators.recover()
    assert coordinators.durability.num_unwritten == 0
    call.read_all()
    assert len(call.tokens()) == num_durable + 1, "what was computed before the pause"
    coordinators.model.run()
    check_whole(call, CASE)


@pytest.mark.parametrize("recovers", [False, True])
def test_a_crash_during_or_after_an_outage_loses_no_accepted_request(
    coordinators: Coordinators, disk: FaultyDisk, recovers: bool
) -> None:
    request_id = coordinators.submit(CASE).stream.request.id
    coordinators.model.run_step()
    disk.error = FULL
    coordinators.model.run()
    with pytest.raises(JournalUnavailable):
        coordinators.submit(CASE)
    if recovers:
        disk.error = None
        coordinators.recover()
    else:
        coordinators.model.close()
    disk.error = None
    coordinators.crash()
    assert [request.id for request in coordinators.model.engine.registry.live] == [request_id]
    call = coordinators.model.attach(request_id)
    coordinators.model.run()
    check_whole(call, CASE)


def test_requests_survive_a_stop_during_a_journal_outage(
    coordinators: Coordinators, disk: FaultyDisk
) -> None:
    call = coordinators.submit(CASE)
    coordinators.model.run_step()
    disk.error = FULL
    coordinators.model.run()
    coordinators.model.engine.suspend()
    call.read_all()
    assert isinstance(call.error, RequestSuspended)
    disk.error = None
    coordinators.stop()
    again = coordinators.model.attach(call.stream.request.id)
    coordinators.model.run()
    check_whole(again, CASE)


def test_a_cancellation_during_an_outage_is_written_after_it(
    coordinators: Coordinators, disk: FaultyDisk
) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=9, keep_s=500.0)).stream.request.id
    coordinators.model.run_step()
    disk.error = FULL
    coordinators.model.engine.cancel(request_id)
    assert isinstance(coordinators.request(request_id).error, RequestCancelled)
    disk.error = None
    coordinators.recover()
    coordinators.crash()
    assert isinstance(coordinators.request(request_id).error, RequestCancelled)


def test_pending_writes_stay_bounded_however_often_clients_attach(
    coordinators: Coordinators, disk: FaultyDisk
) -> None:
    request_id = coordinators.submit(RequestCase(max_tokens=9, keep_s=500.0)).stream.request.id
    coordinators.model.run_step()
    disk.error = FULL
    for number in range(100):
        coordinators.model.attach(request_id, deadline_s=2000.0 + number).abandon()
        coordinators.model.run()
    assert coordinators.durability.num_unwritten <= 2, "the last deadline, and the step that was in flight"
    disk.error = None
    coordinators.recover()
    coordinators.crash()
    assert coordinators.request(request_id).deadline_s == 2099.0


def test_observers_are_notified_when_an_outage_begins_and_ends(
    coordinators: Coordinators, disk: FaultyDisk
) -> None:
    seen: list[str | None] = []
    coordinators.durability.on_change = lambda: seen.append(coordinators.durability.failure)
    disk.error = FULL
    with pytest.raises(JournalUnavailable):
        coordinators.submit(CASE)
    disk.error = None
    coordinators.recover()
    assert [failure is None for failure in seen] == [False, True]


@settings(max_examples=examples(0.4))
@given(
    cases=st.lists(request_cases(), min_size=1, max_size=4),
    script=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.sampled_from(EVENTS)),
        min_size=1,
        max_size=6,
    ),
)
def test_clients_get_the_output_of_an_undisturbed_run_under_any_disk_fault(
    cases: list[RequestCase], script: list[tuple[int, int, str]]
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        disk = FaultyDisk(patch)
        world = Coordinators(Path(directory))
        try:
            _serve_across_outages(world, disk, cases, script)
        finally:
            world.close()


def _serve_across_outages(
    world: Coordinators, disk: FaultyDisk, cases: list[RequestCase], script: list[tuple[int, int, str]]
) -> None:
    customers = []
    for case in cases:
        call = world.submit(case)
        customers.append(Customer(case, call.stream.request, call, None))
    for num_steps, num_reads, event in script:
        for _ in range(num_steps):
            world.model.run_step()
            world.model.engine.sweep()
        for customer in customers:
            for _ in range(num_reads):
                customer.read(world.now_s)
        disk.error = FULL if "outage" in event else None
        if "loss" in event:
            world.model.stop()
            world.model.start(64)
        if event == "recovery":
            world.recover()
        elif event == "crash":
            world.crash()
            for customer in customers:
                if not all(customer.has_last):
                    customer.request = world.request(customer.request.id)
                    customer.attach(world.model, customer.num_tokens, customer.num_scores, None)
    disk.error = None
    world.recover()
    world.model.run()
    for customer in customers:
        while not all(customer.has_last) and customer.read(world.now_s):
            pass
        assert all(customer.has_last)
    world.model.check_idle()
