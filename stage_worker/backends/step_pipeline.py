"""Runs steps on two threads: one begins them, the other waits for the device and settles their futures."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from stage_worker.backends.backend import RanStep
from stage_worker.backends.compute_thread import ComputeThread, FutureResult
from stage_worker.backends.contract import DeviceHung
from stage_worker.executor import BegunStep, StepExecutor
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame


@dataclass(slots=True)
class _Submitted:
    """A step on its way; `begun` and `begun_s` are set when its computation has begun."""

    executor: StepExecutor
    frame: Frame
    result: FutureResult[RanStep]
    begun: BegunStep | None = None
    begun_s: float = 0.0


class StepPipeline:
    """Begins steps on the compute thread, and finishes them in the same order.

    A device that takes several steps finishes them on a thread of its own: it waits without the interpreter's
    lock. Otherwise a step is finished where it was begun.
    """

    def __init__(
        self,
        compute: ComputeThread,
        on_device_failure: Callable[[str], None],
        *,
        on_start: Callable[[], None] = lambda: None,
        step_timeout_s: float,
    ) -> None:
        """The event loop calls `on_device_failure`; `on_start` runs first on the second thread.

        Begun steps that are not finished within `step_timeout_s` are hung.
        """
        self._compute = compute
        self._completions = ComputeThread(on_start=on_start, name="stage-completion")
        self._on_device_failure = on_device_failure
        self._step_timeout_s = step_timeout_s
        self._ended_s = 0.0

    def submit(self, executor: StepExecutor, frame: Frame) -> "asyncio.Future[RanStep]":
        """Compute a prepared step; cancellation before its begin skips it."""
        result: FutureResult[RanStep] = FutureResult(asyncio.get_running_loop())
        self._compute.post(self._begin, _Submitted(executor, frame, result))
        return result.future

    def drain(self) -> None:
        """Wait until all begun steps are finished; to be called on the compute thread. Raises DeviceHung."""
        if not self._completions.join(timeout_s=self._step_timeout_s):
            raise DeviceHung(f"begun steps still compute after {self._step_timeout_s:g} s (--step-timeout)")

    def stop(self, *, timeout_s: float) -> bool:
        """Stop the second thread; returns False if it is still busy after `timeout_s`."""
        return self._completions.stop(timeout_s=timeout_s)

    def _begin(self, step: _Submitted) -> None:
        if step.result.future.cancelled():
            return
        step.begun_s = time.monotonic()
        step.begun = step.executor.begin(step.frame)
        if step.begun.refusal is not None:
            self._report(step, step.begun.refusal)  # a hung device finishes no step before it
        if step.executor.depth > 1:
            self._completions.post(self._finish, step)
        else:
            self._finish(step)

    def _finish(self, step: _Submitted) -> None:
        assert step.begun is not None, "finish before begin"
        try:
            output = step.executor.finish(step.begun)
        except StepFault as fault:
            self._report(step, fault)
            step.result.set_error(fault)
            return
        except BaseException as error:
            step.result.set_error(error)
            return
        # The device computes one step at a time.
        started_s, self._ended_s = max(step.begun_s, self._ended_s), time.monotonic()
        step.executor.note_busy(self._ended_s - started_s)
        step.result.set(RanStep(output, started_s, self._ended_s))

    def _report(self, step: _Submitted, fault: StepFault) -> None:
        """Report a failed device directly: the epoch may have ended, leaving the step's error unread."""
        if fault.kind is StepFaultKind.DEVICE:
            step.result.loop.call_soon_threadsafe(self._on_device_failure, fault.message)
