"""Silent workers and a stalled coordinator, on a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.cluster.connections import WorkerConnection
from coordinator.recovery.failure_detector import FailureDetector
from coordinator.recovery.policy import RecoveryPolicy
from tests.unit.coordinator.cluster.cluster_driver import identity_of

POLICY = RecoveryPolicy(heartbeat_interval_s=0.5, lease_s=2.0)
TICK_S = 0.25


class Seen:
    """A failure detector over workers a and b, and its reports; time passes in `sleep` only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.connections = [WorkerConnection(identity_of(name), now_s=self.now_s) for name in "ab"]
        self.reports: list[tuple[str, bool | str]] = []
        self.num_ticks = self.num_steady = self.num_times = 0
        self.before_tick: Callable[[], None] = lambda: None
        self.held_up_s = 0.0
        self._num_left = 0
        monkeypatch.setattr("coordinator.recovery.failure_detector.asyncio", self)
        self.watch = FailureDetector(
            POLICY,
            connections=lambda: self.connections,
            on_silence=lambda connection, is_silent: self.reports.append(
                (connection.identity.name, is_silent)
            ),
            on_lease_over=self._lose,
            on_tick=self._tick,
            on_steady=self._steady,
            on_window=self._time,
        )

    def get_running_loop(self) -> Seen:
        return self

    def time(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        if self._num_left == 0:
            raise asyncio.CancelledError
        self._num_left -= 1
        self.now_s += delay_s + self.held_up_s
        self.before_tick()

    async def pass_ticks(self, count: int) -> None:
        self._num_left = count
        with pytest.raises(asyncio.CancelledError):
            await self.watch.run()

    def heartbeat(self, name: str) -> None:
        for connection in self.connections:
            if connection.identity.name == name:
                connection.last_message_s = self.now_s

    def _lose(self, connection: WorkerConnection, reason: str) -> None:
        self.reports.append((connection.identity.name, reason))
        self.connections.remove(connection)

    def _tick(self) -> None:
        self.num_ticks += 1

    def _steady(self) -> None:
        self.num_steady += 1

    def _time(self) -> None:
        self.num_times += 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


async def test_silence_is_reported_once_before_the_lease_expires(seen: Seen) -> None:
    seen.before_tick = lambda: seen.heartbeat("a")
    await seen.pass_ticks(4)
    assert seen.reports == []
    await seen.pass_ticks(4)
    assert seen.reports == [("b", True)]
    await seen.pass_ticks(4)
    assert seen.reports == [("b", True), ("b", "no heartbeat for 2.2 s")]
    assert [connection.identity.name for connection in seen.connections] == ["a"]
    assert seen.num_ticks == 12


async def test_a_worker_that_loads_a_tokenizer_may_be_silent_for_longer(seen: Seen) -> None:
    seen.connections[1].loads_tokenizer = True
    await seen.pass_ticks(16)
    assert seen.reports == [("a", True), ("a", "no heartbeat for 2.2 s")]


async def test_time_passes_with_breaks_and_without(seen: Seen) -> None:
    def break_often() -> None:
        seen.watch.restart()
        for name in "ab":
            seen.heartbeat(name)

    seen.before_tick = break_often
    await seen.pass_ticks(int(61 / TICK_S))
    assert (seen.num_times, seen.num_steady) == (2, 0)


async def test_a_worker_that_heartbeats_in_time_is_not_lost(seen: Seen) -> None:
    seen.before_tick = lambda: seen.heartbeat("a")
    await seen.pass_ticks(7)
    seen.heartbeat("b")
    await seen.pass_ticks(1)
    assert seen.reports == [("b", True), ("b", False)]


async def test_a_stalled_coordinator_loses_no_worker(seen: Seen) -> None:
    """Heartbeats have arrived but are unread."""
    seen.held_up_s = 60.0
    await seen.pass_ticks(1)
    assert (seen.reports, seen.num_ticks) == ([], 0)
    seen.held_up_s = 0.0
    for name in "ab":
        seen.heartbeat(name)
    await seen.pass_ticks(2)
    assert (seen.reports, seen.num_ticks) == ([], 2)


async def test_a_slow_coordinator_still_loses_silent_workers(seen: Seen) -> None:
    seen.held_up_s = 1.0
    await seen.pass_ticks(4)
    assert (seen.reports, seen.num_ticks) == ([], 0)
    await seen.pass_ticks(5)
    assert seen.num_ticks == 1
    assert {name for name, _ in seen.reports} == {"a", "b"}


async def test_half_a_minute_without_a_break_is_steady(seen: Seen) -> None:
    seen.before_tick = lambda: [seen.heartbeat(name) for name in "ab"] and None
    await seen.pass_ticks(120)
    assert seen.num_steady == 0
    await seen.pass_ticks(121)
    assert seen.num_steady == 1


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_break_or_a_loss_resets_the_count(seen: Seen, is_lost: bool) -> None:
    seen.connections.pop()

    def before_tick() -> None:
        if not is_lost:
            seen.heartbeat("a")
        if not is_lost and seen.now_s == 120.0:
            seen.watch.restart()

    seen.before_tick = before_tick
    await seen.pass_ticks(129)
    assert bool(seen.reports) == is_lost
    assert seen.num_steady == 0
