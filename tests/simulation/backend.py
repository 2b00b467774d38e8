"""Loads stages and runs steps in a simulated worker: the real executor, with given times and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from stage_worker.assignment import Assignment
from stage_worker.backends.backend import (
    LoadedStage,
    LoadProgress,
    RanStep,
    StageBackend,
    StageDevice,
    StageLoadError,
)
from stage_worker.backends.compute_thread import StepWatchdog
from stage_worker.backends.contract import ReceivedFrame
from stage_worker.executor import BegunStep, StepExecutor
from tests.simulation.stage_compute import SimCompute, SimDevice
from tests.simulation.virtual_loop import Process
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.steps import Step

MEMORY_BYTES = 1 << 30
HANGING_S = 1.0
"""How long a step may compute after it was given up."""


@dataclass(slots=True)
class Machine:
    """What a worker runs on; faults change it. It outlives the processes on it."""

    load_s: float = 0.2
    step_s: float = 0.004
    num_failing_loads: int = 0
    is_bad: bool = False
    """Its weights are wrong, which only a self-check finds."""


@dataclass(slots=True)
class _Begun:
    """A step on the device, from `started_s` to `ended_s`."""

    executor: StepExecutor
    begun: BegunStep
    done: asyncio.Future[RanStep]
    started_s: float
    ended_s: float


class SimBackend(StageBackend):
    """Computes one step after another; its device takes several."""

    def __init__(
        self,
        machine: Machine,
        on_epoch: Callable[[int], None],
        is_killed_by: Callable[[Assignment, Frame], bool],
        sim_device: SimDevice,
    ) -> None:
        """`is_killed_by` decides whether the process crashes when it computes a frame for its stage."""
        self.sim_device = sim_device
        self._watchdog = StepWatchdog(HANGING_S, lambda reason: self.on_device_failure(reason))
        self.device = StageDevice(name="mock", memory_bytes=MEMORY_BYTES, is_mock=True)
        self._machine = machine
        self._on_epoch = on_epoch
        self._is_killed_by = is_killed_by
        self._assignment: Assignment | None = None
        self._loop = Process.current().loop
        self._free_at_s = 0.0

    @property
    def gpu_memory(self) -> None:
        return None

    @property
    def weights(self) -> None:
        return None

    @property
    def references(self) -> None:
        return None

    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        await self._end_of_steps()
        for fraction in (0.25, 0.5, 0.75, 1.0):
            await asyncio.sleep(self._machine.load_s / 4)
            progress.advance(fraction)
        if self._machine.num_failing_loads:
            self._machine.num_failing_loads -= 1
            raise StageLoadError("this load was to fail")
        self._assignment = assignment
        return LoadedStage(
            assignment=assignment,
            executor=StepExecutor(assignment, SimCompute(assignment, self.sim_device)),
            weight_bytes=1,
            kv_bytes=1,
            read_bytes=1,
            load_ms=1,
            warmup_ms=1,
            device=self.device.name,
        )

    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        return assignment.loads_like(loaded.assignment)

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        await self._end_of_steps()
        self._on_epoch(number)
        executor.begin_epoch(number, stage=stage)

    def prepare(self, executor: StepExecutor, step: Step) -> None:
        executor.prepare(step)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> asyncio.Future[RanStep]:
        done: asyncio.Future[RanStep] = self._loop.create_future()
        assert self._assignment is not None, "steps come after a load"
        if self._is_killed_by(self._assignment, received.frame):
            return done
        if self.sim_device.is_hung:
            return done
        started_s = max(self._loop.time(), self._free_at_s)
        self._free_at_s = started_s + self._machine.step_s
        step = _Begun(executor, executor.begin(received.frame), done, started_s, self._free_at_s)
        if step.begun.refusal is not None and executor.depth == 1:
            self._finish(step)
        else:
            self._loop.call_at(self._free_at_s, self._finish, step)
        return done

    async def verify_accounting(self, executor: StepExecutor) -> None:
        executor.verify_accounting()

    def _finish(self, step: _Begun) -> None:
        try:
            output = step.executor.finish(step.begun)
        except StepFault as fault:
            if fault.kind is StepFaultKind.DEVICE:
                self._loop.call_soon(self.on_device_failure, fault.message)
            if not step.done.done():
                step.done.set_exception(fault)
            return
        if not step.done.done():
            step.done.set_result(RanStep(output, step.started_s, step.ended_s))

    async def _end_of_steps(self) -> None:
        """Wait until the device has no step; does not return if one hangs."""
        ended: asyncio.Future[None] = self._loop.create_future()
        self._watchdog.expect(ended)
        if not self.sim_device.is_hung:
            self._loop.call_at(max(self._loop.time(), self._free_at_s), _settle, ended)
        # Shielded, because a cancelled wait does not end the step.
        await asyncio.shield(ended)

    def stop(self, *, timeout_s: float) -> bool:
        self._watchdog.close()
        return True


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
