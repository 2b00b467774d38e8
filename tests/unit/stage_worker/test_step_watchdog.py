"""Steps that never end are told of once, those that end late are not."""

from __future__ import annotations

import asyncio

from stage_worker.step_watchdog import StepWatchdog


def a_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_a_step_that_does_not_end_in_time_is_told_of_however_often_it_is_waited_for() -> None:
    hung: asyncio.Queue[str] = asyncio.Queue()
    watchdog = StepWatchdog(0.05, hung.put_nowait)
    watchdog.expect(a_future())
    watchdog.expect(a_future())
    async with asyncio.timeout(10):
        assert "after it was given up" in await hung.get()
    await asyncio.sleep(0)
    assert hung.empty()


async def test_a_step_that_ends_in_time_is_not_told_of_and_the_next_has_all_its_time() -> None:
    hung: asyncio.Queue[str] = asyncio.Queue()
    watchdog = StepWatchdog(3600, hung.put_nowait)
    first = a_future()
    watchdog.expect(first)
    timer = watchdog._timer
    assert timer is not None
    first.set_result(None)
    await asyncio.sleep(0)
    assert timer.cancelled()
    watchdog.expect(a_future())
    assert watchdog._timer is not None and watchdog._timer is not timer
    watchdog.close()
    assert hung.empty()
