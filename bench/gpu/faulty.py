"""`python -m bench.gpu.faulty` is the `stageline` command, with a worker whose device fails once.

With STAGELINE_TEST_BENCH_FAULT=FILE the first worker that begins a step while FILE exists renames it
FILE.done, and computes what the file says before the step: "assert" indexes out of range on the device,
which poisons its context; "memory" allocates more than any device has. FILE.done then has the time,
`time.monotonic()`. The product itself is unchanged. The coordinator logs its steps as by
`bench.harness.traced`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from bench.harness.step_log import FILE_VARIABLE
from bench.harness.traced import StepLog, trace_scheduler
from stageline.__main__ import main

FAULT_VARIABLE = "STAGELINE_TEST_BENCH_FAULT"
ASSERT, MEMORY = "assert", "memory"
MORE_THAN_ANY = 1 << 50


def done_file(file: Path) -> Path:
    """Where the time of the fault is."""
    return file.with_name(f"{file.name}.done")


def fail_once(file: Path) -> None:
    """Wrap the method that begins every step of a model."""
    from stage_worker.backends.model_compute import ModelCompute

    compute: Any = ModelCompute
    begin: Callable[..., Any] = compute.begin

    @wraps(begin)
    def failing_begin(self: Any, *arguments: Any, **named: Any) -> Any:
        fault = _taken(file)
        if fault is not None:
            fail(fault)
        return begin(self, *arguments, **named)

    compute.begin = failing_begin


def _taken(file: Path) -> str | None:
    """The fault, for the one process that renames the file."""
    if not file.exists():
        return None
    taken = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.rename(taken)
    except FileNotFoundError:
        return None
    fault = taken.read_text().strip()
    taken.write_text(str(time.monotonic()))
    taken.rename(done_file(file))
    return fault


def fail(fault: str) -> None:
    """Fail as a device does, on the thread that computes, which has selected its GPU.

    A CPU has no context to poison: it raises what a poisoned one would.
    """
    import torch

    from stage_worker.backends.contract import DeviceError

    device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    if fault == MEMORY:
        torch.empty(MORE_THAN_ANY, dtype=torch.uint8, device=device)
    elif fault == ASSERT and device == "cpu":
        raise DeviceError("device-side assert, made up on a CPU")
    elif fault == ASSERT:
        torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum()
    else:
        raise ValueError(f"fault {fault!r} is neither {ASSERT} nor {MEMORY}")


if __name__ == "__main__":
    command = sys.argv[1:2]
    if command == ["coordinator"] and (steps_file := os.environ.get(FILE_VARIABLE)):
        trace_scheduler(StepLog(steps_file))
    if command == ["worker"] and (fault_file := os.environ.get(FAULT_VARIABLE)):
        fail_once(Path(fault_file))
    sys.exit(main())
