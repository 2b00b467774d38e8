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

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint import Checkpoint, DType, ScaledDType
from checkpoint.step_graphs import MAX_GRAPHS, decode_sizes, mixed_sizes
from stage_worker.assignment import Assignment
from stage_worker.backends import step_graphs
from stage_worker.backends.contract import DeviceError, EagerReason, GraphCounts, GraphSize, HandedOn
from stage_worker.backends.model_compute import _Answer
from stage_worker.backends.step_graphs import GraphEnd, GraphKind, GraphStep, StepGraphs
from stage_worker.backends.tensor_views import from_wire, to_wire
from stage_worker.backends.transfers import StepTransfer, field_places
from stage_worker.executor import StepExecutor
from stage_worker.model import attention_work
from stage_worker.model.kernels import by_triton
from stage_worker.model.step_layout import StepArrays
from tests.fake_device import FakeQueue
from tests.families import make_family
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.staged import staged_executor
from tests.tape import TapeRecorder, address, tensors
from tests.torch_kernels import use_torch_kernels
from tests.unit.stage_worker.test_executor import Stage
from tests.unit.stage_worker.test_steps_ahead import comparable
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.sampling import StepSampling
from wire.steps import SliceResult, Step, StepResult, TokenLogprobs
from wire.tensors import WireDType

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
LOGPROBS = TokenLogprobs(11, -1.0, 1, ())
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
        log, waiting, with_logprobs = self.stage.log, sorted(prompts), set[SequenceKey]()
        for number in range(1000):
            while waiting and waiting[0][0] <= number:
                _, length, max_tokens = waiting.pop(0)
                tokens = tuple((7 * length + index) % 90 for index in range(length))
                log.add(tokens, sampling=SAMPLED if length % 2 else GREEDY, max_tokens=max_tokens)
            if (step := log.scheduler.next_step(0.0)) is None:
                if not waiting:
                    return
                continue
            with_logprobs |= {one.sequence for one in step.starts if one.sampling.logprobs is not None}
            answers = [
                SliceResult(
                    *(part.sequence, part.restart_count, 11 + part.first_position),
                    LOGPROBS if part.sequence in with_logprobs else None,
                )
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


@pytest.mark.matrix(0, full=2)
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
    kinds = {kind.bucket.is_decode for kind in graphs_of(twins)._graphs}
    assert kinds == ({True} if "deepseek" in str(directory) else {True, False})


def graphs_of(twins: Twins) -> StepGraphs:
    found: StepGraphs = compute_of(twins.recorded)._graphs
    return found


@pytest.mark.matrix(0, full=3)
def test_what_is_recorded_is_the_same_for_all_steps_of_a_size(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operators, values of the host and memory, whatever the lengths, pages and positions."""
    twins = Twins(assignment_of(directory))
    tapes: dict[GraphKind, Any] = {}
    run, num_compared = StepGraphs.run, 0

    def recorded_again(graphs: StepGraphs, step: GraphStep, packed: Tensor) -> tuple[Tensor, ...]:
        nonlocal num_compared
        found = run(graphs, step, packed)
        TapeRecorder.capture(again := TapeRecorder(), lambda: graphs._run(step))
        (tape,) = again.tapes
        first = tapes.setdefault(step.kind, tape)
        assert [call.without_tensors() for call in tape.calls] == [
            call.without_tensors() for call in first.calls
        ]
        assert tape.outside == first.outside
        num_compared += tape is not first
        return found

    monkeypatch.setattr(StepGraphs, "run", recorded_again)
    for step in twins.steps([(0, 20, 12), (0, 3, 12), (3, 30, 9), (5, 40, 5), (6, 3, 4)]):
        twins.check(step)
    assert num_compared >= 5
    assert {kind.end for kind in tapes if kind.bucket.is_decode} == {GraphEnd.SAMPLED}


def test_later_steps_do_not_overwrite_a_result(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of values look at it when the step has ended, and others may have been begun by then."""
    twins, results = Twins(assignment_of(llama)), []
    take, begin = _Answer.take, _Answer.begin

    def taken(answer: _Answer, tokens: Tensor, padded: Tensor, transfer: StepTransfer) -> None:
        results.append((padded, padded.clone()))
        take(answer, tokens, padded, transfer)

    def begun(answer: _Answer, hidden: Tensor, *others: Any) -> None:
        if compute_of(twins.recorded)._model is answer._model:
            results.append((hidden, hidden.clone()))
        begin(answer, hidden, *others)

    monkeypatch.setattr(_Answer, "take", taken)
    monkeypatch.setattr(_Answer, "begin", begun)
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


@pytest.mark.matrix(1)
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


EXACT = {
    "log-probabilities": replace(GREEDY, logprobs=2),
    "bias": replace(GREEDY, logit_bias=((3, 4.0),)),
    "penalties": replace(GREEDY, repetition_penalty=1.3),
    "bad parameters": replace(GREEDY, top_p=2.0),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sampling", EXACT.values(), ids=EXACT.keys())
def test_steps_whose_results_need_more_than_parameters_are_sampled_beside_the_graph(
    sampling: StepSampling, llama: Path
) -> None:
    twins = Twins(assignment_of(llama))
    for number in range(2):
        twins.stage.log.add((5 + number, 6, 7), sampling=sampling if number else GREEDY, max_tokens=4)
    for step in twins.steps([]):
        twins.check(step)
    ends = {kind.end for kind in graphs_of(twins)._graphs if kind.bucket.is_decode}
    assert ends == {GraphEnd.HIDDEN}


def test_every_random_row_is_drawn_from_the_same_logits_as_in_the_graph(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a graph leaves open: their logits are computed again, with the rows of the padding."""
    twins, shapes = Twins(assignment_of(llama)), []
    model = compute_of(twins.recorded)._model
    picked = model.picked_logits

    def noted(hidden: Tensor, rows: Tensor | None) -> Any:
        shapes.append(len(hidden))
        return picked(hidden, rows)

    monkeypatch.setattr(model, "picked_logits", noted)
    for step in twins.steps([(0, 3, 4), (0, 5, 4), (0, 7, 4)]):
        twins.check(step)
    assert 4 in shapes and 3 not in shapes[1:]


class Sending:
    """FIRST or MIDDLE twice, eagerly and recorded, with hidden states in `wire_dtype`."""

    def __init__(self, directory: Path, stage: int, wire_dtype: WireDType | None) -> None:
        found = new_assignment(directory, stage=stage)
        limits = {"max_step_tokens": 96, "max_step_sequences": 12}
        self.assignment = replace(found, wire_dtype=wire_dtype, **limits)
        self.recorder = TapeRecorder()
        self.eager, self.recorded = (
            staged_executor(self.assignment, FakeQueue(), CPU, new_kernels=by_triton, recorder=recorder)
            for recorder in (None, self.recorder)
        )
        self.frames = [self._frame(step) for step in _sent_steps(self.assignment)]
        for executor in (self.eager, self.recorded):
            executor.begin_epoch(1, stage=stage)

    def _frame(self, step: Step) -> Frame:
        if self.assignment.role.has_embeddings:
            return Frame(step, ())
        (view,) = hidden_for(step, 64)
        hidden = from_wire(view, device=CPU, dtype=torch.float32)
        return Frame(step, (to_wire(hidden, self.assignment.sent_dtype),))

    def outputs(self, frame: Frame) -> list[Tensor]:
        found = [executor.run(frame) for executor in (self.eager, self.recorded)]
        views = [output.hidden[0] for output in found if isinstance(output, HandedOn) and output.hidden]
        return [from_wire(view, device=CPU, dtype=torch.float32) for view in views]


def _sent_steps(assignment: Assignment) -> list[Step]:
    log = Log(assignment)
    log.begin(1)
    found = []
    for number, length in enumerate((3, 20, 1, 9)):
        log.add(tuple(range(2, 2 + length)), sampling=GREEDY, max_tokens=6)
        for _ in range(3 if number == 3 else 1):
            step = log.scheduler.next_step(0.0)
            assert step is not None
            answers = [SliceResult(part.sequence, 0, 5) for part in step.slices if part.is_sampled]
            log.complete(StepResult.of(step.epoch, step.step_id, answers))
            found.append(step)
    return found


@pytest.mark.parametrize("wire_dtype", [None, DType.BF16, ScaledDType.I8, ScaledDType.F8_E4M3])
@pytest.mark.parametrize("stage", [0, 1], ids=["FIRST", "MIDDLE"])
def test_what_a_graph_sends_equals_what_an_eager_step_sends(
    stage: int, wire_dtype: WireDType | None, llama: Path
) -> None:
    """With rounding of the wire: one value in 127, or in 16 of fp8, of the largest of its row."""
    sending = Sending(llama, stage, wire_dtype)
    for frame in [*sending.frames]:
        eager, recorded = sending.outputs(frame)
        share = {None: 1e-5, DType.BF16: 2**-7, ScaledDType.I8: 2 / 127, ScaledDType.F8_E4M3: 1 / 8}
        allowed = share[wire_dtype] * eager.abs().amax(dim=1, keepdim=True)
        assert recorded.shape == eager.shape
        assert bool(((recorded - eager).abs() <= allowed).all())
    assert sending.recorder.num_replays >= 1


@pytest.mark.matrix(1)
@pytest.mark.parametrize("wire_dtype", [None, ScaledDType.I8])
@pytest.mark.parametrize("stage", [0, 1], ids=["FIRST", "MIDDLE"])
def test_a_graph_that_computes_non_finite_values_is_a_fault_of_the_stage(
    stage: int, wire_dtype: WireDType | None, llama: Path
) -> None:
    sending = Sending(llama, stage, wire_dtype)
    for frame in sending.frames[:-1]:
        sending.recorded.run(frame)
    replayed = sending.recorder.num_replays
    with torch.inference_mode():
        for weight in _weights(sending.recorder, sending.assignment):
            weight.fill_(float("nan"))
    with pytest.raises(StepFault) as fault:
        sending.recorded.run(sending.frames[-1])
    assert fault.value.kind is StepFaultKind.NON_FINITE
    assert sending.recorder.num_replays == replayed + 1


def _weights(recorder: TapeRecorder, assignment: Assignment) -> Iterator[Tensor]:
    """Matrices [n, hidden_size] of the layers, as the graphs use them; embeddings have more rows."""
    config = Checkpoint.open(Path(assignment.model_directory)).config
    found = {
        address(tensor): tensor
        for tape in recorder.tapes
        for call in tape.calls
        for tensor in tensors(call.arguments)
        if address(tensor) in tape.outside and tensor.dim() == 2 and tensor.dtype == torch.float32
    }
    for tensor in found.values():
        if tensor.shape[-1] == config.hidden_size != len(tensor) and len(tensor) != config.vocab_size:
            yield tensor


def test_closing_a_stage_drops_its_graphs(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    compute = compute_of(twins.recorded)
    compute.close()
    assert not hasattr(compute, "_graphs")


def test_packed_arrays_fit_the_buffer_of_the_largest_step(llama: Path) -> None:
    twins = Twins(assignment_of(llama))
    graphs = graphs_of(twins)
    sizes = [field_places(step.fields[1:])[-1][1] for step in graphs._largest]
    assert max(sizes) == graphs.packed_bytes
    assert all(field_places(step.fields)[-1][1] <= len(graphs._block) for step in graphs._largest)


def test_sizes_of_recorded_steps() -> None:
    assert decode_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert decode_sizes(64)[-2:] == (56, 64)
    assert (decode_sizes(6), decode_sizes(1)) == ((1, 2, 4, 6), (1,))
    assert (mixed_sizes(2048), mixed_sizes(300), mixed_sizes(63)) == ((64, 128, 256, 512), (64, 128, 256), ())
