"""Simulated computation: zeros of the right shape, predictable tokens, clear errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import DType
from stage_worker.assignment import ModelShape
from stage_worker.backends.contract import HandedOn
from stage_worker.backends.mock_compute import MockCompute, mock_token
from stage_worker.executor import StepExecutor
from stageline_rpc.internal.v1 import step_pb2
from tests.unit.stage_worker.backends.mock_results import results_of
from tests.unit.stage_worker.backends.mock_stages import (
    EOS,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    MockStages,
    mock_assignment,
)
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import SliceError, StepResult
from wire.tensors import TensorView


@given(st.data())
def test_tokens_are_in_the_vocabulary_and_never_end(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 9))
    eos = data.draw(st.sets(st.integers(0, 9)))
    token, position = data.draw(st.integers(0, vocab_size - 1)), data.draw(st.integers(0, 10**6))
    if eos >= set(range(vocab_size)):
        with pytest.raises(ValueError, match=f"all {vocab_size} tokens of the vocabulary end"):
            mock_token(token, position, vocab_size=vocab_size, eos_token_ids=eos)
        return
    following = mock_token(token, position, vocab_size=vocab_size, eos_token_ids=eos)
    assert 0 <= following < vocab_size
    assert following not in eos
    assert following == mock_token(token, position, vocab_size=vocab_size, eos_token_ids=tuple(eos))


def test_the_next_token_depends_on_the_token_and_its_position() -> None:
    tokens = [mock_token(token, 5, vocab_size=1000) for token in range(50)]
    positions = [mock_token(5, position, vocab_size=1000) for position in range(50)]
    assert len(set(tokens)) == len(set(positions)) == 50


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_hidden_states_have_the_shape_of_the_step_and_last_answers(num_stages: int) -> None:
    stages = MockStages(num_stages)
    one = stages.log.add(tuple(range(10)))
    two = stages.log.add((3,))
    step = stages.log.step()
    *handed_on, result = stages.run(step)
    for output in handed_on:
        assert isinstance(output, HandedOn)
        assert output.step_id == step.step_id
        (tensor,) = output.hidden
        assert (tensor.dtype, tensor.shape) == (DType.BF16, (11, HIDDEN_SIZE))
        assert tensor.size_bytes == len(tensor.data) == 11 * HIDDEN_SIZE * 2
    assert isinstance(result, StepResult)
    expected = [
        mock_token(last, position, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        for last, position in ((9, 9), (3, 0))
    ]
    assert [(entry.sequence, entry.outcome) for entry in result.results] == [
        (one.key, expected[0]),
        (two.key, expected[1]),
    ]


def test_a_middle_stage_forwards_its_input() -> None:
    assignment = mock_assignment(stage=1)
    executor = StepExecutor(assignment, MockCompute(assignment))
    executor.begin_epoch(1, stage=1)
    stages = MockStages(3)
    stages.log.add((1, 2, 3))
    step = stages.log.step()
    hidden = (TensorView(DType.BF16, (3, HIDDEN_SIZE), bytes(range(3 * HIDDEN_SIZE * 2))),)
    output = executor.run(Frame(step, hidden))
    assert isinstance(output, HandedOn)
    assert output.hidden == hidden


def test_a_chunk_that_is_not_the_last_is_not_answered() -> None:
    stages = MockStages(2)
    stages.log.add(tuple(index % VOCAB_SIZE for index in range(40)))
    assert stages.run(stages.log.step())[-1] == StepResult.of(1, 0)
    stages.log.complete(StepResult.of(1, 0))
    (entry,) = stages.run(stages.log.step())[-1].results  # type: ignore[union-attr]
    assert entry.outcome == mock_token(39, 39, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def test_frames_are_checked_as_on_a_real_stage() -> None:
    assignment = mock_assignment(stage=2)
    executor = StepExecutor(assignment, MockCompute(assignment))
    executor.begin_epoch(1, stage=2)
    stages = MockStages(3)
    stages.log.add((1, 2, 3))
    step = stages.log.step()
    narrow = (TensorView(DType.BF16, (3, HIDDEN_SIZE - 1), bytes(3 * (HIDDEN_SIZE - 1) * 2)),)
    with pytest.raises(StepFault) as fault:
        executor.run(Frame(step, narrow))
    assert fault.value.kind is StepFaultKind.SHAPE
    diverged = replace(step, digest=step.digest ^ 1)
    executor.begin_epoch(1, stage=2)
    with pytest.raises(StepFault) as fault:
        executor.run(Frame(diverged, (replace(narrow[0], shape=(3, 6), data=bytes(36)),)))
    assert fault.value.kind is StepFaultKind.KV_DIVERGENCE


GRAMMAR = GrammarSpec(definition="start: /a+/", tokenizer_checksum=1)


@pytest.mark.parametrize(
    ("constraint", "what"),
    [
        ({"sampling": StepSampling(logprobs=0)}, "log-probabilities"),
        ({"sampling": StepSampling(logprobs=5, grammar=GRAMMAR)}, "log-probabilities"),
        ({"sampling": StepSampling(grammar=GRAMMAR)}, "structured output"),
        ({"is_scored": True}, "prompt log-probabilities"),
    ],
)
def test_unsupported_requests_fail_their_sequence_alone(constraint: dict[str, Any], what: str) -> None:
    stages = MockStages(3)
    asking = stages.log.add((1, 2, 3), **constraint)
    stages.log.add((1, 2, 3))
    failed, good = stages.run(stages.log.step())[-1].results  # type: ignore[union-attr]
    assert failed.sequence == asking.key
    error = SliceError(step_pb2.SliceError.KIND_SAMPLER, 2, f"mock stages have no {what}")
    assert failed.outcome == error
    assert good.outcome == mock_token(3, 2, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def test_the_constraints_of_an_ended_sequence_are_forgotten() -> None:
    """The same key can start again without the unsupported constraint."""
    stages = MockStages(1)
    asking = stages.log.add((1, 2, 3), sampling=StepSampling(logprobs=1))
    step = stages.log.step()
    (result,) = stages.run(step)
    assert isinstance(result, StepResult)
    stages.log.complete(result)
    again = stages.log.add((4, 5), request_id=asking.key.request_id)
    assert again.key == asking.key
    (result,) = stages.run(stages.log.step())
    assert isinstance(result, StepResult)
    assert [entry.outcome for entry in result.results] == [
        mock_token(5, 1, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    ]


def test_a_new_epoch_has_its_stage_and_no_sequence() -> None:
    assignment = mock_assignment(stage=2)
    compute = MockCompute(assignment)
    stages = MockStages(1)
    stages.log.add((1, 2, 3), sampling=StepSampling(logprobs=1))
    step = stages.log.step()
    compute.start(step.starts[0])
    hidden = (TensorView(DType.BF16, (3, HIDDEN_SIZE), bytes(3 * HIDDEN_SIZE * 2)),)
    frame = Frame(step, hidden)
    (failed,) = results_of(compute, frame)
    assert isinstance(failed.outcome, SliceError)
    compute.begin_epoch(stage=4)
    (answered,) = results_of(compute, frame)
    assert isinstance(answered.outcome, int)
    compute.start(step.starts[0])
    (failed,) = results_of(compute, frame)
    assert isinstance(failed.outcome, SliceError)
    assert failed.outcome.stage == 4


@pytest.mark.parametrize(("hidden_size", "vocab_size"), [(0, 50), (6, 0), (0, 0)])
def test_a_model_without_sizes_is_rejected(hidden_size: int, vocab_size: int) -> None:
    shape = ModelShape(hidden_size=hidden_size, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=f"got {hidden_size} and {vocab_size}"):
        MockCompute(mock_assignment(stage=0, model_shape=shape))
