"""Tokens that a mock stage samples under sampling constraints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpoint import DType
from stage_worker.assignment import ModelShape
from stage_worker.backends.contract import CudaGraphs, KernelChoice
from stage_worker.backends.mock_compute import MockCompute, MockConstraints, mock_token
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import WorkerConfig
from tests.unit.coordinator.scheduler.pipeline_model import key_of
from tests.unit.stage_worker.backends.mock_results import results_of
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from wire.frames import Frame
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import Decode, Prefill, SliceError, StartRecord, Step, StepResult, StepSlice
from wire.tensors import HiddenStates, TensorView

VOCAB_SIZE = 20
EOS = (0, 7)


def constraints(
    sampling: StepSampling, tokens: tuple[int, ...] = (1, 2), *, num_prompt_tokens: int | None = None
) -> MockConstraints:
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    record = StartRecord(key_of(0), 0, num_prompt, tokens, sampling)
    return MockConstraints(record, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def reachable(sampling: StepSampling) -> set[int | None]:
    made = constraints(sampling)
    return {made.choose(first) for first in range(VOCAB_SIZE)}


def test_default_sampling_has_no_constraints() -> None:
    assert not MockConstraints.are_in(StepSampling(temperature=1.0, top_p=0.5, min_tokens=3))
    assert MockConstraints.are_in(StepSampling(min_tokens=3, min_tokens_hold_back=(5,)))


def test_only_allowed_tokens_are_sampled_and_each_can_be() -> None:
    assert reachable(StepSampling(allowed_token_ids=(3, 9, 15))) == {3, 9, 15}


def test_the_next_allowed_token_in_order_is_sampled() -> None:
    made = constraints(StepSampling(allowed_token_ids=(3, 9, 15)))
    assert [made.choose(first) for first in (0, 3, 4, 15, 16)] == [3, 3, 9, 15, 3]


def test_eos_tokens_are_sampled_only_if_no_other_is_allowed() -> None:
    assert reachable(StepSampling(allowed_token_ids=(0, 3, 7))) == {3}
    assert reachable(StepSampling(allowed_token_ids=(0, 7))) == {0, 7}


def test_the_highest_bias_wins_and_a_negative_one_ranks_below_zero() -> None:
    assert reachable(StepSampling(logit_bias=((4, 1.0), (5, 2.0), (6, 2.0)))) == {5, 6}
    every_other = tuple((token, -1.0) for token in range(0, VOCAB_SIZE, 2))
    assert reachable(StepSampling(logit_bias=every_other)) == set(range(1, VOCAB_SIZE, 2)) - {7}
    both = StepSampling(allowed_token_ids=(2, 3), logit_bias=((2, -100.0), (9, 100.0)))
    assert reachable(both) == {3}
    assert reachable(StepSampling(allowed_token_ids=(2,), logit_bias=((2, -100.0),))) == {2}
    assert reachable(StepSampling(logit_bias=((0, 5.0),))) == {0}
    assert reachable(StepSampling(logit_bias=((4, 0.0),))) == set(range(VOCAB_SIZE)) - set(EOS)


def test_a_bad_word_bans_its_last_token_after_the_others_only() -> None:
    made = constraints(StepSampling(allowed_token_ids=(4, 5), bad_words=((1, 2, 4), (5, 4))))
    assert made.choose(4) == 5
    made.add(3)
    assert made.choose(4) == 4
    made.add(5)
    assert made.choose(4) == 5
    assert reachable(StepSampling(bad_words=((4,),))) == set(range(VOCAB_SIZE)) - {0, 4, 7}


def test_a_bad_word_longer_than_the_history_bans_nothing() -> None:
    made = constraints(StepSampling(allowed_token_ids=(4, 5), bad_words=((9, 1, 2, 4),)))
    assert made.choose(4) == 4


def test_stop_tokens_are_held_back_before_min_tokens() -> None:
    sampling = StepSampling(min_tokens=2, min_tokens_hold_back=(4,), allowed_token_ids=(4, 5))
    made = constraints(sampling)
    assert made.choose(4) == 5
    made.add(5)
    assert made.choose(4) == 5
    made.add(5)
    assert made.choose(4) == 4
    assert constraints(sampling, (1, 2, 5, 5), num_prompt_tokens=2).choose(4) == 4


def test_no_token_is_sampled_if_none_is_allowed() -> None:
    assert reachable(StepSampling(allowed_token_ids=(4,), bad_words=((4,),))) == {None}


FIRST, MIDDLE, LAST = (
    mock_assignment(stage=stage, model_shape=ModelShape(hidden_size=6, vocab_size=20, eos_token_ids=(0, 7)))
    for stage in range(3)
)


def frame_of(*slices: StepSlice, hidden: HiddenStates = ()) -> Frame:
    return Frame(Step.of(slices, epoch=1, step_id=0), hidden)


def test_tokens_are_known_and_never_end_a_sequence() -> None:
    tokens = [
        mock_token(token, position, vocab_size=20, eos_token_ids=(0, 7))
        for token in range(20)
        for position in range(50)
    ]
    assert set(tokens) == set(range(20)) - {0, 7}
    assert mock_token(5, 9, vocab_size=20) == mock_token(5, 9, vocab_size=20)


def test_a_vocabulary_of_eos_tokens_only_is_rejected() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        mock_token(0, 0, vocab_size=2, eos_token_ids=(0, 1))


def test_first_produces_zeros_and_middle_forwards_its_input() -> None:
    part = StepSlice(key_of(0), 0, (1, 2, 3), Prefill(0, 3, 3))
    made = MockCompute(FIRST).compute(frame_of(part), [])
    assert not isinstance(made, StepResult)
    (tensor,) = made
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == (DType.BF16, (3, 6), bytes(36))
    came = (TensorView(DType.BF16, (3, 6), bytes(range(36))),)
    assert MockCompute(MIDDLE).compute(frame_of(part, hidden=came), []) is came


def test_last_answers_sampled_slices_with_known_tokens() -> None:
    unfinished = StepSlice(key_of(0), 0, (1, 2), Prefill(0, 2, 4))
    finished = StepSlice(key_of(1), 3, (4, 5), Prefill(6, 2, 8))
    decoded = StepSlice(key_of(2), 1, (9,), Decode(11))
    results = MockCompute(LAST).compute(frame_of(decoded, unfinished, finished), [])
    assert isinstance(results, StepResult)
    shape: dict[str, Any] = {"vocab_size": 20, "eos_token_ids": (0, 7)}
    assert [(result.sequence, result.restart_count, result.outcome) for result in results.results] == [
        (key_of(2), 1, mock_token(9, 11, **shape)),
        (key_of(1), 3, mock_token(5, 7, **shape)),
    ]


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (StepSampling(logprobs=0), "log-probabilities"),
        (StepSampling(grammar=GrammarSpec(definition="", tokenizer_checksum=1)), "structured output"),
        (StepSampling(presence_penalty=0.5), "penalties"),
        (StepSampling(repetition_penalty=1.5), "penalties"),
    ],
)
def test_parameters_that_need_probabilities_fail_alone(sampling: StepSampling, what: str) -> None:
    compute = MockCompute(LAST)
    compute.start(StartRecord(key_of(0), 0, 1, (1,), sampling))
    compute.start(StartRecord(key_of(1), 0, 1, (1,), StepSampling()))
    step = frame_of(*(StepSlice(key_of(number), 0, (1,), Prefill(0, 1, 1)) for number in range(2)))
    failed, answered = results_of(compute, step)
    assert isinstance(failed.outcome, SliceError)
    assert failed.outcome.message == f"mock stages have no {what}"
    assert isinstance(answered.outcome, int)
    compute.end(key_of(0))
    compute.start(StartRecord(key_of(0), 1, 1, (1,), StepSampling()))
    assert all(isinstance(result.outcome, int) for result in results_of(compute, step))


def test_a_mock_needs_the_shape_of_the_model() -> None:
    with pytest.raises(ValueError, match="got 0 and 20"):
        MockCompute(replace(LAST, model_shape=ModelShape(vocab_size=20)))


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"device": "cuda"}, "--device"),
        ({"num_threads": 2}, "--threads"),
        ({"cpu_set": (0,)}, "--cpu-set"),
        ({"kernels": KernelChoice.PLAIN}, "--kernels"),
        ({"cuda_graphs": CudaGraphs.OFF}, "--cuda-graphs"),
        ({"device": "cuda:1", "num_threads": 2}, "--device and --threads"),
    ],
)
def test_a_mock_worker_rejects_device_options(given: dict[str, Any], flags: str) -> None:
    plain: dict[str, Any] = {
        "coordinator": "127.0.0.1:1",
        "device": "cpu",
        "memory_bytes": None,
        "name": None,
        "listen": None,
        "advertise": None,
        "model_directory": None,
        "num_threads": None,
        "mock": MockSpec(),
    }
    WorkerConfig(**plain)
    with pytest.raises(ValueError, match=f"--mock cannot be used with {flags}$"):
        WorkerConfig(**{**plain, **given})
