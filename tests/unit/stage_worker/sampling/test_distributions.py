"""Sampled tokens fit the exact probabilities, for each filter alone and combined; common bugs show."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from stage_worker.sampling import Sampler
from tests.unit.stage_worker.sampling.draw_statistics import Counts, p_value
from tests.unit.stage_worker.sampling.mistakes import MISTAKES
from tests.unit.stage_worker.sampling.reference_distribution import distribution
from tests.unit.stage_worker.sampling.scenarios import (
    GENERATED,
    SCENARIOS,
    VOCAB,
    WITHOUT_HISTORY,
    Scenario,
)
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, SliceResult, StartRecord, StepSlice

NUM_DRAWS = 4000
FITS = 1e-4
"""Right draws have p-values above this (for these seeds, which never change) ..."""
DOES_NOT_FIT = 1e-12
"""... and wrong ones below this: nothing is near the border."""


def key(number: int, choice: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(number.to_bytes(16)), choice)


def token_of(result: SliceResult) -> int:
    assert isinstance(result.outcome, int), result.outcome
    return result.outcome


def start(sampler: Sampler, sequence: SequenceKey, scenario: Scenario, sampling: StepSampling) -> StepSlice:
    """A sequence with all tokens so far, and its last slice of prefill."""
    tokens = scenario.context.tokens
    sampler.start(StartRecord(sequence, 0, len(scenario.prompt), tokens, sampling))
    return StepSlice(sequence, 0, tokens[-1:], Prefill(len(tokens) - 1, 1, len(tokens)))


def seeds(name: str, count: int) -> list[int]:
    """Small seeds from 0 on, and 64-bit seeds that differ between scenarios."""
    generator = np.random.default_rng(list(name.encode()))
    large = generator.integers(0, 2**64, count - count // 4, dtype=np.uint64)
    return [*range(count // 4), *large.tolist()]


def draw(scenario: Scenario, seeds: Sequence[int]) -> list[int]:
    """Tokens of one batch with a row per seed."""
    sampler = Sampler(vocab_size=len(scenario.logits), stage=0)
    slices = [
        start(sampler, key(row), scenario, replace(scenario.sampling, seed=seed))
        for row, seed in enumerate(seeds)
    ]
    logits = scenario.logits.expand(len(slices), -1)
    return [token_of(result) for result in sampler.choose(slices, logits)]


def counted(tokens: Sequence[int], scenario: Scenario) -> Counts:
    return np.bincount(tokens, minlength=len(scenario.logits)).astype(np.int64)


@cache
def sampled_counts(name: str) -> Counts:
    """Count of each token over many seeds."""
    scenario = SCENARIOS[name]
    return counted(draw(scenario, seeds(name, NUM_DRAWS)), scenario)


@pytest.mark.matrix(4, full=12)
@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_of_many_seeds_fit_the_exact_probabilities(name: str) -> None:
    shares, counts = SCENARIOS[name].shares, sampled_counts(name)
    assert not counts[shares == 0].any(), "a token that the filters take out is drawn"
    assert p_value(counts, shares) > FITS


@pytest.mark.parametrize("name", ["plain", "top-p", "warpers", "large-warpers"])
def test_tokens_of_one_seed_fit_over_positions_and_choices(name: str) -> None:
    """64 choices of one request, decoded together."""
    scenario, num_choices = WITHOUT_HISTORY[name], 64
    sampler = Sampler(vocab_size=len(scenario.logits), stage=0)
    sampling = replace(scenario.sampling, seed=42)
    slices = [start(sampler, key(0, choice), scenario, sampling) for choice in range(num_choices)]
    tokens: list[int] = []
    for position in range(len(scenario.prompt), len(scenario.prompt) + NUM_DRAWS // num_choices):
        results = sampler.choose(slices, scenario.logits.expand(num_choices, -1))
        tokens += [token_of(result) for result in results]
        slices = [
            StepSlice(part.sequence, 0, (token,), Decode(position))
            for part, token in zip(slices, tokens[-num_choices:], strict=True)
        ]
    assert p_value(counted(tokens, scenario), scenario.shares) > FITS


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "warpers"])
def test_tokens_of_one_sequence_fit_over_positions(name: str) -> None:
    scenario = WITHOUT_HISTORY[name]
    sampler = Sampler(vocab_size=VOCAB, stage=0)
    part = start(sampler, key(0), scenario, replace(scenario.sampling, seed=3))
    tokens: list[int] = []
    for position in range(len(scenario.prompt), len(scenario.prompt) + 2000):
        tokens.append(token_of(sampler.choose([part], scenario.logits[None])[0]))
        part = StepSlice(part.sequence, 0, (tokens[-1],), Decode(position))
    assert p_value(counted(tokens, scenario), scenario.shares) > FITS


@pytest.mark.matrix(0)
@pytest.mark.parametrize("name", ["penalties", "bad-words", "min-tokens-reached", "masks", "everything"])
def test_decoded_tokens_count_like_those_of_a_start_record(name: str) -> None:
    """Sequences start from the prompt and take all generated tokens as decode input."""
    scenario, num_rows = SCENARIOS[name], 2000
    sampler = Sampler(vocab_size=VOCAB, stage=0)
    before = replace(scenario, generated=())
    row_seeds = seeds(f"decoded {name}", num_rows)
    slices = [
        start(sampler, key(row), before, replace(scenario.sampling, seed=seed))
        for row, seed in enumerate(row_seeds)
    ]
    logits = scenario.logits.expand(num_rows, -1)
    results = sampler.choose(slices, logits)
    for position, token in enumerate(GENERATED, start=len(scenario.prompt)):
        # The sampled tokens do not matter: the sequence continues with these.
        slices = [StepSlice(part.sequence, 0, (token,), Decode(position)) for part in slices]
        results = sampler.choose(slices, logits)
    tokens = [token_of(result) for result in results]
    assert tokens == draw(scenario, row_seeds)
    assert p_value(counted(tokens, scenario), scenario.shares) > FITS


def test_rows_of_mixed_kinds_get_the_tokens_of_uniform_batches() -> None:
    names = [name for name, scenario in SCENARIOS.items() if len(scenario.logits) == VOCAB]
    num_draws = 40
    alone = {name: draw(SCENARIOS[name], seeds(name, num_draws)) for name in names}
    sampler = Sampler(vocab_size=VOCAB, stage=0)
    slices: list[StepSlice] = []
    wanted, logits = [], []
    for row in range(num_draws):
        for name in names:
            scenario = SCENARIOS[name]
            sampling = replace(scenario.sampling, seed=seeds(name, num_draws)[row])
            slices.append(start(sampler, key(len(slices)), scenario, sampling))
            wanted.append(alone[name][row])
            logits.append(scenario.logits)
    assert [token_of(result) for result in sampler.choose(slices, torch.stack(logits))] == wanted


@pytest.mark.matrix(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_noticed(mistake: str) -> None:
    filters, names = MISTAKES[mistake]
    for name in names:
        scenario = SCENARIOS[name]
        wrong = distribution(scenario.logits.numpy(), scenario.context, filters)
        assert p_value(sampled_counts(name), wrong) < DOES_NOT_FIT, name
