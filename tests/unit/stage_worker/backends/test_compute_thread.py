"""Detection of hung steps: each is reported once, late steps are not."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from stage_worker.backends.compute_thread import ComputeThread, StepWatchdog
from stage_worker.backends.contract import DeviceHung


def a_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_an_overdue_step_is_reported_on_every_wait() -> None:
    hung: asyncio.Queue[str] = asyncio.Queue()
    watchdog = StepWatchdog(0.05, hung.put_nowait)
    watchdog.expect(a_future())
    watchdog.expect(a_future())
    async with asyncio.timeout(10):
        assert "after it was given up" in await hung.get()
    await asyncio.sleep(0)
    assert hung.empty()


async def test_a_step_in_time_is_not_reported_and_the_next_has_a_full_timeout() -> None:
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


async def test_a_wait_that_fails_is_reported_at_once() -> None:
    hung: asyncio.Queue[str] = asyncio.Queue()
    watchdog, ended = StepWatchdog(3600, hung.put_nowait), a_future()
    watchdog.expect(ended)
    ended.set_exception(DeviceHung("begun steps still compute"))
    async with asyncio.timeout(10):
        assert await hung.get() == "begun steps still compute"
    assert watchdog._timer is None


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    assert thread.stop(timeout_s=10)


async def test_everything_runs_in_one_other_thread_in_order(compute: ComputeThread) -> None:
    order: list[int] = []

    def work(index: int) -> int:
        order.append(index)
        return threading.get_ident()

    threads = await asyncio.gather(*(compute.run(work, index) for index in range(20)))
    assert order == list(range(20))
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


async def test_errors_are_returned_and_the_thread_continues(compute: ComputeThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: 7) == 7


async def test_an_error_that_was_handled_holds_nothing(compute: ComputeThread) -> None:
    class Memory:
        """Argument of work that fails."""

    def fail(memory: Memory) -> None:
        raise OSError("refused")

    memory = Memory()
    released = threading.Event()
    weakref.finalize(memory, released.set)
    gc.disable()
    try:
        refused = ""
        try:
            await compute.run(fail, memory)
        except OSError as error:
            refused = str(error)
        del memory
        assert await asyncio.to_thread(compute.join, timeout_s=10) and refused == "refused"
        assert released.wait(10)
    finally:
        gc.enable()


async def test_work_cancelled_while_queued_is_skipped(compute: ComputeThread) -> None:
    gate, entered, ran = threading.Event(), threading.Event(), []

    def hold() -> None:
        entered.set()
        assert gate.wait(10)
        ran.append("held")

    holding = asyncio.create_task(compute.run(hold))
    assert await asyncio.to_thread(entered.wait, 10)
    waiting = asyncio.create_task(compute.run(ran.append, "left out"))
    following = asyncio.create_task(compute.run(ran.append, "following"))
    await asyncio.sleep(0)
    holding.cancel()
    waiting.cancel()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    gate.set()
    await following
    assert ran == ["held", "following"]


async def test_a_busy_thread_differs_from_an_ended_one() -> None:
    thread, gate, entered = ComputeThread(), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert gate.wait(10)

    holding = asyncio.create_task(thread.run(hold))
    assert await asyncio.to_thread(entered.wait, 10)
    assert not thread.stop(timeout_s=0.01)
    gate.set()
    assert thread.stop(timeout_s=10)
    await holding
