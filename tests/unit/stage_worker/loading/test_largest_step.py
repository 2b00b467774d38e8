"""On a GPU, warm-up runs the step that takes the most memory, and compares it with plan and budget."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from checkpoint import Checkpoint
from checkpoint.step_graphs import WORKSPACE_BYTES
from kvcache import group_windows
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage, StageLoadError
from stage_worker.backends.torch_device import DeviceMeter
from stage_worker.executor import StageOutput, StepExecutor
from stage_worker.loading.stage_loader import WorkerResources, load_stage
from stage_worker.loading.warmup import LargestStep, run_largest_step
from tests.checkpoints import make_checkpoint
from tests.families import make_family
from tests.integration.stage_bench import new_assignment
from tests.unit.coordinator.planner.small_models import llama
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from wire.frames import Frame
from wire.gpu import DeviceMemory
from wire.steps import Decode, StepSlice

MIB = 1 << 20
CPU = torch.device("cpu")
RESOURCES = WorkerResources(device=CPU, memory_bytes=1 << 30, model_directory=None)


class FakeMeter(DeviceMeter):
    """A device whose tensors take up to `peak_bytes`."""

    def __init__(self, peak_bytes: int) -> None:
        self.peak_bytes, self.num_restarts = peak_bytes, 0

    def read(self) -> DeviceMemory:
        return DeviceMemory(
            allocated_bytes=MIB, reserved_bytes=7 * MIB, free_bytes=9 * MIB, peak_bytes=self.peak_bytes
        )

    def restart_peak(self) -> None:
        self.num_restarts += 1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepSlice, ...]]:
    """The slices of every step that an executor has run."""
    seen: list[tuple[StepSlice, ...]] = []
    run = StepExecutor.run

    def recorded(self: StepExecutor, frame: Frame) -> StageOutput:
        seen.append(frame.step.slices)
        return run(self, frame)

    monkeypatch.setattr(StepExecutor, "run", recorded)
    return seen


def largest(steps: list[tuple[StepSlice, ...]]) -> tuple[StepSlice, ...]:
    return max(steps, key=lambda slices: sum(len(part.tokens) for part in slices))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_full_chunk_runs_behind_the_longest_history_beside_decodes(
    stage: int, steps: list[tuple[StepSlice, ...]], tmp_path: Path
) -> None:
    assignment = new_assignment(make_checkpoint(tmp_path, "llama", num_layers=3), stage=stage)
    executor = load_stage(assignment, RESOURCES).executor
    steps.clear()
    run_largest_step(executor, assignment, Checkpoint.open(tmp_path).config)
    *decodes, chunk = largest(steps)
    assert len(decodes) == assignment.max_step_sequences - 1
    assert len(decodes) + len(chunk.tokens) == assignment.max_step_tokens
    size = assignment.block_size
    most = min(assignment.max_sequence_tokens, (assignment.num_blocks - len(decodes)) * size)
    assert most - 2 * size < chunk.first_position + len(chunk.tokens) <= most
    assert all(isinstance(decode.inference_step, Decode) for decode in decodes)
    assert executor.stats.num_steps == 0
    assert executor.stats.blocks_free == assignment.num_blocks
    executor.check_integrity()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_models_with_windows_run_it(family: str, steps: list[tuple[StepSlice, ...]], tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family, num_layers=6)
    assignment = new_assignment(directory, stage=2, num_layers=6)
    if len(group_windows(Checkpoint.open(directory).config.layer_windows)) > 1:
        assignment = replace(assignment, other_num_blocks=(assignment.num_blocks // 2,))
    executor = load_stage(assignment, RESOURCES).executor
    steps.clear()
    run_largest_step(executor, assignment, Checkpoint.open(tmp_path).config)
    *decodes, chunk = largest(steps)
    assert decodes and chunk.first_position > 0
    executor.check_integrity()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("num_states", [2, 5])
def test_models_with_states_run_it_behind_histories(
    stage: int, num_states: int, steps: list[tuple[StepSlice, ...]], tmp_path: Path
) -> None:
    """Also a stage without a recurrent layer, whose sequences have states elsewhere."""
    kinds = ["full_attention", "linear_attention", "full_attention"]
    directory = make_family(tmp_path / "model", "qwen3_5_text", num_layers=3, layer_types=kinds)
    assignment = replace(new_assignment(directory, stage=stage), num_states=num_states)
    executor = load_stage(assignment, RESOURCES).executor
    steps.clear()
    run_largest_step(executor, assignment, Checkpoint.open(directory).config)
    *decodes, chunk = largest(steps)
    assert len(decodes) == min(num_states, assignment.max_step_sequences) - 1
    size = assignment.block_size
    most = min(assignment.max_sequence_tokens, (assignment.num_blocks - len(decodes)) * size)
    assert most - 2 * size < chunk.first_position + len(chunk.tokens) <= most
    assert len(decodes) + len(chunk.tokens) <= assignment.max_step_tokens
    executor.check_integrity()


@given(
    num_blocks=st.integers(1, 200),
    others=st.lists(st.integers(1, 200), max_size=1),
    block_size=st.sampled_from([1, 2, 16]),
    max_step_tokens=st.integers(1, 300),
    max_step_sequences=st.integers(1, 40),
    max_sequence_tokens=st.integers(1, 4000),
    window=st.integers(1, 100),
)
@example(
    num_blocks=2,
    others=[1],
    block_size=1,
    max_step_tokens=1,
    max_step_sequences=1,
    max_sequence_tokens=2,
    window=1,
)
def test_the_largest_step_keeps_every_limit(
    num_blocks: int,
    others: list[int],
    block_size: int,
    max_step_tokens: int,
    max_step_sequences: int,
    max_sequence_tokens: int,
    window: int,
) -> None:
    assignment = mock_assignment(
        stage=0,
        num_stages=1,
        layer_end=2,
        num_blocks=num_blocks,
        other_num_blocks=tuple(others),
        block_size=block_size,
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
        max_sequence_tokens=min(max_sequence_tokens, num_blocks * block_size),
    )
    config = llama(num_layers=2)
    if others:
        layer = config.layers[0]
        windowed = replace(layer, mixer=replace(layer.mixer, window=window))
        config = replace(config, layers=(layer, windowed))
    step = LargestStep.of(assignment, config)
    check_limits(step, assignment, [None, window][: 1 + len(others)])


def check_limits(step: LargestStep, assignment: Assignment, windows: list[int | None]) -> None:
    size, longest = assignment.block_size, assignment.max_sequence_tokens
    assert step.chunk_tokens >= 1
    assert min(step.chunk_blocks, step.num_decodes, step.decoded_blocks) >= 0
    assert step.num_decodes + step.chunk_tokens <= assignment.max_step_tokens
    assert step.num_decodes < assignment.max_step_sequences
    assert step.chunk_blocks * size + step.chunk_tokens <= longest
    assert not step.num_decodes or step.decoded_blocks * size + 2 <= longest
    own = -(-step.chunk_tokens // size) + step.num_decodes * -(-2 // size)
    for window, num_blocks in zip(windows, assignment.group_blocks, strict=True):
        most = 1 << 40 if window is None else -(-window // size) + 1
        histories = min(step.chunk_blocks, most) + step.num_decodes * min(step.decoded_blocks, most)
        assert own + histories <= num_blocks


def loaded_with(
    meter: FakeMeter, directory: Path, *, memory_bytes: int, activation_bytes: int
) -> LoadedStage:
    assignment = replace(new_assignment(directory, stage=1), activation_bytes=activation_bytes)
    resources = WorkerResources(device=CPU, memory_bytes=memory_bytes, model_directory=None, meter=meter)
    return load_stage(assignment, resources)


def test_more_than_the_budget_fails_the_load_with_the_numbers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=3)
    numbers = (
        r"the largest step took 65.0 MiB in tensors, the plan counts \S+ MiB; 7.0 MiB are reserved, 9.0 MiB "
        r"free; this worker has 64.0 MiB: lower --max-step-tokens"
    )
    with pytest.raises(StageLoadError, match=numbers):
        loaded_with(FakeMeter(65 * MIB), tmp_path, memory_bytes=64 * MIB, activation_bytes=MIB)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("too_many", "level"), [(0, logging.INFO), (1, logging.WARNING)])
def test_more_than_the_plan_is_a_warning(
    too_many: int, level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=3)
    first = loaded_with(FakeMeter(0), tmp_path, memory_bytes=64 * MIB, activation_bytes=0)
    caplog.set_level(logging.INFO)
    meter = FakeMeter(first.weight_bytes + first.kv_bytes + MIB + WORKSPACE_BYTES + too_many)
    loaded = loaded_with(meter, tmp_path, memory_bytes=64 * MIB, activation_bytes=MIB)
    assert loaded.largest_step_bytes == meter.peak_bytes
    (record,) = (record for record in caplog.records if record.message.startswith("warm-up: the largest"))
    assert record.levelno == level
    assert meter.num_restarts == 1


def test_a_largest_step_without_memory_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=3)
    begin = StepExecutor.begin

    def short(self: StepExecutor, frame: Frame) -> object:
        if any(part.first_position and len(part.tokens) > 1 for part in frame.step.slices):
            monkeypatch.setattr(self._compute, "begin", exhausted)
        return begin(self, frame)

    monkeypatch.setattr(StepExecutor, "begin", short)
    with pytest.raises(StageLoadError, match="OUT_OF_MEMORY"):
        loaded_with(FakeMeter(0), tmp_path, memory_bytes=64 * MIB, activation_bytes=0)


def exhausted(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_cpu_runs_no_largest_step(tmp_path: Path, steps: list[tuple[StepSlice, ...]]) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=3)
    loaded = load_stage(new_assignment(tmp_path, stage=1), RESOURCES)
    assert loaded.largest_step_bytes is None
    assert not any(part.first_position and len(part.tokens) > 1 for slices in steps for part in slices)
