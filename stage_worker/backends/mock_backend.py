"""The mock backend: real frames and KV accounting, simulated compute time."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial

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
from stage_worker.backends.contract import ReceivedFrame, StageOutput
from stage_worker.backends.mock_compute import MockCompute, MockDevice
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.executor import StepExecutor
from wire.errors import StepFault, StepFaultKind
from wire.steps import Step


class DeadlineClock:
    """Schedule of one device, step after step, from scheduled ends so that delays do not accumulate. Pure."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def serve(self, arrived_s: float, work_s: float) -> tuple[float, float]:
        """Return the begin and end of a step that arrived at `arrived_s`."""
        started_s = max(arrived_s, self._free_at_s)
        self._free_at_s = started_s + work_s
        return started_s, self._free_at_s


EARLY_S = 150e-6
"""Early wake-up, since an idle machine wakes late; the rest is a busy wait."""


class Alarm:
    """Calls back within a few us by timerfd, where available: event loops round timers to milliseconds."""

    def __init__(self) -> None:
        """Must be created in the running event loop, which it belongs to."""
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[], None] | None = None
        self._moment_s = 0.0
        self._timer = _TimerFd() if sys.platform == "linux" else None
        if self._timer is not None:
            self._loop.add_reader(self._timer.fd, self._ring)

    def set(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Call back once, immediately if the time has passed. Replaces an earlier setting."""
        self._callback, self._moment_s = callback, moment_s
        remaining_s = moment_s - time.monotonic()
        if remaining_s <= EARLY_S:
            self._go_off(callback)
        elif self._timer is not None:
            self._timer.set(moment_s - EARLY_S)
        else:
            self._loop.call_later(remaining_s, self._go_off, callback)

    def close(self) -> None:
        """Cancel the alarm. Idempotent."""
        self._callback = None
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fd)
            self._timer.close()
            self._timer = None

    def _ring(self) -> None:
        if self._timer is not None and self._timer.has_gone_off() and self._callback is not None:
            self._go_off(self._callback)

    def _go_off(self, callback: Callable[[], None]) -> None:
        if callback is not self._callback:
            return
        self._callback = None
        while time.monotonic() < self._moment_s:
            pass
        callback()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _TimerFd:
    """Linux timerfd, which Python's `os` module has from 3.13 on. Source: timerfd_create(2)."""

    _NONBLOCK = os.O_NONBLOCK
    _CLOEXEC = os.O_CLOEXEC
    _ABSOLUTE = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, self._NONBLOCK | self._CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, moment_s: float) -> None:
        seconds = int(moment_s)
        value = _TimeSpec(seconds, int((moment_s - seconds) * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        if self._libc.timerfd_settime(self.fd, self._ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def has_gone_off(self) -> bool:
        """Whether the timer expired since it was set; true once."""
        try:
            return len(os.read(self.fd, 8)) == 8
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)


_MOST_MS = (1 << 32) - 1
MEMORY_BYTES = 1 << 40
"""Simulated budget: plans need one, although mocks hold no weights."""


class MockBackend(StageBackend):
    """Runs one step at a time, for the time in its spec. Must be created in an event loop."""

    def __init__(
        self, spec: MockSpec, *, memory_bytes: int | None = None, step_timeout_s: float = 30.0
    ) -> None:
        """A hung step is reported `step_timeout_s` after the coordinator gave it up."""
        self.device = StageDevice(name="mock", memory_bytes=memory_bytes or MEMORY_BYTES, is_mock=True)
        self._simulated = MockDevice(spec)
        self._watchdog = StepWatchdog(step_timeout_s, lambda reason: self.on_device_failure(reason))
        self._spec = spec
        self._clock = DeadlineClock()
        self._alarm: Alarm | None = None

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
        try:
            compute = MockCompute(assignment, self._simulated)
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
            device=self.device.name,
        )

    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        return assignment.loads_like(loaded.assignment)

    def _warmup_ms(self, assignment: Assignment) -> int:
        """Simulated warm-up time, from which the coordinator derives the timeout of the first steps."""
        longest_s = self._spec.longest_step_s(
            num_tokens=assignment.max_step_tokens, context=assignment.max_sequence_tokens
        )
        return min(round(longest_s * 1000), _MOST_MS)

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        await self._end_of_steps()
        executor.begin_epoch(number, stage=stage)

    def prepare(self, executor: StepExecutor, step: Step) -> None:
        """Run the accounting immediately."""
        executor.prepare(step)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> "asyncio.Future[RanStep]":
        done: asyncio.Future[RanStep] = asyncio.get_running_loop().create_future()
        try:
            output: StageOutput = executor.compute(received.frame)
        except StepFault as fault:
            done.set_exception(fault)
            if fault.kind is StepFaultKind.DEVICE:
                asyncio.get_running_loop().call_soon(self.on_device_failure, fault.message)
            return done
        if self._simulated.is_hung:
            return done
        work_s = self._spec.step_s(received.frame.step)
        started_s, ended_s = self._clock.serve(received.at_s, work_s)
        executor.note_busy(work_s)
        ran = RanStep(output, started_s, ended_s)
        self._alarm = self._alarm or Alarm()
        self._alarm.set(ended_s, partial(_settle, done, ran))
        return done

    async def verify_accounting(self, executor: StepExecutor) -> None:
        executor.verify_accounting()

    async def _end_of_steps(self) -> None:
        """Wait until steps have ended; does not return if one hangs."""
        if self._simulated.is_hung:
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchdog.expect(never)
            # Shielded, because a cancelled wait does not end the step.
            await asyncio.shield(never)

    def stop(self, *, timeout_s: float) -> bool:
        self._watchdog.close()
        if self._alarm is not None:
            self._alarm.close()
        return True


def _settle(done: "asyncio.Future[RanStep]", ran: RanStep) -> None:
    if not done.done():
        done.set_result(ran)
