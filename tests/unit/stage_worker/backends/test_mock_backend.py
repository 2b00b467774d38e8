"""Simulated time is exact under late wakeups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.assignment import ModelShape
from stage_worker.backends.backend import LoadProgress, StageBackend, StageDevice, StageLoadError
from stage_worker.backends.contract import ReceivedFrame
from stage_worker.backends.mock_backend import MEMORY_BYTES, Alarm, DeadlineClock, MockBackend
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.executor import StepExecutor
from tests.integration.stage_bench import Log
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.steps import Step, StepResult

TIMES = st.floats(0, 100)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30))
def test_a_step_begins_after_its_arrival_and_the_previous_end(
    steps: list[tuple[float, float]],
) -> None:
    clock, now_s, ended_s = DeadlineClock(), 0.0, 0.0
    for gap_s, work_s in steps:
        now_s += gap_s
        expected = max(now_s, ended_s)
        assert clock.serve(now_s, work_s) == (expected, expected + work_s)
        ended_s = expected + work_s


def test_waiting_steps_take_no_longer_when_polled_late() -> None:
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
def test_resetting_or_closing_an_alarm_cancels_the_previous_one(
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


DEADLINE_S = 20.0
LONG = MockSpec(step=3600.0)
SHORT, MEDIUM = MockSpec(step=0.02), MockSpec(step=0.3)
"""A busy machine may take longer than the short one to submit it."""


def received(step: Step, *, at_s: float) -> ReceivedFrame:
    return ReceivedFrame(Frame(step, None), at_s, at_s)


class Bench:
    """One stage that is the whole pipeline, in epoch 1."""

    def __init__(self, spec: MockSpec) -> None:
        self.backend = MockBackend(spec)
        self.assignment = mock_assignment(stage=0, num_stages=1)

    async def begin(self) -> None:
        loaded = await self.backend.load(self.assignment, LoadProgress())
        self.executor: StepExecutor = loaded.executor
        await self.backend.begin_epoch(self.executor, 1, stage=0)
        self.log = Log(self.assignment)
        self.log.begin(1)
        self.log.add((1, 2, 3))

    def submit(self, step: Step, *, at_s: float | None = None) -> asyncio.Future[Any]:
        self.backend.prepare(self.executor, step)
        return self.backend.submit(
            self.executor, received(step, at_s=time.monotonic() if at_s is None else at_s)
        )


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(getattr(request, "param", SHORT))
    await bench.begin()
    yield bench
    assert bench.backend.stop(timeout_s=0)
    assert bench.backend.stop(timeout_s=0), "twice is fine"


async def test_the_backend_reports_mock() -> None:
    backend = MockBackend(SHORT)
    assert backend.device == StageDevice(name="mock", memory_bytes=MEMORY_BYTES, is_mock=True)
    assert MockBackend(SHORT, memory_bytes=1000).device.memory_bytes == 1000
    assert backend.stop(timeout_s=0), "also before anything was served"


async def test_a_mock_has_nothing_that_needs_weights_or_a_gpu() -> None:
    backend = MockBackend(SHORT)
    assert (backend.weights, backend.references, backend.gpu_memory) == (None, None, None)


def test_no_member_of_a_backend_does_nothing_or_raises_by_default() -> None:
    """What only some backends do is an object that the others do not have."""
    members = {name for name in vars(StageBackend) if not name.startswith("_")}
    assert members == StageBackend.__abstractmethods__


async def test_a_stage_loads_immediately_without_memory() -> None:
    loaded = await MockBackend(SHORT).load(mock_assignment(stage=1), LoadProgress())
    assert (loaded.weight_bytes, loaded.kv_bytes) == (0, 0)
    assert loaded.executor.stats.blocks_free == 32


async def test_a_model_of_unknown_shape_is_a_failed_load() -> None:
    assignment = mock_assignment(stage=0, model_shape=ModelShape())
    with pytest.raises(StageLoadError, match="needs the sizes of hidden states and vocabulary, got 0 and 0"):
        await MockBackend(SHORT).load(assignment, LoadProgress())


async def test_a_step_ends_its_time_after_it_came(bench: Bench) -> None:
    came_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        ran = await bench.submit(bench.log.step(), at_s=came_s)
    assert (ran.started_s, ran.ended_s) == (came_s, came_s + SHORT.step)
    assert time.monotonic() >= ran.ended_s
    assert isinstance(ran.output, StepResult)
    assert bench.executor.stats.num_steps == 1


async def test_a_step_that_came_while_another_was_computed_begins_when_that_ends(bench: Bench) -> None:
    came_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        first = await bench.submit(bench.log.step(), at_s=came_s)
        bench.log.complete(first.output)
        second = await bench.submit(bench.log.step(), at_s=came_s)
    assert second.started_s == first.ended_s
    assert second.ended_s == first.ended_s + SHORT.step


async def test_busy_time_counts_steps_only(bench: Bench) -> None:
    came_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        for number in range(3):
            ran = await bench.submit(bench.log.step(), at_s=came_s + 0.03 * number)
            bench.log.complete(ran.output)
        await bench.submit(Step(epoch=1, step_id=3, digest=bench.log.scheduler.kv.digest))
    assert bench.executor.stats.busy_s == pytest.approx(3 * SHORT.step)


@pytest.mark.parametrize("bench", [MockSpec()], indirect=True)
async def test_a_step_without_time_is_done_at_once(bench: Bench) -> None:
    assert bench.submit(bench.log.step()).done()


@pytest.mark.parametrize("bench", [LONG], indirect=True)
async def test_a_step_without_slices_is_done_at_once(bench: Bench) -> None:
    assert bench.submit(Step(epoch=1, step_id=0)).done()


@pytest.mark.parametrize("bench", [LONG], indirect=True)
async def test_a_fault_is_set_on_the_future_at_once(bench: Bench) -> None:
    done = bench.submit(replace(bench.log.step(), step_id=5))
    with pytest.raises(StepFault) as fault:
        await done
    assert (fault.value.kind, fault.value.step_id) == (StepFaultKind.STEP_ID, 5)
    refused = bench.submit(Step(epoch=1, step_id=0))
    with pytest.raises(StepFault, match="is refused since"):
        await refused


@pytest.mark.parametrize("bench", [MEDIUM], indirect=True)
async def test_a_step_without_a_waiter_is_abandoned(bench: Bench) -> None:
    errors = _errors_of_the_loop()
    abandoned = bench.submit(bench.log.step(), at_s=time.monotonic())
    assert abandoned.cancel()
    await asyncio.sleep(MEDIUM.step)
    await _a_little_later()
    assert abandoned.cancelled()
    assert errors == []


@pytest.mark.parametrize("bench", [MEDIUM], indirect=True)
async def test_a_new_epoch_begins_at_the_end_of_an_abandoned_step(bench: Bench) -> None:
    came_s = time.monotonic()
    assert bench.submit(bench.log.step(), at_s=came_s).cancel()
    await bench.backend.begin_epoch(bench.executor, 2, stage=0)
    bench.log.begin(2)
    async with asyncio.timeout(DEADLINE_S):
        ran = await bench.submit(bench.log.step(), at_s=came_s)
    assert ran.started_s >= came_s + MEDIUM.step


async def test_a_stopped_backend_abandons_its_step(bench: Bench) -> None:
    errors = _errors_of_the_loop()
    done = bench.submit(bench.log.step())
    assert bench.backend.stop(timeout_s=0)
    await _a_little_later()
    assert not done.done()
    assert errors == []


def _errors_of_the_loop() -> list[dict[str, Any]]:
    """Collects exceptions of the loop's callbacks."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    return errors


async def _a_little_later() -> None:
    """Returns after all steps started earlier on another backend."""
    other = Bench(SHORT)
    await other.begin()
    async with asyncio.timeout(DEADLINE_S):
        await other.submit(other.log.step())
    other.backend.stop(timeout_s=0)


async def test_the_first_steps_take_the_specified_time() -> None:
    assignment = mock_assignment(stage=0)
    size, length = assignment.max_step_tokens, assignment.max_sequence_tokens
    for times, longest_ms in (
        ("step=20ms", 20),
        ("step=20ms,token=1ms", 20 + size),
        ("context=1ms", round(size * length / 1000)),
        ("context=3600s", min(round(3600 * size * length), (1 << 32) - 1)),
    ):
        loaded = await MockBackend(MockSpec.parse(times)).load(assignment, LoadProgress())
        assert loaded.warmup_ms == longest_ms


async def test_a_hung_step_fails_the_device_although_epochs_begin_and_end_meanwhile() -> None:
    hung = Bench(MockSpec(hang_after=0))
    hung.backend = MockBackend(MockSpec(hang_after=0), step_timeout_s=0.3)
    failures = asyncio.Queue[str]()
    hung.backend.on_device_failure = failures.put_nowait
    await hung.begin()
    hung.submit(hung.log.step()).cancel()

    async def begin_epochs() -> None:
        for number in range(2, 100):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await hung.backend.begin_epoch(hung.executor, number, stage=0)

    epochs = asyncio.create_task(begin_epochs())
    async with asyncio.timeout(5):
        assert "a step still computes 0.3 s after it was given up" in await failures.get()
    epochs.cancel()
    assert hung.backend.stop(timeout_s=0)
