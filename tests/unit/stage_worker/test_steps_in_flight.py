"""Steps that a device computes while others are begun: outputs, faults and memory, on every role."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_worker.backends.backend import RanStep
from stage_worker.backends.compute_thread import ComputeThread
from stage_worker.backends.contract import DeviceError, DeviceHung, HandedOn, StageOutput
from stage_worker.backends.step_pipeline import StepPipeline
from stage_worker.backends.transfers import NUM_SLOTS, StagingRing
from stage_worker.executor import BegunStep, StepExecutor
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeQueue
from tests.integration.stage_bench import new_assignment
from tests.staged import staged_executor
from tests.unit.stage_worker.test_executor import Stage
from tests.unit.stage_worker.test_steps_ahead import comparable, scripted_steps
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.staging import StagingSizes

CPU = torch.device("cpu")


class StagedStage(Stage):
    """The same stage twice: on a CPU, and behind a fake device."""

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__(new_assignment(directory, stage=number))
        self.frames = [self.frame(step) for step in scripted_steps(self)]
        self.expected = [comparable(self.executor.run(frame)) for frame in self.frames]

    def staged(self, queue: FakeQueue, *, timeout_s: float = 60.0) -> StepExecutor:
        executor = staged_executor(self.assignment, queue, CPU, timeout_s=timeout_s)
        executor.begin_epoch(1, stage=self.assignment.stage)
        return executor


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def staged(request: pytest.FixtureRequest, directory: Path) -> StagedStage:
    return StagedStage(directory, request.param)


def prepared(executor: StepExecutor, frames: Sequence[Frame]) -> None:
    for frame in frames:
        executor.prepare(frame.step)


@pytest.mark.matrix(1)
@settings(max_examples=20, deadline=None)
@given(choices=st.lists(st.sampled_from(("begin", "finish", "send")), max_size=60))
def test_outputs_do_not_depend_on_what_is_in_flight(staged: StagedStage, choices: list[str]) -> None:
    """Between its begin and the end of its sending, a step's memory is used by no other step."""
    executor = staged.staged(FakeQueue())
    prepared(executor, staged.frames)
    begun: deque[BegunStep] = deque()
    held: deque[tuple[object, StageOutput]] = deque()
    waiting, expected = deque(staged.frames), iter(staged.expected)
    for choice in [*choices, *["begin", "finish", "send"] * len(staged.frames)]:
        if choice == "begin" and waiting and len(begun) + len(held) < NUM_SLOTS:
            begun.append(executor.begin(waiting.popleft()))
        elif choice == "finish" and begun:
            held.append((next(expected), executor.finish(begun.popleft())))
        elif choice == "send" and held:
            assert comparable(held[0][1]) == held[0][0]
            held.popleft()  # the only reference
    assert not waiting and not begun and not held


def test_the_first_step_is_copied_after_computation_that_may_use_the_same_memory() -> None:
    queue, num_uploads = FakeQueue(), list[int]()
    queue.computation.append(lambda: num_uploads.append(queue.num_uploads))
    ring = StagingRing(queue, StagingSizes(input_bytes=64, output_bytes=64), timeout_s=1.0)
    ring.begin().upload([np.arange(3, dtype=np.int32)])
    assert num_uploads == [0] and queue.num_uploads == 1


def test_an_output_keeps_its_memory_as_long_as_it_is_referenced(staged: StagedStage) -> None:
    executor = staged.staged(FakeQueue())
    prepared(executor, staged.frames)
    ring = executor._compute._transfers  # type: ignore[attr-defined]
    held = [executor.compute(frame) for frame in staged.frames[:NUM_SLOTS]]
    is_handed_on = isinstance(held[0], HandedOn)
    assert ring._free.qsize() == (0 if is_handed_on else NUM_SLOTS)
    held.pop(1)
    assert ring._free.qsize() == (1 if is_handed_on else NUM_SLOTS)
    for output, expected in zip(held, (staged.expected[0], *staged.expected[2:]), strict=False):
        assert comparable(output) == expected


def test_a_device_that_fails_refuses_what_is_in_flight_but_not_what_has_ended(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    executor = staged.staged(queue)
    prepared(executor, staged.frames[:4])
    begun = [executor.begin(frame) for frame in staged.frames[:3]]
    queue.end_oldest()
    assert comparable(executor.finish(begun[0])) == staged.expected[0]
    queue.fail("the context is poisoned")
    begun.append(executor.begin(staged.frames[3]))
    with pytest.raises(StepFault, match="the context is poisoned") as first:
        executor.finish(begun[1])
    assert (first.value.kind, first.value.step_id) == (StepFaultKind.DEVICE, 1)
    for step in begun[2:]:
        with pytest.raises(StepFault, match="the context is poisoned") as later:
            executor.finish(step)
        assert (later.value.kind, later.value.step_id) == (StepFaultKind.DEVICE, step.step.step_id)
    with pytest.raises(DeviceError, match="poisoned"):
        executor.begin_epoch(2, stage=staged.assignment.stage)


def test_a_step_that_fails_at_its_begin_does_not_refuse_those_before(
    staged: StagedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = FakeQueue(is_manual=True)
    executor = staged.staged(queue)
    num_before = queue.num_uploads  # of weights
    prepared(executor, staged.frames[:4])
    begun = [executor.begin(frame) for frame in staged.frames[:2]]

    def fail(*_: object) -> None:
        raise RuntimeError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(queue, "upload", fail)
        begun.append(executor.begin(staged.frames[2]))
    begun.append(executor.begin(staged.frames[3]))
    for step, expected in zip(begun[:2], staged.expected, strict=False):
        queue.end_oldest()
        assert comparable(executor.finish(step)) == expected
    with pytest.raises(StepFault, match="RuntimeError: made up") as failed:
        executor.finish(begun[2])
    assert failed.value.step_id == 2
    with pytest.raises(StepFault, match="epoch 1 is refused since RuntimeError: made up"):
        executor.finish(begun[3])
    assert queue.num_uploads == num_before + 2
    executor.begin_epoch(2, stage=staged.assignment.stage)


class Threads:
    """A pipeline on its two threads."""

    def __init__(self, *, step_timeout_s: float = 60.0) -> None:
        self.failures: list[str] = []
        self.compute = ComputeThread()
        self.pipeline = StepPipeline(self.compute, self.failures.append, step_timeout_s=step_timeout_s)

    def submit(self, executor: StepExecutor, frames: Sequence[Frame]) -> list[asyncio.Future[RanStep]]:
        for frame in frames:
            self.compute.post(executor.prepare, frame.step)
        return [self.pipeline.submit(executor, frame) for frame in frames]

    def close(self) -> None:
        assert self.compute.stop(timeout_s=30)
        assert self.pipeline.stop(timeout_s=30)


async def test_steps_are_begun_before_the_first_one_ends(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    with closing(Threads()) as threads:
        executor = staged.staged(queue)
        num_before = queue.num_uploads  # of weights
        running = threads.submit(executor, staged.frames[:NUM_SLOTS])
        await threads.compute.run(int)
        assert queue.num_uploads == num_before + NUM_SLOTS
        assert not any(future.done() for future in running)
        for future, expected in zip(running, staged.expected, strict=False):
            await asyncio.to_thread(queue.end_oldest)
            assert comparable((await future).output) == expected
        times = [(future.result().started_s, future.result().ended_s) for future in running]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))


async def test_a_failed_device_is_reported_and_settles_all_steps(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    with closing(Threads()) as threads:
        executor = staged.staged(queue)
        running = threads.submit(executor, staged.frames[:3])
        await threads.compute.run(int)
        queue.fail("the context is poisoned")
        faults = await asyncio.gather(*running, return_exceptions=True)
        assert [fault.step_id for fault in faults if isinstance(fault, StepFault)] == [0, 1, 2]
        assert threads.failures[0] == "DeviceError: the context is poisoned"


async def test_an_epoch_begins_when_cancelled_steps_have_left_the_device(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    with closing(Threads()) as threads:
        executor = staged.staged(queue)
        running = threads.submit(executor, staged.frames[:3])
        await threads.compute.run(int)
        for future in running:
            future.cancel()
        threads.compute.post(threads.pipeline.drain)
        begun = threads.compute.submit(executor.begin_epoch, 2, stage=staged.assignment.stage)
        for _ in running:
            assert not begun.done()
            await asyncio.to_thread(queue.end_oldest)
        await begun
        assert executor.stats.blocks_active == 0


async def test_a_device_that_ends_nothing_fails_the_step_that_finds_no_slot(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    with closing(Threads()) as threads:
        executor = staged.staged(queue, timeout_s=0.05)
        running = threads.submit(executor, staged.frames[: NUM_SLOTS + 1])
        await threads.compute.run(int)
        reason = f"DeviceHung: the device has not ended {NUM_SLOTS} steps after 0.05 s"
        assert threads.failures == [reason]  # though no step before it is finished
        for _ in range(NUM_SLOTS):
            await asyncio.to_thread(queue.end_oldest)
        await asyncio.gather(*running[:NUM_SLOTS])
        with pytest.raises(StepFault) as hung:
            await running[NUM_SLOTS]
        assert hung.value.kind is StepFaultKind.DEVICE
        with pytest.raises(DeviceError, match="DeviceHung"):
            executor.begin_epoch(2, stage=staged.assignment.stage)


def test_outputs_that_the_next_stage_does_not_take_are_no_fault_of_the_device(staged: StagedStage) -> None:
    if staged.assignment.role.has_head:
        pytest.skip("results keep no memory")
    executor = staged.staged(FakeQueue(), timeout_s=0.05)
    prepared(executor, staged.frames)
    held = [executor.compute(frame) for frame in staged.frames[:NUM_SLOTS]]
    with pytest.raises(StepFault, match="has not taken the output of 4 steps after") as fault:
        executor.compute(staged.frames[NUM_SLOTS])
    assert fault.value.kind is StepFaultKind.NEIGHBOUR
    assert len(held) == NUM_SLOTS
    executor.begin_epoch(2, stage=staged.assignment.stage)


def test_a_slot_of_a_refused_step_is_waited_for_within_the_deadline(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    executor = staged.staged(queue, timeout_s=0.05)
    ring = executor._compute._transfers  # type: ignore[attr-defined]
    for _ in range(NUM_SLOTS):
        ring.begin().download()
    with pytest.raises(DeviceHung, match=f"has not ended {NUM_SLOTS} steps after 0"):
        ring.begin()
    for _ in range(NUM_SLOTS):
        queue.end_oldest()
    ring.begin()


async def test_steps_that_are_never_finished_are_reported_as_hung(staged: StagedStage) -> None:
    queue = FakeQueue(is_manual=True)
    with closing(Threads(step_timeout_s=0.05)) as threads:
        running = threads.submit(staged.staged(queue), staged.frames[:2])
        with pytest.raises(DeviceHung, match=r"begun steps still compute after 0\.05 s"):
            await threads.compute.run(threads.pipeline.drain)
        for _ in running:
            await asyncio.to_thread(queue.end_oldest)
        await asyncio.gather(*running)
        await threads.compute.run(threads.pipeline.drain)
