"""`python -m tests.gpu.failing_stage MODEL DEVICE FAULT`: a stage whose device fails in its second step.

Prints what the backend told, as JSON: the kind of the step's fault, the reasons of a failed device, and
whether the next epoch computes the first step as before. A process of its own, whose context may be poisoned.
FAULT is one of `bench.gpu.faulty`, or "hang": a step that computes for ten seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.faulty import fail
from bench.gpu.steps import FIRST_EPOCH, StepMaker
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage, LoadProgress
from stage_worker.backends.contract import DeviceError, ReceivedFrame
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.config import WorkerConfig
from tests.integration.stage_bench import new_assignment
from wire.errors import StepFault
from wire.frames import Frame
from wire.steps import Step, StepResult

HANG = "hang"
HANG_S = 10.0
STEP_TIMEOUT_S = 0.5
WAIT_S = 30.0
CYCLES_PER_S = 2_000_000_000
"""At least those of any GPU."""


def hang() -> None:
    """Keep the device busy: the host goes on, and waits for it later; a CPU computes at once."""
    if torch.cuda.is_initialized():
        torch.cuda._sleep(int(HANG_S * CYCLES_PER_S))
    else:
        time.sleep(HANG_S)


def fail_in_step(number: int, fault: str) -> None:
    """Wrap the method that begins every step: step `number` of the first epoch fails."""
    compute: Any = ModelCompute
    begin = compute.begin
    faults = [fault]

    def failing_begin(self: ModelCompute, frame: Frame, prepared: object) -> Any:
        if frame.step.epoch == FIRST_EPOCH and frame.step.step_id == number and faults:
            kind = faults.pop()
            hang() if kind == HANG else fail(kind)
        return begin(self, frame, prepared)

    compute.begin = failing_begin


class Stage:
    """The whole model in one stage; greedy tokens of one prompt."""

    def __init__(self, backend: TorchBackend, loaded: LoadedStage, assignment: Assignment) -> None:
        self._backend = backend
        self._executor = loaded.executor
        self._assignment = assignment

    def steps(self, epoch: int) -> list[Step]:
        maker = StepMaker(self._assignment, vocab_size=128)
        sequence = maker.sequence(20)
        made = [*maker.prompts([sequence]), *(maker.decodes([sequence]) for _ in range(2))]
        return [replace(step, epoch=epoch) for step in made]

    async def begin(self, epoch: int) -> None:
        await self._backend.begin_epoch(self._executor, epoch, stage=0)

    def submit(self, step: Step) -> asyncio.Future[Any]:
        self._backend.prepare(self._executor, step)
        now_s = time.monotonic()
        return self._backend.submit(self._executor, ReceivedFrame(Frame(step, ()), now_s, now_s))


def tokens_of(output: object) -> list[object]:
    assert isinstance(output, StepResult)
    return [result.outcome for result in output.results]


async def run(model: Path, device: str, fault: str) -> dict[str, Any]:
    """What the backend told."""
    assignment = replace(
        new_assignment(model, stage=0, num_stages=1), max_step_tokens=32, max_sequence_tokens=64
    )
    backend = TorchBackend(
        WorkerConfig(device=device, memory_bytes=2 << 30, step_timeout_s=STEP_TIMEOUT_S, num_threads=1)
    )
    failed: asyncio.Queue[str] = asyncio.Queue()
    backend.on_device_failure = failed.put_nowait
    stage = Stage(backend, await backend.load(assignment, LoadProgress()), assignment)
    fail_in_step(1, fault)
    await stage.begin(FIRST_EPOCH)
    first, *others = stage.steps(FIRST_EPOCH)
    before = tokens_of((await stage.submit(first)).output)
    told: dict[str, Any] = {"kind": None, "failures": [], "next": ""}
    began_s = time.monotonic()
    running = [stage.submit(step) for step in others]
    if fault != HANG:
        try:
            await running[0]
        except StepFault as error:
            told["kind"] = error.kind.name
        await asyncio.gather(*running, return_exceptions=True)
    told["next"] = await next_epoch(stage, before, failed, fault)
    told["took_s"] = time.monotonic() - began_s
    while not failed.empty():
        told["failures"].append(failed.get_nowait())
    return told


async def next_epoch(stage: Stage, before: list[object], failed: asyncio.Queue[str], fault: str) -> str:
    """How the next epoch begins: with the "same" tokens, "failed", or "hangs" when the device is reported."""
    beginning = asyncio.ensure_future(stage.begin(FIRST_EPOCH + 1))
    async with asyncio.timeout(WAIT_S):
        if fault == HANG:
            failed.put_nowait(await failed.get())
            return "begun" if beginning.done() else "hangs"
        try:
            await beginning
        except DeviceError:
            return "failed"
        (first, *_) = stage.steps(FIRST_EPOCH + 1)
        return "same" if tokens_of((await stage.submit(first)).output) == before else "other tokens"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))), flush=True)
    # A poisoned context or a hung thread would block a normal exit.
    os._exit(0)
