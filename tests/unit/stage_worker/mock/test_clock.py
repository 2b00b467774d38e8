"""Simulated time adds up exactly, however late anybody wakes up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.mock.clock import Alarm, DeadlineClock

TIMES = st.floats(0, 100)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30))
def test_a_step_begins_when_it_is_there_and_the_one_before_has_ended(
    steps: list[tuple[float, float]],
) -> None:
    clock, now_s, ended_s = DeadlineClock(), 0.0, 0.0
    for gap_s, work_s in steps:
        now_s += gap_s
        expected = max(now_s, ended_s)
        assert clock.serve(now_s, work_s) == (expected, expected + work_s)
        ended_s = expected + work_s


def test_steps_that_wait_take_no_longer_however_late_they_are_asked_for() -> None:
    clock = DeadlineClock()
    ends = [clock.serve(arrived_s, 0.02)[1] for arrived_s in (0.0, 0.0201, 0.0407, 0.0555)]
    assert ends == pytest.approx([0.02, 0.0401, 0.0607, 0.0807])


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
def test_an_alarm_goes_off_at_its_moment_and_not_before(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        alarm, rung = Alarm(), asyncio.Event()
        moment_s = time.monotonic() + 0.02
        alarm.set(moment_s, rung.set)
        await asyncio.wait_for(rung.wait(), 10)
        assert time.monotonic() >= moment_s
        rung.clear()
        alarm.set(time.monotonic() - 1, rung.set)
        assert rung.is_set()
        alarm.close()
        alarm.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@LOOPS
def test_an_alarm_that_is_set_again_or_closed_forgets_what_was_before(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        alarm, rung, calls = Alarm(), asyncio.Event(), list[str]()
        now_s = time.monotonic()
        alarm.set(now_s + 0.01, lambda: calls.append("forgotten"))
        alarm.set(now_s + 0.02, rung.set)
        await asyncio.wait_for(rung.wait(), 10)
        assert calls == []
        alarm.set(time.monotonic() + 0.01, lambda: calls.append("closed"))
        alarm.close()
        await asyncio.sleep(0.03)
        assert calls == []

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
