"""How long requests wait without progress, and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.cluster.availability import Availability
from coordinator.engine.durability import Durability
from coordinator.engine.request import Request
from coordinator.recovery.policy import RecoveryPolicy
from stageline_rpc.v1 import cluster_pb2
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver
from tests.unit.coordinator.engine.engine_model import EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import ClusterUnavailable

TIMEOUT_S = 30.0


class Waiting:
    """A cluster of two stages with its engine, on a manual clock."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.cluster = ClusterDriver(num_stages=2).serving()
        policy = replace(RecoveryPolicy(), recovery_timeout_s=TIMEOUT_S)
        self.reported: list[bool] = []
        self.availability = Availability(self.cluster.state, model.engine, policy, self.reported.append)
        self.availability.begin()

    def submit(self) -> Request:
        request = RequestCase(prompt=(1, 2, 3), max_tokens=8).request(arrival=0)
        self.model.submit(request)
        return request

    def break_epoch(self) -> None:
        """The present epoch breaks; the next one has not started."""
        self.cluster.state.epoch_failed(self.cluster.state.epoch, "the connection to stage 0 broke")
        if self.model.is_serving:
            self.model.stop()
        self.availability.end()
        self.availability.limit_waiting()

    def lose_worker(self) -> None:
        self.cluster.lose("a", "its stream broke")
        self.model.stop()
        self.availability.end()
        self.availability.limit_waiting()

    def serve_again(self) -> None:
        self.cluster.get_ready()
        self.model.start(64)
        self.availability.begin()

    def pass_s(self, seconds: float) -> None:
        self.model.now_s += seconds
        self.availability.tick()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    model = EngineModel()
    yield Waiting(model)
    model.close()


def test_epochs_that_break_do_not_prolong_the_wait(waiting: Waiting) -> None:
    request = waiting.submit()
    waiting.break_epoch()
    for _ in range(7):
        waiting.pass_s(4.0)
        assert request.error is None
        waiting.serve_again()
        waiting.break_epoch()
    waiting.pass_s(4.0)
    assert isinstance(request.error, ClusterUnavailable)
    assert str(request.error) == (
        "no token within 30 s: the connection to stage 0 broke; 8 epochs in a row ended without a token"
    )


def test_a_token_ends_the_wait(waiting: Waiting) -> None:
    request = waiting.submit()
    waiting.break_epoch()
    waiting.pass_s(29.0)
    waiting.serve_again()
    waiting.availability.record_result(has_tokens=True)
    waiting.break_epoch()
    waiting.pass_s(29.0)
    assert request.error is None
    waiting.pass_s(1.0)
    assert request.error is not None


def test_a_part_of_a_prompt_ends_the_wait_only_after_a_while(waiting: Waiting) -> None:
    request = waiting.submit()
    waiting.break_epoch()
    waiting.serve_again()
    waiting.pass_s(29.0)
    waiting.availability.record_result(has_tokens=False)
    waiting.pass_s(1.0)
    waiting.availability.record_result(has_tokens=False)
    waiting.break_epoch()
    assert request.error is None
    waiting.pass_s(30.0)
    assert request.error is not None


def test_a_serving_epoch_gets_time_for_progress(waiting: Waiting) -> None:
    """A long step does not fail requests: its result arrives or is overdue."""
    request = waiting.submit()
    waiting.break_epoch()
    waiting.serve_again()
    waiting.pass_s(100.0)
    assert request.error is None


def test_a_later_request_has_its_own_timeout(waiting: Waiting) -> None:
    old = waiting.submit()
    waiting.break_epoch()
    waiting.pass_s(20.0)
    new = waiting.submit()
    waiting.pass_s(10.0)
    assert old.error is not None and new.error is None
    waiting.pass_s(20.0)
    assert new.error is not None


def test_an_earlier_outage_does_not_prolong_the_wait(waiting: Waiting) -> None:
    waiting.break_epoch()
    waiting.pass_s(29.0)
    waiting.serve_again()
    request = waiting.submit()
    waiting.break_epoch()
    waiting.pass_s(29.0)
    assert request.error is None


def test_an_unwritable_journal_degrades_health_and_rejects_requests(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    availability = waiting.availability
    assert (availability.health, availability.serves_new) == (cluster_pb2.HEALTH_SERVING, True)
    with monkeypatch.context() as patch:
        patch.setattr(Durability, "failure", "journal j cannot be written: database or disk is full")
        availability.report()
        assert (availability.health, availability.serves_new) == (cluster_pb2.HEALTH_DEGRADED, False)
        waiting.break_epoch()
        waiting.serve_again()
        assert waiting.reported[-1] is False, "a new epoch does not make up for the journal"
    availability.report()
    assert waiting.reported[-1] is True


def test_journal_outages_do_not_count_towards_the_timeout(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = waiting.submit()
    with monkeypatch.context() as patch:
        patch.setattr(Durability, "failure", "journal j cannot be written: database or disk is full")
        waiting.availability.journal_changed()
        for _ in range(3):
            waiting.break_epoch()
            waiting.pass_s(TIMEOUT_S)
            waiting.serve_again()
        waiting.break_epoch()
        waiting.pass_s(TIMEOUT_S)
    waiting.availability.journal_changed()
    waiting.pass_s(TIMEOUT_S - 1)
    assert request.is_live
    waiting.pass_s(1)
    assert isinstance(request.error, ClusterUnavailable), "from then on it waits as ever"


def test_missing_workers_are_named_with_what_starts_them(waiting: Waiting) -> None:
    request = waiting.submit()
    waiting.lose_worker()
    waiting.pass_s(30.0)
    assert str(request.error).startswith("no pipeline within 30 s: worker a is lost")
    assert str(request.error).endswith("; start workers with `stageline worker --coordinator HOST:PORT`")
