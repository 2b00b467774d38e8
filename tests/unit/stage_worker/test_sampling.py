"""Tokens are drawn from exactly the distribution that the filters leave, each row by itself."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stage_worker.sampling.draws import Draw, check_sampling, non_finite_rows, sample
from wire.steps import StepSampling

VOCAB = 40
NUM_DRAWS = 20_000


def some_logits(rows: int, *, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return 2.5 * torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed))


def draws(
    count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 7
) -> list[Draw]:
    sampling = StepSampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return [Draw(sampling, 0, position) for position in range(count)]


def exact_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """In float64 numpy, one token after the other, independent of the code under test."""
    scores = logits.numpy().astype(np.float64) / temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if top_k:
        threshold = scores[order[min(top_k, len(order)) - 1]]
        order = [token for token in order if scores[token] >= threshold]
    weights = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    total = sum(weights.values())
    kept, reached = [], 0.0
    for token in order:
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    probabilities = np.zeros(len(scores))
    for token in kept:
        probabilities[token] = weights[token]
    return probabilities / probabilities.sum()


FILTERS = {
    "temperature-1": (1.0, 0, 1.0),
    "cold": (0.4, 0, 1.0),
    "hot": (3.0, 0, 1.0),
    "top-k": (1.0, 5, 1.0),
    "top-k-1": (1.0, 1, 1.0),
    "top-k-all": (1.0, VOCAB + 10, 1.0),
    "top-p": (1.0, 0, 0.8),
    "tiny-top-p": (1.0, 0, 1e-6),
    "all": (1.7, 12, 0.9),
}


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS.values(), ids=FILTERS.keys())
def test_draws_have_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = some_logits(1)
    expected = exact_probabilities(logits[0], temperature, top_k, top_p)
    tokens = sample(
        logits.expand(NUM_DRAWS, VOCAB),
        draws(NUM_DRAWS, temperature=temperature, top_k=top_k, top_p=top_p),
    )
    counts = Counter(tokens)
    assert all(expected[token] > 0 for token in counts), "a token outside the support"
    likely = [token for token in range(VOCAB) if expected[token] * NUM_DRAWS >= 5]
    assert set(likely) <= set(counts), "a token inside the support is never drawn"
    rest = NUM_DRAWS - sum(counts[token] for token in likely)
    expected_rest = NUM_DRAWS * (1 - expected[likely].sum())
    chi_squared = sum(
        (counts[token] - NUM_DRAWS * expected[token]) ** 2 / (NUM_DRAWS * expected[token]) for token in likely
    )
    if expected_rest > 5:
        chi_squared += (rest - expected_rest) ** 2 / expected_rest
    degrees = len(likely)
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS.values(), ids=FILTERS.keys())
def test_the_exact_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(5):
        logits = some_logits(1, seed=seed)
        scores = TemperatureLogitsWarper(temperature)(None, logits.double())
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1.0 else scores
        np.testing.assert_allclose(
            exact_probabilities(logits[0], temperature, top_k, top_p),
            scores.softmax(dim=-1)[0].numpy(),
            atol=1e-9,
        )


def test_greedy_is_the_most_likely_token_and_the_lowest_id_among_equals() -> None:
    logits = some_logits(3)
    logits[1] = 0.0
    logits[2, [4, 9]] = 99.0
    assert sample(logits, draws(3, temperature=0.0)) == [int(logits[0].argmax()), 0, 4]


def test_a_token_does_not_depend_on_batch_mates() -> None:
    rows = 64
    logits = some_logits(rows, vocab_size=1000)
    kinds = list(FILTERS.values())
    batch = []
    for row in range(rows):
        temperature, top_k, top_p = kinds[row % len(kinds)] if row % 7 else (0.0, 0, 1.0)
        sampling = StepSampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=row % 5)
        batch.append(Draw(sampling, row % 3, row))
    together = sample(logits, batch)
    assert together == [sample(logits[row : row + 1], [batch[row]])[0] for row in range(rows)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [batch[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_a_draw_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros((1, 4096))
    sampling = StepSampling(temperature=1.0, seed=5)
    once = sample(logits, [Draw(sampling, 0, 9)])
    assert once == sample(logits, [Draw(sampling, 0, 9)])
    others = [
        Draw(StepSampling(temperature=1.0, seed=6), 0, 9),
        Draw(sampling, 1, 9),
        Draw(sampling, 0, 10),
    ]
    assert all(sample(logits, [other]) != once for other in others)


def test_the_largest_seed_choice_and_position_are_drawn_with() -> None:
    draw = Draw(StepSampling(temperature=1.0, seed=2**64 - 1), 2**32 - 1, 2**32 - 1)
    assert 0 <= sample(some_logits(1), [draw])[0] < VOCAB


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_of_no_probability_are_never_drawn(top_k: int) -> None:
    """Also not the first or the last one, where the cumulative sum stands still."""
    logits = torch.full((2000, 9), -2000.0)
    logits[:, 3:6] = 0.0
    assert set(sample(logits, draws(2000, top_k=top_k))) == {3, 4, 5}


def test_equals_of_the_kth_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]).expand(2000, 5)
    assert set(sample(logits, draws(2000, top_k=2))) == {1, 2, 3}


def test_extreme_temperatures_are_finite() -> None:
    logits = some_logits(1)
    coldest = float(torch.finfo(torch.float32).tiny)
    assert sample(logits, draws(1, temperature=coldest)) == [int(logits.argmax())]
    assert 0 <= sample(logits, draws(1, temperature=100.0))[0] < VOCAB


def test_non_finite_rows_are_found_and_large_ones_are_not_among_them() -> None:
    logits = some_logits(6)
    logits[1, 3] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, -1] = float("-inf")
    logits[4] = 3e38
    assert non_finite_rows(logits) == [1, 2, 3]


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (StepSampling(temperature=-0.1), "temperature -0.1"),
        (StepSampling(temperature=101.0), "temperature 101"),
        (StepSampling(temperature=math.nan), "temperature nan"),
        (StepSampling(temperature=math.inf), "temperature inf"),
        (StepSampling(temperature=1.0, top_p=0.0), "top_p 0.0"),
        (StepSampling(temperature=1.0, top_p=1.1), "top_p 1.1"),
        (StepSampling(temperature=1.0, top_p=math.nan), "top_p nan"),
        (StepSampling(temperature=1.0, top_k=-1), "top_k -1"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(sampling: StepSampling, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_sampling(sampling)
