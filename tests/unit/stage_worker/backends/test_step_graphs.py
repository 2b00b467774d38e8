"""Recorded steps of every size equal eager ones, and read nothing but buffers, weights and pages.

In float32, rows of a padded product differ by rounding from those of a smaller one, as in any batch: by at
most 1e-4, for keys and values with a spread of about 3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint.step_graphs import MAX_GRAPHS, decode_sizes, mixed_sizes
from stage_worker.assignment import Assignment
from stage_worker.backends import step_graphs
from stage_worker.backends.contract import DeviceError, EagerReason, GraphCounts, GraphSize
from stage_worker.backends.step_graphs import GraphStep, StepGraphs
from stage_worker.executor import StepExecutor
from stage_worker.model import attention_work
from stage_worker.model.kernels import by_triton
from stage_worker.model.step_buckets import StepBucket
from stage_worker.model.step_layout import StepArrays
from tests.fake_device import FakeQueue
from tests.families import make_family
from tests.integration.stage_bench import GREEDY, new_assignment
from tests.staged import staged_executor
from tests.tape import TapeRecorder
from tests.torch_kernels import use_torch_kernels
from tests.unit.stage_worker.test_executor import Stage
from tests.unit.stage_worker.test_steps_ahead import comparable
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.sampling import StepSampling
from wire.steps import SliceResult, Step, StepResult

CPU = torch.device("cpu")
TOLERANCE = 1e-4
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "mistral": {},
    "deepseek_v3": {"first_k_dense_replace": 99},
}
"""Norms of heads, windows, several block groups, and latents."""
SAMPLED = StepSampling(temperature=0.9, top_k=20, seed=5)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    """Torch in the place of Triton, and short parts of keys: sequences have up to 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "KEY_SPLIT", 8)
        patch.setattr(attention_work, "CHUNK_SPLIT", 16)
        use_torch_kernels(patch)
        yield


SLOWER = ("qwen3", "mistral")
"""Much like the others; for every change, these are not computed."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.full] * (name in SLOWER)) for name in FAMILIES],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    return make_family(tmp_path_factory.mktemp(family) / "model", family, num_layers=3, **FAMILIES[family])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("llama") / "model", "llama", num_layers=3)


def assignment_of(directory: Path, **limits: Any) -> Assignment:
    """The only stage: tokens in, tokens out."""
    found = new_assignment(directory, stage=0, num_stages=1)
    return replace(found, max_step_tokens=96, max_step_sequences=12, num_blocks=160, **limits)


class Twins:
    """One stage twice, with the same steps: eagerly, and recorded."""

    def __init__(self, assignment: Assignment, **options: Any) -> None:
        self.stage = Stage(assignment)
        self.recorder = TapeRecorder()
        self.eager = staged_executor(assignment, FakeQueue(), CPU, new_kernels=by_triton)
        self.recorded = staged_executor(
            assignment, FakeQueue(), CPU, new_kernels=by_triton, recorder=self.recorder, **options
        )
        for executor in (self.eager, self.recorded):
            fill(executor, float("nan"))
        self.written: list[Any] = []
        compute, self.epoch = compute_of(self.recorded), 0
        check_writes = compute._check_writes

        def note(arrays: list[StepArrays]) -> None:
            self.written = [part.slots for part in arrays]
            check_writes(arrays)

        compute._check_writes = note
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.stage.begin(self.epoch)
        for executor in (self.eager, self.recorded):
            executor.begin_epoch(self.epoch, stage=0)

    def steps(self, prompts: list[tuple[int, int, int]]) -> Iterator[Step]:
        """Steps of sequences (number of the step before which they come, tokens, tokens to generate)."""
        log, waiting = self.stage.log, sorted(prompts)
        for number in range(1000):
            while waiting and waiting[0][0] <= number:
                _, length, max_tokens = waiting.pop(0)
                tokens = tuple((7 * length + index) % 90 for index in range(length))
                log.add(tokens, sampling=SAMPLED if length % 2 else GREEDY, max_tokens=max_tokens)
            if (step := log.scheduler.next_step(0.0)) is None:
                if not waiting:
                    return
                continue
            answers = [
                SliceResult(part.sequence, part.restart_count, 11 + part.first_position)
                for part in step.slices
                if part.is_sampled
            ]
            log.complete(StepResult.of(step.epoch, step.step_id, answers))
            yield step

    def check(self, step: Step) -> None:
        """Both have the same result, the same pages, and wrote nothing else."""
        before = [pages.clone() for pages in stores(self.recorded)]
        expected = self.eager.run(Frame(step, ()))
        assert comparable(self.recorded.run(Frame(step, ()))) == comparable(expected)
        self.check_pages(before)

    def check_pages(self, before: list[Tensor]) -> None:
        """The last page is spare."""
        both = zip(stores(self.recorded), stores(self.eager), strict=True)
        for (mine, other), was, slots in zip(both, before, self.written, strict=True):
            torch.testing.assert_close(mine[:, :-1], other[:, :-1], rtol=0, atol=TOLERANCE, equal_nan=True)
            is_kept = torch.ones(mine.shape[1] * mine.shape[4], dtype=torch.bool)
            is_kept[torch.from_numpy(slots)] = False
            is_kept[-mine.shape[4] :] = False
            by_slot = (x.permute(1, 4, 0, 2, 3, 5).flatten(0, 1)[is_kept] for x in (mine, was))
            torch.testing.assert_close(*by_slot, rtol=0, atol=0, equal_nan=True)


def compute_of(executor: StepExecutor) -> Any:
    return executor._compute


def stores(executor: StepExecutor) -> list[Tensor]:
    """Pages of each block group, [layers, blocks, ...]."""
    return [pages._store for pages in compute_of(executor)._pages.groups]


def fill(executor: StepExecutor, value: float) -> None:
    for store in stores(executor):
        store.fill_(value)


_twins: dict[Path, Twins] = {}

PROMPTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=14
)


@pytest.mark.matrix(1)
@settings(max_examples=5, deadline=None)
@given(prompts=PROMPTS)
def test_padding_and_recording_change_nothing(directory: Path, prompts: list[tuple[int, int, int]]) -> None:
    """Graphs and garbage of earlier examples stay, as in a stage that serves."""
    twins = _twins.setdefault(directory, Twins(assignment_of(directory)))
    twins.begin()
    for step in twins.steps(prompts):
        twins.check(step)


@pytest.mark.matrix(1)
def test_most_steps_are_replayed(directory: Path) -> None:
    """Decodes of all families, and prompts of all but latents, whose prompts torch computes."""
    twins = Twins(assignment_of(directory))
    twins.recorded._compute.record_graphs()  # type: ignore[attr-defined]
    steps = list(twins.steps([(0, 20, 12), (0, 3, 12), (3, 30, 9), (5, 40, 5), (6, 3, 4)]))
    for step in steps:
        twins.check(step)
    counts = twins.recorded.stats.graphs
    assert counts is not None and counts.num_replayed == twins.recorder.num_replays
    assert counts.num_replayed + counts.num_eager == len([step for step in steps if step.num_slices])
    assert counts.num_recorded == len(twins.recorder.tapes) < 12
    assert counts.num_replayed >= 5
    assert counts.eager[EagerReason.FIRST] + counts.eager[EagerReason.NO_SIZE] == counts.num_eager
    assert {size.num_tokens for size in counts.sizes if not size.has_prompts} <= {1, 2, 4, 8, 12}
    kinds = {bucket.is_decode for bucket in graphs_of(twins)._graphs}
    assert kinds == ({True} if "deepseek" in str(directory) else {True, False})


def graphs_of(twins: Twins) -> StepGraphs:
    found: StepGraphs = compute_of(twins.recorded)._graphs
    return found


@pytest.mark.matrix(1)
def test_what_is_recorded_is_the_same_for_all_steps_of_a_size(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operators, values of the host and memory, whatever the lengths, pages and positions."""
    twins = Twins(assignment_of(directory))
    tapes: dict[StepBucket, Any] = {}
    advance, num_compared = StepGraphs.advance, 0

    def recorded_again(graphs: StepGraphs, hidden: Tensor, step: GraphStep, packed: Tensor) -> Tensor:
        nonlocal num_compared
        found = advance(graphs, hidden, step, packed)
        TapeRecorder.capture(again := TapeRecorder(), lambda: graphs._run(step))
        (tape,) = again.tapes
        first = tapes.setdefault(step.bucket, tape)
        assert [call.without_tensors() for call in tape.calls] == [
            call.without_tensors() for call in first.calls
        ]
        assert tape.outside == first.outside
        num_compared += tape is not first
        return found

    monkeypatch.setattr(StepGraphs, "advance", recorded_again)
    for step in twins.steps([(0, 20, 12), (0, 3, 12), (3, 30, 9), (5, 40, 5), (6, 3, 4)]):
        twins.check(step)
    assert num_compared >= 5


def test_later_steps_do_not_overwrite_a_result(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of values look at it when the step has ended, and others may have been begun by then."""
    twins, results = Twins(assignment_of(llama)), []
    advance = StepGraphs.advance

    def kept(*arguments: Any) -> Tensor:
        found = advance(*arguments)
        results.append((found, found.clone()))
        return found

    monkeypatch.setattr(StepGraphs, "advance", kept)
    for step in failing_steps(twins):
        twins.check(step)
    assert len(results) == 4
    assert all(torch.equal(found, copy) for found, copy in results)


def failing_steps(twins: Twins) -> list[Step]:
    return list(twins.steps([(0, 3, 4), (0, 4, 4)]))


def test_a_size_that_cannot_be_recorded_runs_eagerly(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(assignment_of(llama))
    twins.recorder.failure = RuntimeError("operation not permitted when stream is capturing")
    for step in failing_steps(twins):
        twins.check(step)
    twins.recorder.failure = None
    counts = twins.recorded.stats.graphs
    eager = {EagerReason.FIRST: 2, EagerReason.FAILED: 2}
    assert counts == GraphCounts(eager=dict.fromkeys(EagerReason, 0) | eager, num_failed=2)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2  # not one per step
    assert "no CUDA graph for steps of 2 decodes" in lines[1]
    assert "operation not permitted when stream is capturing: they run eagerly" in lines[1]


def test_a_device_that_fails_while_recording_fails_the_step(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    twins.recorder.failure = RuntimeError("capture was invalidated")
    twins.recorder.broken = DeviceError("the context is poisoned")
    with pytest.raises(StepFault, match="the context is poisoned") as failed:
        twins.recorded.run(Frame(failing_steps(twins)[0], ()))
    assert failed.value.kind is StepFaultKind.DEVICE


@pytest.mark.parametrize("limit", ["bytes", "graphs"])
def test_graphs_stay_within_their_limits(
    limit: str, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twins = Twins(assignment_of(llama), budget_bytes=1000)
    twins.recorder.num_held_bytes = 1001 if limit == "bytes" else 1000
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", MAX_GRAPHS if limit == "bytes" else 1)
    for step in failing_steps(twins):
        twins.check(step)
    counts = twins.recorded.stats.graphs
    assert counts is not None
    assert counts.num_recorded == (0 if limit == "bytes" else 1)
    assert counts.pool_bytes == twins.recorder.num_held_bytes
    assert counts.eager[EagerReason.LIMIT] == 2
    assert "no CUDA graph for steps of 2 decodes" in caplog.text


def test_longer_prompts_run_eagerly(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    steps = list(twins.steps([(0, 50, 1), (0, 45, 1)]))
    assert steps[0].num_tokens > 64
    for step in steps:
        twins.check(step)
    eager = {EagerReason.NO_SIZE: 1}
    assert twins.recorded.stats.graphs == GraphCounts(eager=dict.fromkeys(EagerReason, 0) | eager)


def test_sizes_are_told_with_their_graphs(llama: Path) -> None:
    """Two graphs of one size differ in attention work."""
    twins = Twins(assignment_of(llama))
    for step in twins.steps([(0, 3, 10), (0, 12, 3)]):
        twins.check(step)
    counts = twins.recorded.stats.graphs
    assert counts is not None and counts.num_recorded == len(twins.recorder.tapes)
    assert counts.sizes[0] == GraphSize(num_tokens=1, has_prompts=False, num_graphs=2)
    assert counts.sizes[-1] == GraphSize(num_tokens=64, has_prompts=True, num_graphs=1)


def test_closing_a_stage_drops_its_graphs(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    compute = compute_of(twins.recorded)
    compute.close()
    assert not hasattr(compute, "_graphs")


def test_packed_arrays_fit_the_buffer_of_the_largest_step(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    graphs = graphs_of(twins)
    sizes = [len(step.packed) for step in graphs._largest]
    assert max(sizes) == graphs.packed_bytes
    assert all(np.count_nonzero(step.packed) for step in graphs._largest)


def test_sizes_of_recorded_steps() -> None:
    assert decode_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert decode_sizes(64)[-2:] == (56, 64)
    assert (decode_sizes(6), decode_sizes(1)) == ((1, 2, 4, 6), (1,))
    assert (mixed_sizes(2048), mixed_sizes(300), mixed_sizes(63)) == ((64, 128, 256, 512), (64, 128, 256), ())
