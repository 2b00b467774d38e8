"""The uniform numbers are a pure function of their three words, inside (0, 1), and spread evenly."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling import random_choice
from stage_worker.sampling import random_choice as reach_module
from stage_worker.sampling.random_choice import Edge, cumulative_cutoff, uniforms
from tests.sampled import GENERATED, Row, expected_probabilities, frequencies, tokens_of
from wire.sampling import StepSampling

KNOWN = (0.13870941014555427, 0.9234643141878413)
"""Worked out with Python's unbounded integers, not with numpy."""


def draw(seed: int, choice: int, position: int) -> float:
    arrays = (np.array([word], dtype=np.uint64) for word in (seed, choice, position))
    return float(uniforms(*arrays)[0])


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    together = uniforms(words(1, 2, 3), words(0, 0, 7), words(5, 6, 7))
    assert together.tolist() == [draw(1, 0, 5), draw(2, 0, 6), draw(3, 7, 7)]


def test_known_values_never_change() -> None:
    """A recomputed sequence continues with the same tokens on any version of a worker."""
    assert draw(0, 0, 0) == KNOWN[0]
    assert draw(2**64 - 1, 3, 1000) == KNOWN[1]


@pytest.mark.parametrize("word", [0, 1, 2, 2**32, 2**63, 2**64 - 1])
def test_extreme_words_stay_inside_the_open_interval(word: int) -> None:
    for seed, choice, position in ((word, 0, 0), (0, word, 0), (0, 0, word), (word, word, word)):
        assert 0.0 < draw(seed, choice, position) < 1.0


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_the_extremes_of_the_hash_stay_inside_the_open_interval(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_choice, "_mixed", lambda values: np.full_like(values, word))
    assert 0.0 < draw(1, 2, 3) < 1.0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_consecutive_words_are_spread_evenly_and_unrelated(axis: int) -> None:
    """Chi-squared over 64 bins, and no correlation of neighbours, along each of the three words."""
    count = 65536
    columns = [np.full(count, 12345, dtype=np.uint64) for _ in range(3)]
    columns[axis] = np.arange(count, dtype=np.uint64)
    values = uniforms(*columns)
    observed, _ = np.histogram(values, bins=64, range=(0, 1))
    expected = count / 64
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    assert chi_squared < 63 + 5 * np.sqrt(2 * 63)
    correlation = float(np.corrcoef(values[:-1], values[1:])[0, 1])
    assert abs(correlation) < 5 / np.sqrt(count)


def test_the_three_words_are_not_interchangeable() -> None:
    assert (
        len({draw(1, 2, 3), draw(1, 3, 2), draw(2, 1, 3), draw(3, 2, 1), draw(2, 3, 1), draw(3, 1, 2)}) == 6
    )


WIDTH = 3000


def edge_by_hand(keys: Tensor, masses: Tensor, target: float) -> tuple[float, float, int]:
    """Key, mass below it and number of ties of one row, computed token by token."""
    order = sorted(range(len(keys)), key=lambda index: float(keys[index]))
    below = reached = 0.0
    for index in order:
        reached += float(masses[index])
        if reached >= target:
            key = float(keys[index])
            below = sum(float(masses[other]) for other in order if float(keys[other]) < key)
            return key, below, sum(float(candidate) == key for candidate in keys)
    raise AssertionError("the target is above the whole mass")


def found(edge: Edge, row: int) -> tuple[float, float, int]:
    return float(edge.key[row]), float(edge.mass_below[row]), int(edge.num_equal[row])


@pytest.mark.parametrize("span", [0.01, 10.0, 1e6, 1e-38])
@pytest.mark.parametrize("step", [0.0, 0.01, 0.5], ids=["all-different", "some-equal", "many-equal"])
def test_edges_equal_those_of_a_walk_in_key_order(step: float, span: float) -> None:
    """For any position of the bins."""
    generator = torch.Generator().manual_seed(0)
    keys = 3 * torch.rand((4, WIDTH), generator=generator)
    keys = (keys / step).round() * step if step else keys
    keys[:, ::17] = torch.inf
    masses = torch.rand((4, WIDTH), generator=generator, dtype=torch.float64) * torch.isfinite(keys)
    masses[:, ::3] = 0.0
    targets = masses.sum(dim=-1, keepdim=True) * torch.tensor([[0.02], [0.5], [0.9], [0.9999]])
    lowest, spans = keys.amin(dim=-1, keepdim=True), torch.full((4, 1), span, dtype=torch.float64)
    edge = cumulative_cutoff(keys, masses, targets, lowest=lowest, span=spans)
    for row in range(4):
        key, below, equals = edge_by_hand(keys[row], masses[row], float(targets[row]))
        assert found(edge, row) == (key, pytest.approx(below), equals)


@pytest.mark.parametrize("sorted_up_to", [10, WIDTH])
def test_a_target_that_rounding_puts_above_the_whole_mass_is_reached_at_the_end(
    sorted_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_module, "_SORTED_UP_TO", sorted_up_to)
    keys = torch.arange(100.0)[None]
    masses = torch.full((1, 100), 0.1, dtype=torch.float64)
    one = torch.ones((1, 1), dtype=torch.float64)
    edge = cumulative_cutoff(
        keys, masses, masses.cumsum(dim=-1)[:, -1:] * (1 + 1e-15), lowest=0 * one, span=50 * one
    )
    assert float(edge.key) == 99.0


VOCAB = 40
COUNT = 1000

FILTERS: dict[str, StepSampling] = {
    "temperature-1": StepSampling(temperature=1.0),
    "cold": StepSampling(temperature=0.4),
    "hot": StepSampling(temperature=3.0),
    "top-k": StepSampling(temperature=1.0, top_k=5),
    "top-k-1": StepSampling(temperature=1.0, top_k=1),
    "top-k-all": StepSampling(temperature=1.0, top_k=VOCAB + 10),
    "top-p": StepSampling(temperature=1.0, top_p=0.8),
    "tiny-top-p": StepSampling(temperature=1.0, top_p=1e-6),
    "top-p-nearly-1": StepSampling(temperature=1.0, top_p=0.999999),
    "min-p": StepSampling(temperature=1.0, min_p=0.08),
    "min-p-1": StepSampling(temperature=1.0, min_p=1.0),
    "typical": StepSampling(temperature=1.0, typical_p=0.6),
    "tiny-typical": StepSampling(temperature=2.0, typical_p=0.01),
    "warpers": StepSampling(temperature=1.7, top_k=12, top_p=0.9, min_p=0.02, typical_p=0.8),
    "hot-top-p-min-p": StepSampling(temperature=4.0, top_p=0.7, min_p=0.1),
    "top-k-all-top-p": StepSampling(temperature=1.0, top_k=VOCAB + 10, top_p=0.8),
    "bias": StepSampling(temperature=1.0, logit_bias=((3, 2.5), (7, -100.0), (39, 4.0))),
    "repetition": StepSampling(temperature=1.0, repetition_penalty=1.4),
    "anti-repetition": StepSampling(temperature=1.0, repetition_penalty=0.7),
    "frequency": StepSampling(temperature=1.0, frequency_penalty=0.7),
    "presence": StepSampling(temperature=1.0, presence_penalty=-1.1),
    "bad-words": StepSampling(temperature=1.0, bad_words=((7,), (3, 8), (2, 3, 9), (4, 3, 11), (1,) * 30)),
    "min-tokens": StepSampling(temperature=1.0, min_tokens=11, min_tokens_hold_back=(0, 12, 13)),
    "min-tokens-reached": StepSampling(temperature=1.0, min_tokens=10, min_tokens_hold_back=(0, 12, 13)),
    "allowed": StepSampling(temperature=1.0, allowed_token_ids=(5, 5, 30, 31, 2)),
    "everything": StepSampling(
        temperature=1.3,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias=((3, 1.0), (20, 2.0), (21, -3.0)),
        allowed_token_ids=tuple(range(35)),
        bad_words=((3, 8), (7,), (2, 3, 20)),
        min_tokens=12,
        min_tokens_hold_back=(0, 33),
    ),
}


def some_logits(rows: int, *, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return 2.5 * torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix(14)
@pytest.mark.parametrize("num_candidates", [256, 8], ids=["all-are-candidates", "few-candidates"])
@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS.keys())
def test_samples_have_the_probabilities_of_transformers(
    sampling: StepSampling, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_choice, "NUM_CANDIDATES", num_candidates)
    for seed in range(2):
        logits = some_logits(1, seed=seed)
        row = Row(sampling=sampling, generated=GENERATED)
        expected = expected_probabilities(logits, row)
        seen = frequencies(monkeypatch, logits, row, count=COUNT)
        np.testing.assert_allclose(seen, expected, atol=1.01 / COUNT, rtol=0)
        assert not seen[expected == 0.0].any(), "a token outside the support"
        assert seen[expected > 1.01 / COUNT].all(), "a token inside the support is never drawn"


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0], ids=["flat", "even", "peaked"])
def test_the_number_of_candidates_changes_no_token(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a width where unsorted rows are summed in bins."""
    vocab_size = 5000
    logits = scale * some_logits(len(FILTERS) * 8, vocab_size=vocab_size)
    logits[::3] = (logits[::3] * 4).round() / 4  # many ties, also at the edges of the filters
    kinds = list(FILTERS.values())
    rows = [Row(sampling=kinds[i % len(kinds)], generated=GENERATED, choice=i) for i in range(len(logits))]
    chosen = []
    for num_candidates in (vocab_size, 256, 40, 3):
        monkeypatch.setattr(random_choice, "NUM_CANDIDATES", num_candidates)
        chosen.append(tokens_of(logits, rows))
    assert chosen[1:] == chosen[:1] * 3


def test_no_filter_does_anything_at_its_default() -> None:
    logits = some_logits(50, vocab_size=1000)
    neutral = StepSampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias=((4, 0.0),),
        allowed_token_ids=tuple(range(1000)),
        bad_words=((999, 4),),
        min_tokens=5,
        min_tokens_hold_back=(),
    )
    plain = [Row(sampling=StepSampling(temperature=1.0), generated=GENERATED, choice=i) for i in range(50)]
    same = [Row(sampling=neutral, generated=GENERATED, choice=i) for i in range(50)]
    assert tokens_of(logits, plain) == tokens_of(logits, same)


def test_equals_of_the_kth_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    seen = frequencies(monkeypatch, logits, Row(sampling=StepSampling(temperature=1.0, top_k=2), prompt=(1,)))
    assert set(np.flatnonzero(seen)) == {1, 2, 3}


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [8, 4096])
def test_among_equals_at_the_edge_of_top_p_the_lowest_ids_stay(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(sampling=StepSampling(temperature=1.0, top_p=0.5), prompt=(1,))
    seen = frequencies(monkeypatch, torch.zeros((1, vocab_size)), row, count=vocab_size)
    assert np.flatnonzero(seen).tolist() == list(range(vocab_size // 2))


def test_equals_of_the_last_candidate_may_be_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates reach top_p, but contain an arbitrary subset of the ties."""
    logits = torch.zeros((1, 4096))
    logits[0, 4000] = 5.0
    weight = float(np.exp(5.0))
    top_p = (weight + 9.5) / (weight + 4095)
    row = Row(sampling=StepSampling(temperature=1.0, top_p=top_p), prompt=(1,))
    seen = frequencies(monkeypatch, logits, row)
    assert np.flatnonzero(seen).tolist() == [*range(10), 4000]


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_of_no_probability_are_never_drawn(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the first and the last token, where the cumulative sum is constant."""
    logits = torch.full((1, 9), -2000.0)
    logits[:, 3:6] = 0.0
    row = Row(sampling=StepSampling(temperature=1.0, top_k=top_k), prompt=(1,))
    assert set(np.flatnonzero(frequencies(monkeypatch, logits, row))) == {3, 4, 5}


@pytest.mark.parametrize("temperature", [float(torch.finfo(torch.float32).tiny), 1e-3, 100.0])
@pytest.mark.parametrize("sampling", [FILTERS["temperature-1"], FILTERS["warpers"], FILTERS["typical"]])
def test_extreme_temperatures_are_finite(sampling: StepSampling, temperature: float) -> None:
    for vocab_size in (VOCAB, 4000):
        logits = some_logits(1, vocab_size=vocab_size)
        extreme = StepSampling(
            temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p, typical_p=sampling.typical_p
        )
        (token,) = tokens_of(logits, [Row(sampling=extreme)])
        assert 0 <= token < vocab_size
        assert temperature == 100.0 or token == int(logits.argmax())
