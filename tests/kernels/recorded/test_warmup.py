"""Warm-up launches every variant of a kernel that a serving stage launches, so that none is compiled then.

On tensors without data, with `tests.recorded_launches`. Choices have parts so small that they have several
levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Checkpoint, DType
from kvcache import KvGroup, KvWindow
from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor
from stage_worker.loading import warmup
from stage_worker.loading.warmup import run_largest_step, warm_up
from stage_worker.model.kernels import by_triton
from stage_worker.model.triton_kernels import choices
from tests.fake_cuda import fake_cuda, with_data
from tests.integration.stage_bench import GREEDY, Log, hidden_for
from tests.recorded_launches import Variant, record_launches
from tests.unit.stage_worker.test_fake_cuda_families import LAYERS, assigned, loaded
from wire.frames import Frame
from wire.sampling import StepSampling
from wire.steps import SliceResult, StepResult

pytestmark = pytest.mark.kernels

NUM_BLOCKS, FEW_BLOCKS = 256, 160
"""Enough for the longest sequence and decodes of several entries, and for the longest sequence alone."""
LIMITS: dict[str, Any] = {
    "max_step_tokens": 96,
    "max_step_sequences": 4,
    "max_sequence_tokens": 640,
}
"""Longer than the keys of one program, which are 512."""
SAMPLINGS = (
    GREEDY,
    StepSampling(temperature=0.8, seed=1),
    StepSampling(temperature=0.8, top_p=0.9, seed=1),
    StepSampling(temperature=0.8, top_k=20, seed=1),
    StepSampling(temperature=0.8, min_p=0.1, seed=1),
    StepSampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=1),
    StepSampling(temperature=0.0, presence_penalty=0.5),
)
"""One after the other, so that rows of all kinds are sampled alone and beside each other."""


def serve(
    executor: StepExecutor,
    assignment: Assignment,
    others: tuple[KvGroup, ...],
    lengths: Sequence[int],
    max_tokens: int,
) -> None:
    """Prompts of `lengths`, alone and beside decodes, with hits of prefixes, and decodes of all; sampled
    in every way.
    """
    width = Checkpoint.open(Path(assignment.model_directory)).config.residual_width
    log = Log(assignment, other_groups=others)
    log.begin(1)
    executor.begin_epoch(1, stage=assignment.stage)
    for number, length in enumerate(lengths):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        log.add(tuple(index % 89 for index in range(length)), sampling=sampling, max_tokens=max_tokens)
        for _ in range(4):
            step = log.step()
            hidden = with_data(hidden_for)(step, width, dtype=DType.BF16) if assignment.stage else ()
            executor.run(Frame(step, hidden))
            answers = [
                SliceResult(part.sequence, part.restart_count, 5) for part in step.slices if part.is_sampled
            ]
            log.complete(StepResult.of(step.epoch, step.step_id, answers))


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "hy_v4", "qwen4_exp_text"])
@pytest.mark.parametrize("stage", LAYERS, ids=["FIRST", "MIDDLE", "LAST"])
def test_serving_launches_what_warm_up_has_launched(
    family: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_variants(family, stage, NUM_BLOCKS, tmp_path, monkeypatch) == set()


def test_warm_up_launches_decodes_that_choose_where_one_history_takes_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes beside the chunk of the largest step have no history then."""
    assert missing_variants("deepseek_v4", 1, FEW_BLOCKS, tmp_path, monkeypatch) == set()


def test_warm_up_chooses_among_as_many_tokens_as_one_sequence_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of more than 320 have one level more; beside decodes, 313 tokens fit into all blocks."""
    given = ("deepseek_v32", 1, 82, tmp_path, monkeypatch)
    assert missing_variants(*given, lengths=(324, 1), max_tokens=3) == set()


def missing_variants(
    family: str,
    stage: int,
    num_blocks: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lengths: Sequence[int] = (1, 3, 24, 57, 96, 97, 24, 300, 560),
    max_tokens: int = 40,
) -> set[Variant]:
    """Variants that a stage with `num_blocks` launches in service alone."""
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(choices, "CHOICE_PART", 64)
    monkeypatch.setattr(warmup._WarmupSteps, "_frame", with_data(warmup._WarmupSteps._frame))
    found = replace(assigned(directory, family, stage), dtype=DType.BF16, num_blocks=num_blocks, **LIMITS)
    window = KvWindow(9, found.max_step_tokens)
    others = tuple(KvGroup(num_blocks, window) for _ in found.other_num_blocks)
    assignment = replace(found, other_num_blocks=tuple(group.num_blocks for group in others))
    config = Checkpoint.open(Path(assignment.model_directory)).config
    with fake_cuda():
        executor = loaded(assignment, new_kernels=by_triton)
        warm_up(executor, assignment, config, budget_s=1e9)
        run_largest_step(executor, assignment, config)
        warm = set(launches.variants)
        serve(executor, assignment, others, lengths, max_tokens)
    assert len(warm) > 5
    return launches.variants - warm
