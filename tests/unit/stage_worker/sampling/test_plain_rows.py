"""Decodes without parameters of their own get the same tokens as columns as they get as slices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.sampling import Sampler, plain_rows, sampler
from tests.sampled import PROMPT, STAGE, Row, decode, key, start_record, token_of
from tests.unit.stage_worker.sampling.test_random_choice import FILTERS, some_logits
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import Decodes, StepSlice

VOCAB = 64
GREEDY = StepSampling(temperature=0.0)
FILTER_NAMES = ("temperature", "seed", "top_k", "top_p", "min_p", "typical_p")
FILTERED = [
    sampling
    for sampling in FILTERS.values()
    if sampling == replace(GREEDY, **{name: getattr(sampling, name) for name in FILTER_NAMES})
]
PLAIN = [GREEDY, StepSampling(temperature=1.0, seed=3), *FILTERED]
SPECIAL = {
    "bias": replace(GREEDY, logit_bias=((3, 1.0),)),
    "penalty": replace(GREEDY, frequency_penalty=0.5),
    "mask": replace(GREEDY, allowed_token_ids=(3, 4)),
    "logprobs": replace(GREEDY, logprobs=0),
    "grammar": replace(GREEDY, grammar=GrammarSpec(definition="x", tokenizer_checksum=1)),
    "problem": replace(GREEDY, top_p=2.0),
}


def started(*samplings: StepSampling) -> tuple[Sampler, list[StepSlice]]:
    """A sampler, and a decode of each sequence."""
    made = Sampler(vocab_size=VOCAB, stage=STAGE)
    parts = []
    for index, sampling in enumerate(samplings):
        row = Row(sampling=sampling, prompt=PROMPT[: 1 + index % 8], choice=index % 3)
        made.start(start_record(key(index, row.choice), row))
        parts.append(decode(key(index, row.choice), 7, len(row.tokens)))
    return made, parts


def choose_plain(made: Sampler, parts: list[StepSlice], logits: torch.Tensor) -> list[int | None] | None:
    """Tokens of plain decodes, None for a row that is not finite; None if `choose` must sample them."""
    device = torch.device("cpu")
    rows = made.plain_rows(Decodes.of(parts), device=device)
    if rows is None:
        return None
    return rows.settle(logits, rows.choose(logits, torch.from_numpy).tolist())


@pytest.mark.parametrize("max_elements", [2 * VOCAB, 1 << 20])
@given(samplings=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_columns_get_the_tokens_of_slices(
    max_elements: int, samplings: list[StepSampling], seed: int
) -> None:
    assert len(FILTERED) > 3
    logits = some_logits(20, vocab_size=VOCAB)[seed % 10 :][: len(samplings)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_rows, "MAX_BLOCK_ELEMENTS", max_elements)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        by_columns, parts = started(*samplings)
        tokens = choose_plain(by_columns, parts, logits)
        by_slices, parts = started(*samplings)
        assert tokens == [token_of(result) for result in by_slices.choose(parts, logits)]


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL.keys())
def test_a_row_with_parameters_or_a_result_of_its_own_is_left_to_slices(special: StepSampling) -> None:
    made, parts = started(GREEDY, special)
    logits = some_logits(2, vocab_size=VOCAB)
    assert choose_plain(made, parts, logits) is None
    assert choose_plain(made, parts, logits) is None
    assert choose_plain(made, parts[:1], logits[:1]) is not None


@pytest.mark.parametrize("sampling", PLAIN)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_has_no_token(value: float, sampling: StepSampling) -> None:
    made, parts = started(GREEDY, sampling)
    logits = some_logits(2, vocab_size=VOCAB).clone()
    tokens = choose_plain(made, parts, logits)
    assert tokens is not None and None not in tokens
    logits[1, 5] = value
    assert choose_plain(made, parts, logits) == [tokens[0], None]


@pytest.mark.parametrize("sampling", PLAIN)
def test_finite_logits_whose_sum_overflows_have_a_token(sampling: StepSampling) -> None:
    made, parts = started(sampling)
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 5] = 3.3e38
    assert choose_plain(made, parts, logits) == [5]


def test_batches_are_forgotten_when_sequences_start_or_end() -> None:
    made, parts = started(GREEDY, GREEDY)
    logits = some_logits(2, vocab_size=VOCAB)
    assert choose_plain(made, parts, logits) is not None
    made.end(parts[1].sequence)
    with pytest.raises(KeyError):
        choose_plain(made, parts, logits)
    row = Row(sampling=replace(GREEDY, logit_bias=((3, 1.0),)), choice=parts[1].sequence.choice)
    made.start(start_record(parts[1].sequence, row))
    assert choose_plain(made, parts, logits) is None


def test_a_bounded_number_of_batches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_BATCHES", 3)
    made, parts = started(*[GREEDY] * 8)
    for part in parts:
        assert choose_plain(made, [part], some_logits(1, vocab_size=VOCAB)) is not None
        assert len(made._batches) <= 3


def test_a_plain_sequence_keeps_its_prompt_until_its_first_decode() -> None:
    """Scored chunks need it, and nothing after them."""
    made, parts = started(GREEDY)
    (state,) = made._live.values()
    assert state.prompt
    choose_plain(made, parts, some_logits(1, vocab_size=VOCAB))
    assert state.prompt == ()
