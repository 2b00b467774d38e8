"""Warm-up runs real-shaped steps through the executor and leaves it empty."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint
from stage_worker.executor import StepExecutor
from stage_worker.loading import stage_loader
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.loading.warmup import warm_up
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import Log, hidden_for, new_assignment
from wire.frames import Frame

RESOURCES = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 30, model_directory=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The slices' sizes of every step that an executor has run."""
    seen: list[tuple[int, ...]] = []
    run = StepExecutor.run

    def recorded(self: StepExecutor, frame: Frame) -> Any:
        seen.append(tuple(len(part.tokens) for part in frame.step.slices))
        return run(self, frame)

    monkeypatch.setattr(StepExecutor, "run", recorded)
    return seen


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_largest_chunk_and_all_batch_sizes_are_run(
    directory: Path, stage: int, shapes: list[tuple[int, ...]]
) -> None:
    assignment = new_assignment(directory, stage=stage)
    executor = load_stage(assignment, RESOURCES).executor
    shapes.clear()
    warm_up(executor, assignment, Checkpoint.open(directory).config, budget_s=60.0)
    assert {(16,), (32,), (1,), (1, 1), (1,) * 4, (1,) * 8} <= set(shapes)
    assert executor.stats.num_steps == 0
    assert executor.stats.blocks_free == assignment.num_blocks


@pytest.mark.full
def test_a_spent_budget_ends_it_early(directory: Path, shapes: list[tuple[int, ...]]) -> None:
    assignment = new_assignment(directory, stage=1)
    executor = load_stage(assignment, RESOURCES).executor
    shapes.clear()
    warm_up(executor, assignment, Checkpoint.open(directory).config, budget_s=0.0)
    assert set(shapes) == {(16,), (1,), ()}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 1},
        {"max_step_tokens": 1},
        {"max_step_sequences": 1},
        {"max_sequence_tokens": 1},
        {"block_size": 1},
        {"num_blocks": 1, "block_size": 1, "max_step_tokens": 1, "max_step_sequences": 1},
    ],
    ids=str,
)
def test_the_smallest_limits_are_kept(directory: Path, limits: dict[str, int]) -> None:
    assignment = replace(new_assignment(directory, stage=2), **limits)
    load_stage(assignment, RESOURCES)


def test_warm_up_leaves_no_state_for_the_first_epoch(directory: Path) -> None:
    assignment = new_assignment(directory, stage=1)
    executor = load_stage(assignment, RESOURCES).executor
    executor.begin_epoch(1, stage=1)
    log = Log(assignment)
    log.begin(1)
    log.add((1, 2, 3))
    step = log.step()
    executor.run(Frame(step, hidden_for(step, 64)))
    executor.check_integrity()


@pytest.mark.full
def test_on_a_cpu_only_the_first_stage_of_a_process_takes_time_to_warm_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets_s: list[float] = []
    monkeypatch.setattr(stage_loader, "warm_up", lambda *_, budget_s: budgets_s.append(budget_s))
    cache = StageCache()
    for stage in (1, 2):
        load_stage(new_assignment(directory, stage=stage), RESOURCES, cache=cache)
    assert budgets_s == [1.0, 0.1]
