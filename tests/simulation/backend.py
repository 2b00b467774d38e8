"""Loads stages and runs steps in a simulated worker: the real executor, with given times and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage, LoadProgress, RanStep, StageBackend, StageLoadError
from stage_worker.backends.contract import ReceivedFrame
from stage_worker.executor import StepExecutor
from tests.simulation.stage_compute import SimCompute
from tests.simulation.virtual_loop import Process
from wire.errors import StepFault
from wire.frames import Frame
from wire.steps import Step

MEMORY_BYTES = 1 << 30


@dataclass(slots=True)
class Machine:
    """What a worker runs on; faults change it. It outlives the processes on it."""

    load_s: float = 0.2
    step_s: float = 0.004
    num_failing_loads: int = 0
    is_bad: bool = False
    """Its weights are wrong, which only a self-check finds."""


class SimBackend(StageBackend):
    """One step at a time."""

    device = "mock"

    def __init__(
        self,
        machine: Machine,
        on_epoch: Callable[[int], None],
        is_killed_by: Callable[[Assignment, Frame], bool],
    ) -> None:
        """`is_killed_by` decides whether the process crashes when it computes a frame for its stage."""
        self.memory_bytes = MEMORY_BYTES
        self._machine = machine
        self._on_epoch = on_epoch
        self._is_killed_by = is_killed_by
        self._assignment: Assignment | None = None
        self._loop = Process.current().loop
        self._free_at_s = 0.0

    @property
    def is_mock(self) -> bool:
        return True

    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        for fraction in (0.25, 0.5, 0.75, 1.0):
            await asyncio.sleep(self._machine.load_s / 4)
            progress.advance(fraction)
        if self._machine.num_failing_loads:
            self._machine.num_failing_loads -= 1
            raise StageLoadError("this load was to fail")
        self._assignment = assignment
        return LoadedStage(
            assignment=assignment,
            executor=StepExecutor(assignment, SimCompute(assignment)),
            weight_bytes=1,
            kv_bytes=1,
            read_bytes=1,
            load_ms=1,
            warmup_ms=1,
            device=self.device,
        )

    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        return assignment.loads_like(loaded.assignment)

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        self._on_epoch(number)
        executor.begin_epoch(number, stage=stage)

    def prepare(self, executor: StepExecutor, step: Step) -> None:
        executor.prepare(step)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> asyncio.Future[RanStep]:
        done: asyncio.Future[RanStep] = self._loop.create_future()
        assert self._assignment is not None, "steps come after a load"
        if self._is_killed_by(self._assignment, received.frame):
            return done
        started_s = max(self._loop.time(), self._free_at_s)
        self._free_at_s = ended_s = started_s + self._machine.step_s
        try:
            output = executor.compute(received.frame)
        except StepFault as fault:
            done.set_exception(fault)
            return done
        self._loop.call_at(ended_s, _settle, done, RanStep(output, started_s, ended_s))
        return done

    def stop(self, *, timeout_s: float) -> bool:
        return True


def _settle(done: asyncio.Future[RanStep], ran: RanStep) -> None:
    if not done.done():
        done.set_result(ran)
