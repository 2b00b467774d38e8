"""The uniform numbers are a pure function of their three words, inside (0, 1), and spread evenly."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stage_worker.sampling import randomness
from stage_worker.sampling.randomness import uniforms

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
    """A recomputed sequence, on whatever version of a worker, continues with the same tokens."""
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
    monkeypatch.setattr(randomness, "_mixed", lambda values: np.full_like(values, word))
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
