"""The backend that computes nothing: everything happens on the event loop."""

import asyncio
from functools import partial

from stage_worker.assignment import Assignment
from stage_worker.backend import RanStep, StageBackend
from stage_worker.executor import StepExecutor
from stage_worker.mock.clock import Alarm, DeadlineClock
from stage_worker.mock.compute import MockCompute
from stage_worker.mock.device import MockDevice
from stage_worker.mock.spec import MockSpec
from stage_worker.outputs import ReceivedFrame, StageOutput
from stage_worker.stage_load import LoadedStage, LoadProgress, StageLoadError
from stage_worker.step_watchdog import StepWatchdog
from wire.errors import StepFault, StepFaultKind

_MOST_MS = (1 << 32) - 1
MEMORY_BYTES = 1 << 40
"""Weights take none of a mock's memory, but plans are made as if they did."""


class MockBackend(StageBackend):
    """Serves one step at a time, each as long as its spec says. Made within an event loop."""

    device = "mock"

    def __init__(
        self, spec: MockSpec, *, memory_bytes: int | None = None, step_timeout_s: float = 30.0
    ) -> None:
        """A step that hangs is reported `step_timeout_s` after it was given up."""
        self.memory_bytes = memory_bytes or MEMORY_BYTES
        self._device = MockDevice(spec)
        self._watchdog = StepWatchdog(step_timeout_s, lambda reason: self.on_device_failure(reason))
        self._spec = spec
        self._clock = DeadlineClock()
        self._alarm: Alarm | None = None

    @property
    def is_mock(self) -> bool:
        return True

    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        await self._end_of_steps()
        try:
            compute = MockCompute(assignment, self._device)
        except ValueError as error:
            raise StageLoadError(str(error)) from error
        return LoadedStage(
            assignment=assignment,
            executor=StepExecutor(assignment, compute),
            weight_bytes=0,
            kv_bytes=0,
            read_bytes=0,
            load_ms=0,
            warmup_ms=self._warmup_ms(assignment),
            device=self.device,
        )

    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        return assignment.loads_like(loaded.assignment)

    def _warmup_ms(self, assignment: Assignment) -> int:
        """What a warm-up would have taken: it tells the coordinator how long the first steps may take."""
        longest_s = self._spec.longest_step_s(
            num_tokens=assignment.max_step_tokens, context=assignment.max_sequence_tokens
        )
        return min(round(longest_s * 1000), _MOST_MS)

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        await self._end_of_steps()
        executor.begin_epoch(number, stage=stage)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> "asyncio.Future[RanStep]":
        """The accounting is done at once; the time that it takes is part of the step's."""
        done: asyncio.Future[RanStep] = asyncio.get_running_loop().create_future()
        try:
            output: StageOutput = executor.run(received.frame)
        except StepFault as fault:
            done.set_exception(fault)
            if fault.kind is StepFaultKind.DEVICE:
                asyncio.get_running_loop().call_soon(self.on_device_failure, fault.message)
            return done
        if self._device.is_hung:
            return done
        work_s = self._spec.step_s(received.frame.step.slices)
        started_s, ended_s = self._clock.serve(received.at_s, work_s)
        executor.note_busy(work_s)
        ran = RanStep(output, started_s, ended_s)
        self._alarm = self._alarm or Alarm()
        self._alarm.set(ended_s, partial(_settle, done, ran))
        return done

    async def _end_of_steps(self) -> None:
        """Where one hangs, this does, too; as a thread that computes would."""
        if self._device.is_hung:
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchdog.expect(never)
            await never

    def stop(self, *, timeout_s: float) -> bool:
        self._watchdog.close()
        if self._alarm is not None:
            self._alarm.close()
        return True


def _settle(done: "asyncio.Future[RanStep]", ran: RanStep) -> None:
    if not done.done():
        done.set_result(ran)
