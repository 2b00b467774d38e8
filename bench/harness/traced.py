"""`python -m bench.harness.traced` is the `stageline` command with a coordinator that logs its steps.

With STAGELINE_TEST_BENCH_STEPS=FILE the coordinator appends one JSON line per step to FILE: sending and
result times, content, and times of each stage. Times are `time.monotonic()`, which all processes of a
machine share. Logging a step costs 10 to 20 us of the coordinator's time; the product itself is unchanged.
With STAGELINE_TEST_BENCH_LAG=FILE it appends how late its event loop is, from the first epoch on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from bench.harness import loop_probe
from bench.harness.loop_probe import LoopProbe
from bench.harness.step_log import FILE_VARIABLE, LoggedStep
from stageline.__main__ import main


class StepLog:
    """Logs the steps of one coordinator."""

    def __init__(self, file: str) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._sent: dict[tuple[int, int], tuple[float, Any]] = {}

    def note_sent(self, step: Any) -> None:
        self._sent[step.epoch, step.step_id] = (time.monotonic(), step)

    def note_result(self, result: Any) -> None:
        result_s = time.monotonic()
        sent = self._sent.pop((result.epoch, result.step_id), None)
        if sent is not None:
            step = _logged(*sent, result_s, result.stage_times)
            os.write(self._file, json.dumps(step.as_json()).encode() + b"\n")


def _logged(sent_s: float, step: Any, result_s: float, stage_times: Any) -> LoggedStep:
    chunks = tuple(len(chunk.tokens) for chunk in step.chunks)
    return LoggedStep(
        epoch=step.epoch,
        step_id=step.step_id,
        sent_s=sent_s,
        result_s=result_s,
        num_decodes=len(step.decodes),
        chunks=chunks,
        stages=tuple((stage_time.wait_us, stage_time.compute_us) for stage_time in stage_times),
        hops=tuple(stage_time.hop_us + stage_time.receive_us for stage_time in stage_times),
    )


def trace_scheduler(log: StepLog) -> None:
    """Wrap the two methods of the scheduler that every step passes."""
    from coordinator.scheduler.scheduler import Scheduler

    scheduler: Any = Scheduler
    next_step: Callable[..., Any] = scheduler.next_step
    complete: Callable[..., Any] = scheduler.complete

    @wraps(next_step)
    def noted_next_step(*arguments: Any, **named: Any) -> Any:
        step = next_step(*arguments, **named)
        if step is not None:
            log.note_sent(step)
        return step

    @wraps(complete)
    def noted_complete(scheduler: Any, result: Any, *arguments: Any, **named: Any) -> Any:
        log.note_result(result)
        return complete(scheduler, result, *arguments, **named)

    scheduler.next_step, scheduler.complete = noted_next_step, noted_complete


def probe_loop(file: str) -> None:
    """Start a probe of the event loop with the first epoch."""
    from coordinator.scheduler.scheduler import Scheduler

    scheduler: Any = Scheduler
    begin_epoch: Callable[..., Any] = scheduler.begin_epoch
    probes: list[LoopProbe] = []

    @wraps(begin_epoch)
    def probed_begin_epoch(*arguments: Any, **named: Any) -> Any:
        if not probes:
            probes.append(LoopProbe(file))
        return begin_epoch(*arguments, **named)

    scheduler.begin_epoch = probed_begin_epoch


if __name__ == "__main__":
    is_coordinator = sys.argv[1:2] == ["coordinator"]
    if is_coordinator and (steps_file := os.environ.get(FILE_VARIABLE)):
        trace_scheduler(StepLog(steps_file))
    if is_coordinator and (lags_file := os.environ.get(loop_probe.FILE_VARIABLE)):
        probe_loop(lags_file)
    sys.exit(main())
