"""Alarms fire on time on every event loop; simulated time is exact after late wakeups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import uvloop

from stage_worker.backends.mock_backend import EARLY_S, Alarm, DeadlineClock, sys


def test_a_thousand_steps_in_a_row_take_a_thousand_times_one() -> None:
    """Every result is requested late, after a delayed wakeup; all steps arrived long before."""
    deadline_clock = DeadlineClock()
    for number in range(1, 1001):
        assert deadline_clock.serve(arrived_s=5.0, work_s=0.25)[1] == 5.0 + number * 0.25


Scenario = Callable[[], Awaitable[None]]
RunScenario = Callable[[Scenario], None]


@pytest.fixture(params=["asyncio", "uvloop", "asyncio without timerfd", "uvloop without timerfd"])
def run_scenario(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunScenario:
    """Runs a coroutine function on an event loop of each kind."""
    if "without timerfd" in request.param:
        monkeypatch.setattr(sys, "platform", "somewhere else")
    factory = uvloop.new_event_loop if "uvloop" in request.param else asyncio.new_event_loop

    def run(scenario: Scenario) -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(20):
                await scenario()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(with_deadline())

    return run


class Bells:
    """Alarms that fired, with due and actual times."""

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        self.rung: list[str] = []
        self._changed = asyncio.Event()

    def set(self, name: str, moment_s: float) -> None:
        self.alarm.set(moment_s, partial(self._ring, name, moment_s))

    def _ring(self, name: str, moment_s: float) -> None:
        assert time.monotonic() >= moment_s, f"{name} rang early"
        self.rung.append(name)
        self._changed.set()

    async def wait(self, num_rung: int) -> None:
        while len(self.rung) < num_rung:
            await self._changed.wait()
            self._changed.clear()


def test_an_alarm_rings_once_and_never_early(run_scenario: RunScenario) -> None:
    async def scenario() -> None:
        bells = Bells(Alarm())
        for number, ahead_s in enumerate((0.02, 0.0, 3 * EARLY_S, 0.005, EARLY_S / 2)):
            bells.set(str(number), time.monotonic() + ahead_s)
            await bells.wait(number + 1)
        bells.set("last", time.monotonic() + 0.01)
        await bells.wait(6)
        assert bells.rung == ["0", "1", "2", "3", "4", "last"]
        bells.alarm.close()

    run_scenario(scenario)


class CountingAlarm(Alarm):
    """Counts how often its timer wakes the loop up."""

    num_wakeups = 0

    def _ring(self) -> None:
        self.num_wakeups += 1
        super()._ring()


def test_an_alarm_that_has_rung_leaves_the_loop_alone(run_scenario: RunScenario) -> None:
    async def scenario() -> None:
        alarm, other = CountingAlarm(), Bells(Alarm())
        start_s = time.monotonic()
        alarm.set(start_s + 0.005, lambda: None)
        other.set("later", start_s + 0.02)
        await other.wait(1)
        assert alarm.num_wakeups <= 1
        alarm.close()
        other.alarm.close()

    run_scenario(scenario)


def test_an_alarm_in_the_past_fires_immediately(run_scenario: RunScenario) -> None:
    async def scenario() -> None:
        bells = Bells(Alarm())
        bells.set("late", time.monotonic() - 1)
        assert bells.rung == ["late"]
        bells.alarm.close()

    run_scenario(scenario)


@pytest.mark.parametrize(("first_s", "second_s"), [(0.01, 0.03), (0.03, 0.01), (0.01, -1.0)])
def test_setting_an_alarm_replaces_the_previous_one(
    run_scenario: RunScenario, first_s: float, second_s: float
) -> None:
    async def scenario() -> None:
        bells = Bells(Alarm())
        start_s = time.monotonic()
        bells.set("forgotten", start_s + first_s)
        bells.set("kept", start_s + second_s)
        await bells.wait(1)
        # Due after both alarms: the first would have fired by then.
        bells.set("after", start_s + 0.06)
        await bells.wait(2)
        assert bells.rung == ["kept", "after"]
        bells.alarm.close()

    run_scenario(scenario)


def test_an_alarm_may_be_set_from_its_callback(run_scenario: RunScenario) -> None:
    async def scenario() -> None:
        alarm, moments = Alarm(), list[float]()
        done = asyncio.get_running_loop().create_future()

        def again(moment_s: float) -> None:
            moments.append(moment_s)
            if len(moments) == 20:
                done.set_result(None)
            else:
                alarm.set(moment_s + 0.001, partial(again, moment_s + 0.001))

        again(time.monotonic())
        await done
        assert moments == sorted(moments)
        assert len(moments) == 20
        alarm.close()

    run_scenario(scenario)


def test_a_closed_alarm_does_not_fire_on_a_reused_descriptor(run_scenario: RunScenario) -> None:
    async def scenario() -> None:
        closed, other = Bells(Alarm()), Bells(Alarm())
        start_s = time.monotonic()
        closed.set("never", start_s + 0.01)
        closed.alarm.close()
        closed.alarm.close()
        # Reuses the freed file descriptor; its events must not reach the closed alarm.
        third = Bells(Alarm())
        third.set("third", start_s + 0.02)
        other.set("other", start_s + 0.03)
        await third.wait(1)
        await other.wait(1)
        assert (closed.rung, third.rung, other.rung) == ([], ["third"], ["other"])
        other.alarm.close()
        third.alarm.close()

    run_scenario(scenario)
