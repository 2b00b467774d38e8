"""The memory of a loaded stage is what the plan counts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, DType
from coordinator.planner.plan import DeviceKind, StepLimits
from coordinator.planner.stage_memory import StageMemory
from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.torch_device import CudaMeter
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.model.kernels import has_triton_kernels
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import new_assignment

pytestmark = pytest.mark.gpu

LIMITS = StepLimits(max_step_tokens=1024, max_step_sequences=32, max_sequence_tokens=8192)
NUM_BLOCKS, BLOCK_SIZE = 2048, 16
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def test_the_largest_step_stays_within_the_plan(
    stage: int, prepared: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if prepared.type == "cpu":
        pytest.skip("a CPU has no memory of its own")
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=3, **SHAPE))
    memory = StageMemory(
        config=checkpoint.config, dtype=DType.F32, limits=LIMITS, block_size=BLOCK_SIZE, num_stages=3
    )
    in_place = has_triton_kernels(KernelChoice.AUTO, prepared)
    kind = DeviceKind.GPU_IN_PLACE if in_place else DeviceKind.GPU
    assignment = new_assignment(tmp_path, stage=stage)
    assignment = replace(
        assignment,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        activation_bytes=memory.activation_bytes(assignment.role, NUM_BLOCKS, kind),
        **{name: getattr(LIMITS, name) for name in LIMITS.__slots__},
    )
    resources = WorkerResources(
        device=prepared, memory_bytes=4 << 30, model_directory=None, meter=CudaMeter(prepared)
    )
    caplog.set_level(logging.INFO)
    cache = StageCache()
    load_stage(assignment, resources, cache=cache)
    (record,) = (record for record in caplog.records if record.message.startswith("warm-up: the largest"))
    assert record.levelno == logging.INFO, record.message
    cache.clear()
