"""The one routine of every role: what it refuses, what it answers, and that a refused epoch stays refused."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.scheduler.sequence import SequenceState
from kvcache import PartialBlock, Use
from stage_worker import validation
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import DeviceError, HandedOn, StageOutput
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_loader import WorkerResources, load_stage
from stage_worker.model.decoder import DecoderStage
from stage_worker.sampling import SampledStep, Sampler
from stage_worker.validation import StepSlices
from stageline_rpc.internal.v1 import step_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.step_slices import all_signals, with_slices
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import RequestId, SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import (
    Grows,
    Prefill,
    SequenceSignal,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
    pack_grow,
)

HIDDEN_SIZE = 64
SAMPLINGS = (GREEDY, StepSampling(temperature=1.0, seed=7), StepSampling(temperature=0.0, logprobs=2))
RESOURCES = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 30, model_directory=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


class Stage:
    """An executor with a coordinator's log for it, in epoch 1."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.executor: StepExecutor = load_stage(assignment, RESOURCES).executor
        self.begin(1)

    def begin(self, epoch: int) -> None:
        self.executor.begin_epoch(epoch, stage=self.assignment.stage)
        self.log = Log(self.assignment)
        self.log.begin(epoch)

    def frame(self, step: Step) -> Frame:
        takes_hidden = not self.assignment.role.has_embeddings and step.slices
        hidden = hidden_for(step, HIDDEN_SIZE) if takes_hidden else ()
        return Frame(step, hidden)

    def run(self, step: Step) -> StageOutput:
        return self.executor.run(self.frame(step))

    def refused(self, step: Step) -> StepFault:
        with pytest.raises(StepFault) as fault:
            self.run(step)
        return fault.value


@pytest.fixture(params=[0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def stage(request: pytest.FixtureRequest, directory: Path) -> Stage:
    return Stage(new_assignment(directory, stage=request.param))


@pytest.fixture
def last(directory: Path) -> Stage:
    return Stage(new_assignment(directory, stage=2))


def test_only_the_last_stage_answers_and_only_for_a_final_chunk(stage: Stage) -> None:
    stage.log.add(tuple(range(40)))
    first = stage.log.step()
    assert [part.is_sampled for part in first.slices] == [False]
    output = stage.run(first)
    stage.log.complete(StepResult.of(1, 0))
    second = stage.log.step()
    assert [part.is_sampled for part in second.slices] == [True]
    final = stage.run(second)
    if stage.assignment.role.has_head:
        assert output == StepResult.of(1, 0)
        assert isinstance(final, StepResult)
        assert [type(entry.outcome) for entry in final.results] == [int]
    else:
        for step, handed_on in ((first, output), (second, final)):
            assert isinstance(handed_on, HandedOn)
            assert handed_on.step_id == step.step_id
            assert handed_on.hidden[0].shape == (step.num_tokens, HIDDEN_SIZE)


def test_more_tokens_or_sequences_than_agreed_are_rejected(stage: Stage) -> None:
    part = StepSlice(SequenceKey(new_request_id(), 0), 0, (1,) * 33, Prefill(0, 33, 33))
    fault = stage.refused(Step.of((part,), epoch=1, step_id=0))
    assert (fault.kind, "33 tokens" in fault.message) == (StepFaultKind.SLICE_SET, True)
    stage.begin(2)
    parts = tuple(StepSlice(SequenceKey(new_request_id(), 0), 0, (1,), Prefill(0, 1, 1)) for _ in range(9))
    fault = stage.refused(Step.of(parts, epoch=2, step_id=0))
    assert (fault.kind, "9 sequences" in fault.message) == (StepFaultKind.SLICE_SET, True)
    assert fault.request_ids == tuple(part.sequence.request_id for part in parts)


def test_a_chunk_that_ends_inside_a_block_is_rejected_unless_it_is_the_last(stage: Stage) -> None:
    sequence = stage.log.add(tuple(range(10)))
    step = stage.log.step()
    part = StepSlice(sequence.key, 0, tuple(range(6)), Prefill(0, 6, 10))
    fault = stage.refused(with_slices(step, (part,)))
    assert (fault.kind, "ends at 6" in fault.message) == (StepFaultKind.SLICE_SET, True)


def test_positions_outside_the_blocks_held_are_rejected(stage: Stage) -> None:
    key = SequenceKey(new_request_id(), 0)
    start = StartRecord(key, 0, 4, (1, 2, 3, 4), GREEDY)
    part = StepSlice(key, 0, (1, 2, 3, 4), Prefill(0, 4, 4))
    fault = stage.refused(Step.of((part,), epoch=1, step_id=0, starts=(start,)))
    assert fault.kind is StepFaultKind.POSITION
    assert "[0, 4)" in fault.message
    assert "hold [0, 0)" in fault.message


def test_a_sequence_longer_than_agreed_is_rejected(stage: Stage) -> None:
    key = SequenceKey(new_request_id(), 0)
    tokens = (1,) * 68
    start = StartRecord(key, 0, 68, tokens, GREEDY)
    part = StepSlice(key, 0, tokens[64:], Prefill(64, 4, 68))
    fault = stage.refused(Step.of((part,), epoch=1, step_id=0, starts=(start,)))
    assert (fault.kind, "the limit is 64" in fault.message) == (StepFaultKind.SLICE_SET, True)


def test_a_rejected_epoch_stays_rejected_until_the_next_begins(stage: Stage) -> None:
    stage.log.add((1, 2, 3))
    step = stage.log.step()
    assert stage.refused(replace(step, step_id=1)).kind is StepFaultKind.STEP_ID
    again = stage.refused(step)
    assert again.kind is StepFaultKind.STEP_ID
    assert "is refused since" in again.message
    stage.begin(2)
    stage.log.add((1, 2, 3))
    stage.run(stage.log.step())
    assert stage.executor.stats.blocks_active == 1
    stage.executor.check_integrity()


@pytest.mark.matrix(1)
def test_a_frame_of_another_epoch_does_not_refuse_the_present_one(stage: Stage) -> None:
    stage.log.add((1, 2, 3))
    step = stage.log.step()
    assert stage.refused(replace(step, epoch=7)).kind is StepFaultKind.EPOCH
    stage.run(step)


def failing_step(stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception) -> StepFault:
    """The fault of a step whose layers raise `error`."""

    def broken(*args: object, **kwargs: object) -> None:
        raise error

    sequence = stage.log.add((1, 2, 3))
    step = stage.log.step()
    with monkeypatch.context() as patch:
        patch.setattr(DecoderStage, "forward", broken)
        fault = stage.refused(step)
    assert (fault.step_id, fault.request_ids) == (0, (sequence.key.request_id,))
    assert str(error) in fault.message
    return fault


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_nothing_is_computed_after_a_device_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError]
) -> None:
    error = kind("CUDA error: an illegal memory access was encountered")
    assert failing_step(stage, monkeypatch, error).kind is StepFaultKind.DEVICE
    with pytest.raises(DeviceError, match="illegal memory access"):
        stage.begin(2)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("no room"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_frees_the_cache_and_the_next_epoch_runs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    freed: list[torch.device] = []
    monkeypatch.setattr("stage_worker.backends.model_compute.free_memory", freed.append)
    assert failing_step(stage, monkeypatch, error).kind is StepFaultKind.OUT_OF_MEMORY
    assert freed == [torch.device("cpu")]
    stage.begin(2)
    stage.log.add((1, 2, 3))
    stage.run(stage.log.step())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("error", [KeyError("a defect"), RuntimeError("mat1 and mat2 shapes")])
def test_an_internal_error_fails_only_the_epoch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert failing_step(stage, monkeypatch, error).kind is StepFaultKind.INTERNAL
    stage.begin(2)
    stage.log.add((1, 2, 3))
    stage.run(stage.log.step())


@pytest.mark.matrix(1)
def test_a_new_epoch_has_no_state(stage: Stage) -> None:
    sequence = stage.log.add((1, 2, 3))
    stage.run(stage.log.step())
    stage.executor.begin_epoch(2, stage=stage.assignment.stage)
    assert stage.executor.stats.blocks_active == 0
    part = StepSlice(sequence.key, 0, (5,), Prefill(3, 1, 4))
    assert "not started" in stage.refused(Step.of((part,), epoch=2, step_id=0)).message


def test_a_finished_sequence_leaves_no_block_and_no_state(stage: Stage) -> None:
    sequence = stage.log.add((1, 2, 3, 4, 5), max_tokens=1)
    step = stage.log.step()
    stage.run(step)
    stage.log.complete(StepResult.of(1, 0, (SliceResult(sequence.key, 0, 9),)))
    stage.run(stage.log.step())
    stats = stage.executor.stats
    assert (stats.blocks_active, stats.blocks_inactive) == (0, 1)
    assert stats.num_steps == 2
    stage.executor.check_integrity()


def decoding(stage: Stage, num_tokens: int) -> SequenceKey:
    """A sequence whose next step grows it, if `num_tokens` fill blocks."""
    sequence = stage.log.add(tuple(range(num_tokens - 1)), max_tokens=64)
    for step_id in range(2):
        step = stage.log.step()
        stage.run(step)
        stage.log.complete(StepResult.of(1, step_id, (SliceResult(sequence.key, 0, 9),)))
    return sequence.key


def test_grows_are_applied_among_the_signals_in_their_place(stage: Stage) -> None:
    key = decoding(stage, 16)
    step = stage.log.step()
    assert (len(step.grows), len(step.signals)) == (1, 0)
    before = stage.executor._tables.pages(key)
    stage.run(step)
    assert stage.executor._tables.pages(key)[:-1] == before
    stage.executor.check_integrity()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_signals_before_and_after_grows_keep_their_order(stage: Stage, position: int) -> None:
    """Another order has another digest."""
    key = decoding(stage, 16)
    other = stage.log.add((1, 2, 3))
    step = stage.log.step()
    assert [entry.sequence for entry in step.signals] == [other.key]
    signals = (SequenceSignal(other.key, Use((PartialBlock(1 << 40),))), *step.signals)
    pool = deepcopy(stage.executor._tables.pool)
    expected = replace(step, signals=signals, grows=replace(step.grows, position=position))
    for entry in all_signals(expected):
        pool.apply(entry.signal)
    fault = stage.refused(replace(expected, digest=step.digest))
    assert fault.kind is StepFaultKind.KV_DIVERGENCE
    assert f"got {pool.digest:016x}" in fault.message
    assert stage.executor._tables.pages(key)


def test_an_impossible_grow_is_a_fault_of_its_sequence(stage: Stage) -> None:
    key = decoding(stage, 16)
    step = stage.log.step()
    ((identity, grow),) = step.grows
    rows = pack_grow(identity, grow._replace(partial=grow.partial + 1))
    fault = stage.refused(replace(step, grows=Grows(rows)))
    assert fault.kind is StepFaultKind.KV_SIGNAL
    assert fault.message.startswith(f"BlockNotHeld for a signal of {key}: sequence {key!r} does not end in ")
    assert fault.request_ids == (key.request_id,)


def test_an_ended_sequence_leaves_no_state_in_the_sampler(last: Stage) -> None:
    """The state left by each of a coordinator's many requests adds up."""
    compute = last.executor._compute
    assert isinstance(compute, ModelCompute)
    assert compute._sampler is not None
    sequence = last.log.add((1, 2, 3), sampling=StepSampling(temperature=1.0, repetition_penalty=1.1))
    last.run(last.log.step())
    assert compute._sampler._live.keys() == {sequence.key}
    last.log.complete(StepResult.of(1, 0, (SliceResult(sequence.key, 0, 9),)))
    last.log.scheduler.drop(sequence, SequenceState.CANCELLED)
    last.run(last.log.step())
    assert not compute._sampler._live


@pytest.mark.matrix(1)
def test_two_sequences_on_one_page_are_rejected_before_anything_is_written(stage: Stage) -> None:
    """Nothing that the accounting allows; the last line of defence where it is wrong all the same."""
    one, two = stage.log.add((1, 2, 3)), stage.log.add((4, 5, 6))
    stage.run(stage.log.step())
    results = tuple(SliceResult(sequence.key, 0, 9) for sequence in (one, two))
    stage.log.complete(StepResult.of(1, 0, results))
    tables, compute = stage.executor._tables, stage.executor._compute
    assert isinstance(compute, ModelCompute)
    before = compute._pages.store(0).clone()
    tables._tables[two.key].pages[0] = tables.pages(one.key)[0]
    fault = stage.refused(stage.log.step())
    assert fault.kind is StepFaultKind.KV_SIGNAL
    assert "expected 2 different ones, got 1" in fault.message
    assert torch.equal(compute._pages.store(0), before)


def test_preempted_sequences_start_again_and_leave_no_block(directory: Path) -> None:
    stage = Stage(replace(new_assignment(directory, stage=1), num_blocks=4))
    sequences = [stage.log.add((first, 2, 3, 4, 5), max_tokens=8) for first in (1, 6)]
    restart_counts = set()
    while (step := stage.log.scheduler.next_step(0.0)) is not None:
        stage.run(step)
        stage.executor.check_integrity()
        sampled = [part for part in step.slices if part.is_sampled]
        restart_counts |= {part.restart_count for part in sampled}
        results = tuple(SliceResult(part.sequence, part.restart_count, 9) for part in sampled)
        stage.log.complete(StepResult.of(1, step.step_id, results))
    assert restart_counts == {0, 1}
    assert [sequence.num_generated_tokens for sequence in sequences] == [8, 8]
    assert stage.executor.stats.blocks_active == 0


def test_parameters_that_no_token_can_be_drawn_with_fail_their_sequence_alone(last: Stage) -> None:
    bad = last.log.add((1, 2, 3), sampling=StepSampling(temperature=1.0, top_p=1.5))
    last.log.add((1, 2, 3))
    result = last.run(last.log.step())
    assert isinstance(result, StepResult)
    failed, good = result.results
    assert isinstance(failed.outcome, SliceError)
    assert failed.sequence == bad.key
    assert (failed.outcome.kind, failed.outcome.stage) == (step_pb2.SliceError.KIND_SAMPLER, 2)
    assert "top_p 1.5" in failed.outcome.message
    assert isinstance(good.outcome, int)


def test_the_hidden_states_that_came_in_are_not_changed(last: Stage) -> None:
    last.log.add((1, 2, 3))
    frame = last.frame(last.log.step())
    before = bytes(frame.hidden[0].data)
    last.executor.run(frame)
    assert bytes(frame.hidden[0].data) == before


@pytest.fixture
def only(directory: Path) -> Stage:
    return Stage(new_assignment(directory, stage=0, num_stages=1))


SCORING = StepSampling(temperature=0.0, logprobs=3, prompt_logprobs=3)


def answers(stage: Stage) -> tuple[SliceResult, ...]:
    """The results of the next step; the log learns them."""
    output = stage.run(stage.log.step())
    assert isinstance(output, StepResult)
    stage.log.complete(output)
    return output.results


def assert_same(one: tuple[TokenLogprobs, ...], other: tuple[TokenLogprobs, ...]) -> None:
    assert [logprob.token for logprob in one] == [logprob.token for logprob in other]
    assert [logprob.rank for logprob in one] == [logprob.rank for logprob in other]
    logprobs = [logprob.logprob for logprob in other]
    assert [logprob.logprob for logprob in one] == pytest.approx(logprobs, abs=1e-5)


def test_scores_in_chunks_equal_scores_of_one_chunk_in_mixed_steps(only: Stage) -> None:
    prompt = tuple(range(1, 31))
    only.log.add(prompt, sampling=SCORING, max_tokens=1, is_scored=True)
    (whole,) = answers(only)
    assert [logprob.token for logprob in whole.prompt_logprobs] == list(prompt[1:])
    only.begin(2)
    neighbour = only.log.add((7, 8, 9), max_tokens=4)
    sequence = only.log.add(prompt, sampling=SCORING, max_tokens=1, is_scored=True)
    first = answers(only)
    assert [result.sequence for result in first] == [neighbour.key, sequence.key]
    assert isinstance(first[0].outcome, int)
    assert first[0].prompt_logprobs == ()
    assert first[1].outcome is None
    second = answers(only)
    assert [result.sequence for result in second] == [neighbour.key, sequence.key]
    assert second[1].outcome == whole.outcome
    assert_same((*first[1].prompt_logprobs, *second[1].prompt_logprobs), whole.prompt_logprobs)


def test_a_sampled_token_is_scored_as_it_was_sampled(only: Stage) -> None:
    prompt = (5, 6, 7, 8, 9)
    only.log.add(prompt, sampling=SCORING, max_tokens=1, is_scored=True)
    (sampled,) = answers(only)
    assert isinstance(sampled.outcome, int)
    assert sampled.logprobs is not None
    assert sampled.logprobs.top[0][0] == sampled.outcome
    only.begin(2)
    only.log.add((*prompt, sampled.outcome), sampling=SCORING, max_tokens=1, is_scored=True)
    (result,) = answers(only)
    assert_same(result.prompt_logprobs[-1:], (sampled.logprobs,))


def test_the_sampler_knows_the_tokens_of_decode_steps(only: Stage) -> None:
    """Without the penalty this checkpoint repeats the same token."""
    penalised = StepSampling(temperature=0.0, repetition_penalty=100.0)
    sequence = only.log.add((1, 2, 3), sampling=penalised, max_tokens=12)
    for _ in range(12):
        answers(only)
    assert len(set(sequence.generated_tokens)) == 12


def decoded(only: Stage, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of sequences that share blocks, arrive one by one and end; and how many decodes were objects."""
    made: list[SequenceKey] = []
    layout = validation._decode_layout
    with monkeypatch.context() as patch:
        patch.setattr(
            validation,
            "_decode_layout",
            lambda tables, key, position: (made.append(key), layout(tables, key, position))[1],
        )
        only.begin(2)
        sequences = []
        for index in range(40):
            if index % 3 == 0 and len(sequences) < 5:
                prompt = (5, 6, 7, 8, 9, 10, 11, 12, *range(index))[: 6 + index]
                sequences.append(only.log.add(prompt, max_tokens=9 + index))
            if (step := only.log.scheduler.next_step(0.0)) is None:
                break
            result = only.run(step)
            assert isinstance(result, StepResult)
            only.log.complete(result)
    return [sequence.generated_tokens for sequence in sequences], len(made)


def test_decodes_as_columns_compute_what_objects_compute(
    only: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_columns, num_made = decoded(only, monkeypatch)
    assert [len(tokens) for tokens in by_columns] == [9, 12, 15, 18, 21]
    assert num_made == 0
    monkeypatch.setattr(StepSlices, "are_decodes_plain", False)
    by_objects, num_made = decoded(only, monkeypatch)
    assert num_made == sum(map(len, by_columns)) - 5
    assert by_objects == by_columns


def test_tokens_as_columns_are_those_of_slices(only: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of decodes alone and with chunks, of plain sequences and others."""
    prepare, num_rows = Sampler.prepare, [0]

    def counted(self: Sampler, step: Step, *, device: torch.device) -> SampledStep:
        sampled = prepare(self, step, device=device)
        num_rows[0] += sampled.rows is not None
        return sampled

    def held(self: Sampler, step: Step, *, device: torch.device) -> SampledStep:
        sampled = prepare(self, step, device=device)
        held = frozenset(range(len(sampled.states)))
        return replace(sampled, rows=None, held=held, are_plain=False)

    def results() -> list[StepResult]:
        only.begin(2)
        found = []
        for index in range(60):
            if index % 4 == 0 and index < 24:
                sampling = SAMPLINGS[index // 4 % len(SAMPLINGS)]
                prompt = tuple(range(5, 9 + index))
                request_id = RequestId(bytes([index]) * 16)
                only.log.add(prompt, sampling=sampling, max_tokens=9, request_id=request_id)
            if (step := only.log.scheduler.next_step(0.0)) is None:
                return found
            result = only.run(step)
            assert isinstance(result, StepResult)
            found.append(result)
            only.log.complete(result)
        return found

    monkeypatch.setattr(Sampler, "prepare", counted)
    by_columns = results()
    assert num_rows[0] > 10
    assert any(result.details for result in by_columns)
    monkeypatch.setattr(Sampler, "prepare", held)
    assert results() == by_columns


def test_late_rows_travel_with_results_and_only_an_empty_step_waits_for_them(
    last: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    row = SliceResult(SequenceKey(new_request_id(), 0), 0, 7)

    def take_late_rows(self: ModelCompute, *, may_wait: bool) -> tuple[SliceResult, ...]:
        asked.append(may_wait)
        return (row,) if may_wait else ()

    monkeypatch.setattr(ModelCompute, "take_late_rows", take_late_rows)
    sequence = last.log.add((1, 2, 3), max_tokens=1)
    result = last.run(last.log.step())
    assert isinstance(result, StepResult)
    assert (result.num_rows, result.late_rows) == (1, ())
    last.log.complete(result)
    assert sequence.state is SequenceState.FINISHED
    assert last.run(last.log.step()) == StepResult(1, 1, late_rows=(row,))
    assert asked == [False, True]
