"""A stage as a worker loads and warms it up computes what its layers compute eagerly, one step at a time.

Whatever a warm stage does for speed is compared here: batches that are padded, replayed graphs, steps that
are begun ahead.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.steps import FIRST_EPOCH, StepMaker
from checkpoint import Checkpoint, DType, ScaledDType
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadProgress
from stage_worker.backends.contract import HandedOn, KernelChoice, ReceivedFrame, StageOutput
from stage_worker.backends.tensor_views import from_wire, to_frame
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.config import WorkerConfig
from stage_worker.model.layer_weights import TORCH_DTYPES
from tests.checkpoints import make_checkpoint
from tests.gpu.devices import queue_of
from tests.integration.stage_bench import new_assignment
from tests.staged import staged_executor
from wire.frames import Frame
from wire.steps import Step

pytestmark = pytest.mark.gpu

HIDDEN_SIZE = 64
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 13)
MOST = {DType.F32: 1e-5, DType.BF16: 0.03, DType.F16: 0.004}
"""Root mean square, of the standard deviation of the hidden states: other kernels for other batches."""
MOST_WITH_SCALED_KV = 0.05
"""A difference in the last bit of a value may round it to the next of 8 bits."""
KV_DTYPES = [None, ScaledDType.F8_E4M3, ScaledDType.I8]


@pytest.fixture
def assignment(tmp_path: Path) -> Assignment:
    """MIDDLE of three stages, with two layers of six."""
    directory = make_checkpoint(tmp_path / "model", "qwen3", num_layers=6)
    assigned = new_assignment(directory, stage=1, num_layers=6)
    return replace(
        assigned,
        block_size=16,
        num_blocks=64,
        max_step_tokens=64,
        max_step_sequences=16,
        max_sequence_tokens=256,
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=lambda dtype: dtype.value if dtype else "same")
@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.value)
async def test_a_warm_stage_computes_what_its_layers_compute_eagerly(
    assignment: Assignment, dtype: DType, kv_dtype: ScaledDType | None, prepared: torch.device
) -> None:
    assigned = replace(assignment, dtype=dtype, kv_dtype=kv_dtype)
    frames = _frames(assigned)
    executor = staged_executor(assigned, queue_of(prepared), prepared)
    executor.begin_epoch(FIRST_EPOCH, stage=1)
    eager = [_values(executor.run(frame), dtype) for frame in frames]
    warm = await _through_backend(assigned, frames, prepared, KernelChoice.AUTO)
    plain = await _through_backend(assigned, frames, prepared, KernelChoice.PLAIN)
    limit = MOST[dtype] if kv_dtype is None else MOST_WITH_SCALED_KV
    for number, (expected, found, other) in enumerate(zip(eager, warm, plain, strict=True)):
        assert _error(found, expected) < limit, f"step {number}"
        assert _error(other, expected) < limit, f"step {number}, torch's operators"


async def test_repeated_steps_give_the_same_bits(assignment: Assignment, prepared: torch.device) -> None:
    """No step depends on what the memory of its batch held before."""
    frames = _frames(assignment)
    first = await _through_backend(assignment, frames, prepared, KernelChoice.AUTO)
    again = await _through_backend(assignment, frames, prepared, KernelChoice.AUTO)
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        assert torch.equal(one, other), f"step {number}"


def _frames(assignment: Assignment) -> list[Frame]:
    """Prompts, then decodes of growing batches, of which some begin blocks, then of shrinking ones."""
    maker = StepMaker(assignment, vocab_size=128)
    sequences = [maker.sequence(5 + 3 * index) for index in range(max(BATCHES))]
    steps = maker.prompts(sequences)
    for batch in (*BATCHES, *reversed(BATCHES)):
        steps += [maker.decodes(sequences[:batch]) for _ in range(2)]
    long = maker.sequence(70)
    steps += [maker.chunks([(long, 48)]), maker.chunks([(long, 22)]), maker.decodes([*sequences[:3], long])]
    return [_frame(step, assignment) for step in steps]


def _frame(step: Step, assignment: Assignment) -> Frame:
    generator = torch.Generator().manual_seed(step.step_id)
    hidden = torch.randn((step.num_tokens, HIDDEN_SIZE), generator=generator)
    boundary = Checkpoint.open(Path(assignment.model_directory)).config.boundary
    return Frame(step, to_frame([hidden.to(TORCH_DTYPES[assignment.dtype])], boundary, assignment.dtype))


async def _through_backend(
    assignment: Assignment, frames: list[Frame], device: torch.device, kernels: KernelChoice
) -> list[Tensor]:
    """All steps submitted at once, as a worker with a full queue does."""
    backend = TorchBackend(WorkerConfig(device=str(device), memory_bytes=2 << 30, kernels=kernels))
    failures: list[str] = []
    backend.on_device_failure = failures.append
    try:
        loaded = await backend.load(assignment, LoadProgress())
        await backend.begin_epoch(loaded.executor, FIRST_EPOCH, stage=assignment.stage)
        running = []
        for frame in frames:
            backend.prepare(loaded.executor, frame.step)
            now_s = time.monotonic()
            ran = backend.submit(loaded.executor, ReceivedFrame(frame, now_s, now_s))
            running.append(_output_of(ran, assignment.dtype))
        return list(await asyncio.gather(*running))
    finally:
        assert backend.stop(timeout_s=30)
        assert failures == []


async def _output_of(ran: asyncio.Future, dtype: DType) -> Tensor:  # type: ignore[type-arg]
    """A copy, as the output's memory is used again once it is dropped."""
    return _values((await ran).output, dtype)


def _values(output: StageOutput, dtype: DType) -> Tensor:
    assert isinstance(output, HandedOn)
    (view,) = output.hidden
    return from_wire(view, device=torch.device("cpu"), dtype=TORCH_DTYPES[dtype]).float().clone()


def _error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected) / expected.std()).square().mean().sqrt())
