"""A loaded stage of the model, and its steps: through the worker's own backend, or one by one.

Nothing of a stage is copied here: the backend that a worker has loads it from the checkpoint, warms it up,
and runs its steps on its compute and completion threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.bounds import StageWork
from bench.gpu.model import ELEMENT_BYTES, dtype_of, geometry_of
from bench.gpu.phase import Order
from bench.gpu.steps import FIRST_EPOCH, StepMaker
from bench.gpu.timing import synchronize
from bench.gpu.trace import STEP, TracedStep, steps_of
from bench.harness.figure import NotMeasured
from checkpoint import Checkpoint, DType
from checkpoint.step_graphs import WORKSPACE_BYTES
from coordinator.planner.plan import DeviceKind, StepLimits
from coordinator.planner.stage_memory import StageMemory
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage, LoadProgress, StageBackend
from stage_worker.backends.contract import KernelChoice, ReceivedFrame
from stage_worker.backends.tensor_views import to_frame
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.backends.torch_device import free_memory
from stage_worker.config import WorkerConfig
from stage_worker.executor import BegunStep
from stage_worker.model.kernels import has_triton_kernels
from wire.frames import Frame
from wire.ids import StageRole
from wire.steps import Step

BLOCK_SIZE = 16
STOP_TIMEOUT_S = 20.0
SYNC_WARNING = "synchronizing CUDA operation"
DTYPES = {torch.bfloat16: DType.BF16, torch.float32: DType.F32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of the steps, and KV pages for `kv_tokens`."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    kv_tokens: int


class BenchStage:
    """A stage that is loaded. Its steps are made by `maker`, and run in the order in which they are made."""

    def __init__(self, backend: StageBackend, loaded: LoadedStage, config: Any, device: torch.device) -> None:
        self.loaded = loaded
        self.device = device
        self.maker = StepMaker(loaded.assignment, vocab_size=config.vocab_size)
        self._backend = backend
        self._boundary = config.boundary
        assignment = loaded.assignment
        shape = (assignment.max_step_tokens, config.hidden_size)
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(shape, generator=generator).to(dtype_of(str(device)))

    async def period_s(self, steps: Sequence[Step]) -> float:
        """Mean seconds from the end of a step to the end of the next, while all others wait.

        Raises NotMeasured for fewer than three steps.
        """
        ended_s = await self.run(steps)
        if len(ended_s) < 3:
            raise NotMeasured(f"{len(ended_s)} steps, needed are 3")
        return (ended_s[-1] - ended_s[1]) / (len(ended_s) - 2)

    async def run(self, steps: Sequence[Step]) -> list[float]:
        """Run steps through the backend, all of them submitted at once; when each ended, monotonic.

        Outputs are dropped at once: what holds one holds its memory, too.
        """
        running = []
        for step in steps:
            self._backend.prepare(self.loaded.executor, step)
            now_s = time.monotonic()
            received = ReceivedFrame(self._frame(step), now_s, now_s)
            running.append(self._end_of(self._backend.submit(self.loaded.executor, received)))
        return list(await asyncio.gather(*running))

    async def _end_of(self, future: asyncio.Future[Any]) -> float:
        return float((await future).ended_s)

    def host_s(self, steps: Sequence[Step]) -> float:
        """Median seconds of the host for one step, from the frame until it is on the device's queue."""
        executor, times_s = self.loaded.executor, []
        for step in steps:
            frame = self._frame(step)
            synchronize(self.device)
            began_s = time.perf_counter()
            executor.prepare(step)
            begun = executor.begin(frame)
            times_s.append(time.perf_counter() - began_s)
            executor.finish(begun)
        return statistics.median(times_s)

    def num_waits(self, steps: Sequence[Step]) -> float:
        """Mean number of times that a step waits for the GPU on the host, as torch counts them."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._run_here(steps)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return sum(SYNC_WARNING in str(one.message) for one in caught) / len(steps)

    def traced(self, steps: Sequence[Step], folder: Path) -> list[TracedStep]:
        """Run steps under the profiler, and read what each did on the GPU."""
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        file = folder / "trace.json"
        with torch.profiler.profile(activities=activities) as profiled:
            self._run_here(steps)
            synchronize(self.device)
        profiled.export_chrome_trace(str(file))
        found = steps_of(json.loads(file.read_text())["traceEvents"])
        file.unlink()
        return found

    def _run_here(self, steps: Sequence[Step]) -> None:
        """Run steps on this thread, as many begun ahead as the stage takes."""
        executor = self.loaded.executor
        begun: deque[BegunStep] = deque()
        for step in steps:
            if len(begun) == executor.depth:
                executor.finish(begun.popleft())
            executor.prepare(step)
            with torch.profiler.record_function(STEP):
                begun.append(executor.begin(self._frame(step)))
        while begun:
            executor.finish(begun.popleft())

    def _frame(self, step: Step) -> Frame:
        if self.loaded.assignment.role.has_embeddings or not step.num_slices:
            return Frame(step, ())
        rows = self._hidden[: step.num_tokens]
        return Frame(step, to_frame([rows], self._boundary, self.loaded.assignment.dtype))

    @property
    def planned_bytes(self) -> int:
        """What a plan counts in tensors of the device: weights, pages, activations, buffers, a workspace."""
        loaded = self.loaded
        tensors = loaded.weight_bytes + loaded.kv_bytes + loaded.pinned_bytes
        return tensors + loaded.assignment.activation_bytes + WORKSPACE_BYTES

    def close(self) -> None:
        """Drop the stage: its weights and pages are free once the backend is, too."""
        del self.loaded, self.maker, self._backend


@asynccontextmanager
async def loaded_stage(
    order: Order, role: StageRole, sizes: Sizes, *, kernels: KernelChoice = KernelChoice.AUTO
) -> AsyncIterator[BenchStage]:
    """Load the layers between the first and the last one; LAST has the last 16 instead, and the head."""
    device = torch.device(order.device)
    free_memory(device)
    backend = TorchBackend(WorkerConfig(device=order.device, kernels=kernels))
    backend.on_device_failure = _fail
    try:
        assignment = assignment_of(order, role, sizes, kernels)
        loaded = await backend.load(assignment, LoadProgress())
        await backend.begin_epoch(loaded.executor, FIRST_EPOCH, stage=assignment.stage)
        config = Checkpoint.open(order.model).config
        stage = BenchStage(backend, loaded, config, device)
        del loaded
        yield stage
        stage.close()
    finally:
        await asyncio.to_thread(backend.stop, timeout_s=STOP_TIMEOUT_S)


def _fail(reason: str) -> None:
    """End the phase's process: its device computes nothing any more."""
    print(f"the device failed: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def assignment_of(order: Order, role: StageRole, sizes: Sizes, kernels: KernelChoice) -> Assignment:
    """The assignment of the reference stage in `role`, one of three stages, or of the whole model, with the
    activations that a plan counts.
    """
    num_layers = geometry_of(is_quick=order.is_quick).num_layers
    stage, begin, end = {
        StageRole.MIDDLE: (1, 1, num_layers - 1),
        StageRole.LAST: (2, 2, num_layers),
        StageRole.ONLY: (0, 0, num_layers),
    }[role]
    checkpoint, dtype = Checkpoint.open(order.model), DTYPES[dtype_of(order.device)]
    num_stages, num_blocks = 1 if role is StageRole.ONLY else 3, -(-sizes.kv_tokens // BLOCK_SIZE)
    limits = StepLimits(
        max_step_tokens=sizes.max_step_tokens,
        max_step_sequences=sizes.max_step_sequences,
        max_sequence_tokens=sizes.max_sequence_tokens,
    )
    memory = StageMemory(
        config=checkpoint.config, dtype=dtype, limits=limits, block_size=BLOCK_SIZE, num_stages=num_stages
    )
    return Assignment(
        plan_id=1,
        stage=stage,
        num_stages=num_stages,
        role=role,
        layer_begin=begin,
        layer_end=end,
        model_directory=str(order.model),
        fingerprint=checkpoint.fingerprint,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        activation_bytes=memory.activation_bytes(role, num_blocks, _kind_of(order.device, kernels)),
        max_step_tokens=sizes.max_step_tokens,
        max_step_sequences=sizes.max_step_sequences,
        max_sequence_tokens=sizes.max_sequence_tokens,
    )


def _kind_of(device: str, kernels: KernelChoice) -> DeviceKind:
    if device == "cpu":
        return DeviceKind.HOST
    in_place = has_triton_kernels(kernels, torch.device(device))
    return DeviceKind.GPU_IN_PLACE if in_place else DeviceKind.GPU


def work_of(order: Order, stage: BenchStage) -> StageWork:
    """What the layers of `stage` need, for bounds."""
    assignment = stage.loaded.assignment
    return StageWork(
        geometry_of(is_quick=order.is_quick),
        assignment.layer_end - assignment.layer_begin,
        ELEMENT_BYTES[dtype_of(order.device)],
    )
