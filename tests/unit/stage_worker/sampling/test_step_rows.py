"""Rows that a device would sample get the tokens of `Sampler.choose`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.sampling import SampledStep, Sampler, sampler, step_rows
from stage_worker.sampling.logits_processors import LogitEdits, Place, SequenceEdits
from stage_worker.sampling.step_rows import OPEN
from stageline_rpc.internal.v1 import step_pb2
from tests.sampled import PROMPT, STAGE, Row, decode, error_of, key, last_token_of_prefill, start_record
from tests.unit.stage_worker.sampling.test_random_choice import FILTERS, some_logits
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import SliceResult, Step, StepSlice

VOCAB = 64
GREEDY = StepSampling(temperature=0.0)
FILTER_NAMES = ("temperature", "seed", "top_k", "top_p", "min_p", "typical_p")
FILTERED = [
    sampling
    for sampling in FILTERS.values()
    if sampling == replace(GREEDY, **{name: getattr(sampling, name) for name in FILTER_NAMES})
]
PLAIN = [GREEDY, StepSampling(temperature=1.0, seed=3), *FILTERED]
EDITED = {
    "bias": replace(GREEDY, logit_bias=((3, 1.0), (40, 4.5), (7, -2.0))),
    "penalty": replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.3),
    "repetition": StepSampling(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.2, top_k=7),
    "allowed": StepSampling(temperature=1.0, allowed_token_ids=(3, 4, 60), seed=2),
    "bad words": replace(GREEDY, bad_words=((5,), (7, 8), (3,)), logit_bias=((5, 90.0), (8, 80.0))),
    "held back": replace(GREEDY, min_tokens=2, min_tokens_hold_back=(9,), logit_bias=((9, 50.0),)),
    "nothing allowed": replace(GREEDY, allowed_token_ids=(3, 4), bad_words=((3,), (4,))),
    "nothing to draw": StepSampling(temperature=1.0, allowed_token_ids=(3,), bad_words=((3,),), top_p=0.9),
    "logprobs": StepSampling(temperature=1.0, top_p=0.8, logprobs=2, seed=5),
    "edits and logprobs": replace(GREEDY, logit_bias=((3, 100.0),), logprobs=0),
}
HELD = {
    "grammar": replace(GREEDY, grammar=GrammarSpec(definition="x", tokenizer_checksum=1)),
    "problem": replace(GREEDY, top_p=2.0),
}
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
"""Nothing is on a GPU: rows are made as for one."""


def started(*samplings: StepSampling) -> tuple[Sampler, list[StepSlice]]:
    """A sampler, and a decode of each sequence."""
    made = Sampler(vocab_size=VOCAB, stage=STAGE)
    parts = []
    for index, sampling in enumerate(samplings):
        row = Row(sampling=sampling, prompt=PROMPT[: 1 + index % 8], choice=index % 3)
        made.start(start_record(key(index, row.choice), row))
        parts.append(decode(key(index, row.choice), 7, len(row.tokens)))
    return made, parts


def prepared(made: Sampler, parts: list[StepSlice], device: torch.device = CPU) -> SampledStep:
    return made.prepare(Step.of(tuple(parts), epoch=1, step_id=1, digest=0), device=device)


def chosen(
    made: Sampler, parts: list[StepSlice], logits: torch.Tensor, device: torch.device = CPU
) -> list[SliceResult]:
    """Results of decodes, whose rows are sampled as on `device`."""
    step = prepared(made, parts, device)
    tokens = [] if step.rows is None else step.rows.choose(logits, None, placed(step)).tolist()
    settled = made.settle(step, logits, tokens)
    return [
        one if isinstance(one, SliceResult) else SliceResult(part.sequence, part.restart_count, one)
        for part, one in zip(parts, settled, strict=True)
    ]


def placed(step: SampledStep) -> Place:
    """Only the arrays of the step are on the device."""
    assert step.rows is not None
    tensors = {id(array): torch.from_numpy(array) for array in step.rows.arrays}
    return lambda array: tensors[id(array)]


def assert_chosen(samplings: list[StepSampling], logits: torch.Tensor, device: torch.device) -> None:
    found, expected = started(*samplings), started(*samplings)
    for _ in range(3):  # with the tokens so far
        results = expected[0].choose(expected[1], logits)
        assert chosen(*found, logits, device) == list(results)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("max_elements", [2 * VOCAB, 1 << 20])
@given(samplings=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_plain_rows_get_the_tokens_of_slices(
    max_elements: int, device: torch.device, samplings: list[StepSampling], seed: int
) -> None:
    assert len(FILTERED) > 3
    logits = some_logits(20, vocab_size=VOCAB)[seed % 10 :][: len(samplings)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_rows, "MAX_BLOCK_ELEMENTS", max_elements)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        assert_chosen(samplings, logits, device)


@given(
    samplings=st.lists(st.sampled_from([*PLAIN, *EDITED.values(), *HELD.values()]), min_size=1, max_size=9),
    seed=st.integers(0, 99),
    bad_row=st.integers(0, 30),
)
def test_a_device_gets_the_tokens_of_slices(samplings: list[StepSampling], seed: int, bad_row: int) -> None:
    logits = some_logits(20, vocab_size=VOCAB)[seed % 10 :][: len(samplings)].clone()
    if bad_row < len(samplings):
        logits[bad_row, seed % VOCAB] = math.nan
    assert_chosen(samplings, logits, GPU)


@pytest.mark.parametrize("sampling", EDITED.values(), ids=EDITED.keys())
def test_a_device_samples_rows_with_parameters_of_their_own(sampling: StepSampling) -> None:
    made, parts = started(GREEDY, sampling)
    step = prepared(made, parts, GPU)
    assert step.rows is not None
    assert step.held == frozenset()
    tokens = step.rows.choose(some_logits(2, vocab_size=VOCAB), None, placed(step)).tolist()
    assert (tokens[1] == OPEN) == (sampling in (EDITED["nothing allowed"], EDITED["nothing to draw"]))


@pytest.mark.parametrize("sampling", HELD.values(), ids=HELD.keys())
def test_others_are_held_and_their_batch_mates_are_not(sampling: StepSampling) -> None:
    made, parts = started(GREEDY, sampling, GREEDY)
    assert prepared(made, parts, GPU).held == {1}


def test_a_step_uploads_a_limited_number_of_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = replace(GREEDY, logit_bias=tuple((token, 1.0) for token in range(20)))
    most_bytes = 3 * (12 * 20 + 8)
    monkeypatch.setattr(sampler, "MAX_EDIT_BYTES", most_bytes)
    made, parts = started(*[bias] * 5, replace(GREEDY, logit_bias=((1, 1.0),)))
    step = prepared(made, parts, GPU)
    assert step.held == {3, 4, 5}
    assert step.rows is not None
    assert sum(array.nbytes for array in step.rows.arrays) <= most_bytes
    assert_chosen([bias] * 5, some_logits(5, vocab_size=VOCAB), GPU)


@pytest.mark.parametrize("sampling", EDITED.values(), ids=EDITED.keys())
def test_the_bytes_of_edits_are_limited(sampling: StepSampling) -> None:
    row = Row(sampling=sampling, generated=(5, 7, 9, 7))
    edits = SequenceEdits.of(sampling, row.tokens, len(row.prompt))
    if edits is not None:
        arrays = list(LogitEdits({4: edits}, VOCAB).arrays)
        assert 0 < sum(array.nbytes for array in arrays) <= edits.most_bytes
        assert len(arrays) <= 10


@pytest.mark.parametrize(
    "sampling", [EDITED["bias"], EDITED["logprobs"], *HELD.values()], ids=["bias", "logprobs", *HELD]
)
def test_a_cpu_leaves_all_decodes_to_slices_because_of_one(sampling: StepSampling) -> None:
    made, parts = started(GREEDY, sampling)
    assert prepared(made, parts).held == {0, 1}
    assert prepared(made, parts[:1]).held == frozenset()
    chunk = last_token_of_prefill(parts[1].sequence, Row(sampling=sampling))
    assert prepared(made, [parts[0], chunk]).held == {1}


@pytest.mark.parametrize("sampling", [*PLAIN, *EDITED.values()])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_has_no_token(value: float, sampling: StepSampling) -> None:
    logits = some_logits(2, vocab_size=VOCAB).clone()
    logits[1, 5] = value
    first, second = chosen(*started(GREEDY, sampling), logits, GPU)
    assert first.outcome == int(logits[0].argmax())
    assert error_of(second).kind == step_pb2.SliceError.KIND_NON_FINITE_LOGITS


@pytest.mark.parametrize("sampling", PLAIN)
def test_finite_logits_whose_sum_overflows_have_a_token(sampling: StepSampling) -> None:
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 5] = 3.3e38
    assert [result.outcome for result in chosen(*started(sampling), logits, GPU)] == [5]


def test_batches_are_forgotten_when_sequences_start_or_end() -> None:
    made, parts = started(GREEDY, GREEDY)
    assert prepared(made, parts).are_plain
    made.end(parts[1].sequence)
    with pytest.raises(KeyError):
        prepared(made, parts)
    row = Row(sampling=replace(GREEDY, logit_bias=((3, 1.0),)), choice=parts[1].sequence.choice)
    made.start(start_record(parts[1].sequence, row))
    assert not prepared(made, parts).are_plain


def test_a_step_is_settled_after_its_sequences_have_ended() -> None:
    """Several steps are begun before the first of them has ended."""
    logits = some_logits(3, vocab_size=VOCAB)
    logits[2, 5] = math.nan
    made, parts = started(EDITED["bias"], EDITED["logprobs"], HELD["problem"])
    expected = made.choose(parts, logits)
    made, parts = started(EDITED["bias"], EDITED["logprobs"], HELD["problem"])
    step = prepared(made, parts, GPU)
    assert step.rows is not None
    tokens = step.rows.choose(logits, None, placed(step)).tolist()
    for part in parts:
        made.end(part.sequence)
    settled = made.settle(step, logits, tokens)
    assert settled == [expected[0].outcome, expected[1], expected[2]]


def test_a_bounded_number_of_batches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_BATCHES", 3)
    made, parts = started(*[GREEDY] * 8)
    for part in parts:
        prepared(made, [part])
        assert len(made._batches) <= 3


def test_a_plain_sequence_keeps_its_prompt_until_its_first_decode() -> None:
    """Scored chunks need it, and nothing after them."""
    made, parts = started(GREEDY)
    (state,) = made._live.values()
    assert state.prompt
    prepared(made, parts)
    assert state.prompt == ()
