"""Steps of the benchmark are valid for the stage that a worker loads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench.gpu.model import TINY, write_checkpoint
from bench.gpu.phase import Order
from bench.gpu.stage import BenchStage, Sizes, loaded_stage, work_of
from wire.ids import StageRole
from wire.steps import Step

SIZES = Sizes(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=256, kv_tokens=1024)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    order = Order(
        phase="decode",
        device="cpu",
        is_quick=True,
        deadline_s=time.monotonic() + 60,
        work=tmp_path,
        logs=tmp_path,
        rows_file=tmp_path / "rows",
    )
    write_checkpoint(order.model, TINY, torch.device("cpu"), torch.float32)
    return order


def some_steps(stage: BenchStage) -> list[Step]:
    """Prompts of which one takes two chunks, decodes past a block boundary, an end, and a second prompt."""
    maker = stage.maker
    first = [maker.sequence(100), maker.sequence(14), maker.sequence(15)]
    steps = [*maker.prompts(first), *(maker.decodes(first) for _ in range(20))]
    assert [step.num_tokens for step in steps[:3]] == [64, 36 + 14, 15]
    maker.end(first[1:])
    second = maker.sequence(17)
    return [*steps, *maker.prompts([second]), maker.decodes([first[0], second])]


@pytest.mark.parametrize("role", [StageRole.MIDDLE, StageRole.LAST, StageRole.ONLY])
async def test_every_role_computes_the_steps_in_order(order: Order, role: StageRole) -> None:
    async with loaded_stage(order, role, SIZES) as stage:
        steps = some_steps(stage)
        ended_s = await stage.run(steps)
        assert len(ended_s) == len(steps)
        assert ended_s == sorted(ended_s)
        stage.loaded.executor.check_integrity()
        assert stage.loaded.executor.stats.num_steps == len(steps)


async def test_traced_steps_are_found_in_the_profile(order: Order) -> None:
    async with loaded_stage(order, StageRole.MIDDLE, SIZES) as stage:
        steps = some_steps(stage)
        assert len(stage.traced(steps, order.work)) == len(steps)
        assert not (order.work / "trace.json").exists()


async def test_bounds_count_the_weights_that_a_stage_loads(order: Order) -> None:
    async with loaded_stage(order, StageRole.MIDDLE, SIZES) as stage:
        assert work_of(order, stage).weight_bytes == stage.loaded.weight_bytes
