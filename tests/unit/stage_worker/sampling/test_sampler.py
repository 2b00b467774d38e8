"""Each sampled slice gets a token for the position after its last one, or an error of its own."""

import math
from dataclasses import replace

import pytest
import torch

from stage_worker.sampling import Sampler
from stageline_rpc.internal.v1 import step_pb2
from tests.sampled import (
    GENERATED,
    PROMPT,
    STAGE,
    Row,
    decode,
    error_of,
    key,
    last_token_of_prefill,
    results_of,
    start_record,
    token_of,
    tokens_of,
)
from tests.unit.stage_worker.sampling.test_random_choice import FILTERS, some_logits
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import Prefill, SliceResult, StepSlice

HOT = StepSampling(temperature=5.0, seed=17)
VOCAB = 40


@pytest.mark.parametrize(
    "part",
    [
        StepSlice(key(1), 0, PROMPT, Prefill(0, 8, 8)),
        StepSlice(key(1), 0, PROMPT[5:], Prefill(5, 3, 8)),
        decode(key(1), 6, 7),
    ],
    ids=["prefill", "last-chunk", "decode"],
)
def test_a_token_is_drawn_for_the_position_that_it_will_have(part: StepSlice) -> None:
    """So a recomputation in one prefill continues with the tokens that decode sampled before."""
    logits = some_logits(1, vocab_size=5000)
    expected = tokens_of(logits, [Row(sampling=HOT)])
    sampler = Sampler(vocab_size=5000, stage=STAGE)
    sampler.start(start_record(key(1), Row(sampling=HOT)))
    (result,) = sampler.choose([part], logits)
    assert [token_of(result)] == expected
    assert expected != tokens_of(logits, [Row(sampling=HOT, prompt=PROMPT[1:])])


@pytest.mark.matrix(8)
@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS.keys())
def test_a_restarted_sequence_samples_as_an_undisturbed_one(
    sampling: StepSampling,
) -> None:
    """The state after decode steps is the state after a start record with the same tokens."""
    steps = 40
    sampling = replace(sampling, logprobs=2)
    logits = some_logits(steps, vocab_size=VOCAB)
    row = Row(sampling=sampling)
    sampler = Sampler(vocab_size=VOCAB, stage=STAGE)
    sampler.start(start_record(key(0), row))
    (result,) = sampler.choose([last_token_of_prefill(key(0), row)], logits[:1])
    for step in range(1, steps):
        position = len(row.tokens)
        row = replace(row, generated=(*row.generated, token_of(result)))
        part = decode(key(0), token_of(result), position)
        (result,) = sampler.choose([part], logits[step : step + 1])
        (again,) = results_of(logits[step : step + 1], [row])
        assert (result.outcome, result.logprobs) == (again.outcome, again.logprobs)


def test_many_new_tokens_are_penalised_as_those_of_a_start_record() -> None:
    """More distinct tokens than the initial capacity."""
    vocab_size, count = 2000, 700
    sampling = StepSampling(repetition_penalty=1.3, frequency_penalty=0.5)
    tokens = tuple(index * 7 % 1500 for index in range(count))
    sampler = Sampler(vocab_size=vocab_size, stage=STAGE)
    sampler.start(start_record(key(0), Row(sampling=sampling)))
    logits = some_logits(count, vocab_size=vocab_size, seed=3)
    for index, token in enumerate(tokens):
        (result,) = sampler.choose([decode(key(0), token, 8 + index)], logits[index : index + 1])
        if index % 50 == 49:
            row = Row(sampling=sampling, generated=tokens[: index + 1])
            assert [token_of(result)] == tokens_of(logits[index : index + 1], [row])


@pytest.mark.parametrize("penalty", [1e-30, 100.0])
def test_penalties_of_huge_logits_stay_finite(penalty: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, 0.0] * 10])
    for temperature in (0.0, 1.0):
        sampling = StepSampling(temperature=temperature, repetition_penalty=penalty)
        assert 0 <= tokens_of(logits, [Row(sampling=sampling)])[0] < 40


def test_errors_stay_with_their_rows() -> None:
    bad = StepSampling(temperature=1.0, top_p=0.0)
    rows = [Row(sampling=sampling, choice=choice) for choice, sampling in enumerate((HOT, HOT, bad, HOT))]
    logits = some_logits(4, vocab_size=5000)
    alone = [tokens_of(logits[row : row + 1], [rows[row]])[0] for row in (0, 3)]
    logits[1, 77] = float("nan")
    results = results_of(logits, rows)
    assert [result.sequence for result in results] == [key(index, index) for index in range(4)]
    assert [token_of(results[0]), token_of(results[3])] == alone
    first, second = error_of(results[1]), error_of(results[2])
    assert (first.kind, first.stage) == (step_pb2.SliceError.KIND_NON_FINITE_LOGITS, STAGE)
    assert "position 8" in first.message
    assert (second.kind, second.stage) == (step_pb2.SliceError.KIND_SAMPLER, STAGE)
    assert "top_p 0.0" in second.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error_under_all_filters(value: float, temperature: float) -> None:
    logits = some_logits(1)
    logits[0, 7] = value
    hidden = replace(FILTERS["bad-words"], temperature=temperature, allowed_token_ids=(1, 2))
    for sampling in (StepSampling(temperature=temperature, top_k=3), hidden):
        (result,) = results_of(logits, [Row(sampling=sampling)])
        assert error_of(result).kind == step_pb2.SliceError.KIND_NON_FINITE_LOGITS


def test_large_logits_are_finite() -> None:
    """Their sum overflows."""
    assert tokens_of(torch.full((1, 40), 3e38), [Row(sampling=StepSampling())]) == [0]


def test_a_step_of_errors_only_samples_nothing() -> None:
    (result,) = results_of(torch.full((1, 10), float("inf")), [Row(sampling=HOT)])
    error_of(result)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("masks", "names"),
    [
        (StepSampling(allowed_token_ids=(4,), bad_words=((4,),)), "allowed_token_ids and bad_words"),
        (
            StepSampling(allowed_token_ids=(4,), min_tokens=3, min_tokens_hold_back=(4,)),
            "allowed_token_ids and min_tokens",
        ),
        (StepSampling(bad_words=tuple((token,) for token in range(VOCAB))), "bad_words"),
    ],
)
def test_without_allowed_tokens_the_error_names_the_constraint(
    masks: StepSampling, names: str, temperature: float
) -> None:
    logits = some_logits(3)
    rows = [
        Row(sampling=HOT),
        Row(sampling=replace(masks, temperature=temperature)),
        Row(sampling=HOT, choice=2),
    ]
    results = results_of(logits, rows)
    error = error_of(results[1])
    assert error.kind == step_pb2.SliceError.KIND_SAMPLER
    assert error.message.startswith("no token is allowed at position 8")
    assert error.message.endswith(f"by {names}")
    assert [token_of(results[i]) for i in (0, 2)] == [
        tokens_of(logits[i : i + 1], [rows[i]])[0] for i in (0, 2)
    ]


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (StepSampling(temperature=-0.1), "temperature -0.1"),
        (StepSampling(temperature=101.0), "temperature 101"),
        (StepSampling(temperature=math.nan), "temperature nan"),
        (StepSampling(temperature=math.inf), "temperature inf"),
        (StepSampling(top_p=0.0), "top_p 0.0"),
        (StepSampling(top_p=1.1), "top_p 1.1"),
        (StepSampling(top_p=math.nan), "top_p nan"),
        (StepSampling(top_k=-1), "top_k -1"),
        (StepSampling(min_p=-0.1), "min_p -0.1"),
        (StepSampling(min_p=math.nan), "min_p nan"),
        (StepSampling(typical_p=0.0), "typical_p 0.0"),
        (StepSampling(typical_p=math.nan), "typical_p nan"),
        (StepSampling(repetition_penalty=0.0), "repetition_penalty 0.0"),
        (StepSampling(repetition_penalty=math.nan), "repetition_penalty nan"),
        (StepSampling(frequency_penalty=2.1), "frequency_penalty 2.1"),
        (StepSampling(presence_penalty=math.nan), "presence_penalty nan"),
        (StepSampling(logit_bias=((3, math.nan),)), "logit_bias nan of token 3"),
        (StepSampling(logit_bias=((3, math.inf),)), "logit_bias inf of token 3"),
        (StepSampling(logit_bias=((3, 101.0),)), "logit_bias 101.0 of token 3"),
        (StepSampling(logit_bias=((40, 1.0),)), "logit_bias has token 40"),
        (StepSampling(logit_bias=((3, 1.0), (3, 2.0))), "twice"),
        (StepSampling(allowed_token_ids=(3, 40)), "allowed_token_ids has token 40"),
        (StepSampling(bad_words=((3, 40),)), "bad_words has token 40"),
        (StepSampling(bad_words=((),)), "empty word"),
        (StepSampling(min_tokens=-1), "min_tokens -1"),
        (StepSampling(min_tokens=1, min_tokens_hold_back=(41,)), "min_tokens_hold_back has token 41"),
        (StepSampling(logprobs=21), "logprobs 21"),
        (StepSampling(prompt_logprobs=21), "prompt_logprobs 21"),
        (StepSampling(grammar=GrammarSpec(definition="", tokenizer_checksum=0)), "structured output is not"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_no_token_can_be_drawn_with_are_an_error_of_their_row(
    sampling: StepSampling, says: str
) -> None:
    rows = [Row(sampling=HOT), Row(sampling=sampling)]
    good, bad = results_of(some_logits(2), rows)
    token_of(good)
    assert error_of(bad).kind == step_pb2.SliceError.KIND_SAMPLER
    assert says in error_of(bad).message


def test_tokens_outside_the_vocabulary_are_an_error_of_their_row() -> None:
    good, bad = results_of(some_logits(2), [Row(sampling=HOT), Row(sampling=HOT, prompt=(1, 40))])
    token_of(good)
    assert "token 40" in error_of(bad).message


def test_an_ended_sequence_is_forgotten_and_may_start_again() -> None:
    logits = some_logits(1)
    sampling = StepSampling(bad_words=((int(logits.argmax()),),))
    sampler = Sampler(vocab_size=VOCAB, stage=STAGE)
    answers: list[SliceResult] = []
    for row in (Row(sampling=sampling), Row(sampling=StepSampling())):
        sampler.start(start_record(key(0), row))
        answers += sampler.choose([last_token_of_prefill(key(0), row)], logits)
        sampler.end(key(0))
    assert token_of(answers[0]) != token_of(answers[1]) == int(logits.argmax())


def test_a_decode_token_counts_once() -> None:
    """frequency_penalty counts every generated occurrence, separate from the prompt."""
    logits = torch.zeros((1, VOCAB))
    logits[0, 5] = 1.0
    sampler = Sampler(vocab_size=VOCAB, stage=STAGE)
    row = Row(sampling=StepSampling(frequency_penalty=0.4), prompt=(5, 5, 5))
    sampler.start(start_record(key(0), row))
    parts = [last_token_of_prefill(key(0), row), *(decode(key(0), 5, 3 + step) for step in range(3))]
    chosen = [token_of(sampler.choose([part], logits)[0]) for part in parts]
    assert chosen == [5, 5, 5, 0]


def test_generated_tokens_of_a_start_record_count_as_generated() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, 5] = 1.0
    sampling = StepSampling(presence_penalty=1.5)
    assert tokens_of(logits, [Row(sampling=sampling, prompt=(5, 1), generated=(2,))]) == [5]
    assert tokens_of(logits, [Row(sampling=sampling, prompt=(2, 1), generated=GENERATED)]) == [0]
