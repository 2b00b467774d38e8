"""How long prompts and outputs are."""

import numpy as np
import pytest

from stageline.load.lengths import ClippedLengths, Shape, UniformLengths, parse_lengths

NUM = 20_000


def draw(text: str, seed: int = 0) -> np.ndarray:
    return parse_lengths(text).draw(NUM, np.random.default_rng(seed))


def test_what_is_written_is_what_is_meant() -> None:
    assert parse_lengths("128") == UniformLengths(lowest=128, highest=128)
    assert parse_lengths("uniform:64-512") == UniformLengths(lowest=64, highest=512)
    assert parse_lengths("normal:256,64") == ClippedLengths(shape=Shape.NORMAL, mean=256, deviation=64)
    assert parse_lengths("lognormal:25.5,0.5:16-64") == ClippedLengths(
        shape=Shape.LOGNORMAL, mean=25.5, deviation=0.5, bounds=UniformLengths(lowest=16, highest=64)
    )


def test_a_number_is_always_that_number() -> None:
    assert set(draw("17").tolist()) == {17}


def test_a_uniform_range_has_both_its_ends_and_all_between_equally_often() -> None:
    values, counts = np.unique(draw("uniform:3-7"), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts == pytest.approx([NUM / 5] * 5, rel=0.08)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_a_shape_has_its_mean_and_its_deviation(kind: str) -> None:
    drawn = draw(f"{kind}:256,64")
    assert drawn.mean() == pytest.approx(256, rel=0.01)
    assert drawn.std() == pytest.approx(64, rel=0.05)
    skewness = ((drawn - drawn.mean()) ** 3).mean() / drawn.std() ** 3
    # Of a lognormal distribution: (v + 2) sqrt(v - 1) with v = 1 + (64 / 256)^2.
    assert skewness == pytest.approx(0 if kind == "normal" else 0.766, abs=0.12)


def test_bounds_take_what_is_beyond_them() -> None:
    drawn = draw("normal:100,50:80-120")
    assert (drawn.min(), drawn.max()) == (80, 120)
    # Beyond 0.4 standard deviations lie 34.5 % on each side.
    assert (drawn == 80).mean() == pytest.approx(0.345, abs=0.02)


def test_nothing_is_shorter_than_a_token() -> None:
    assert draw("normal:1,50").min() == 1


MISWRITTEN = [
    *("", "many", "-5", "1.5", "128 ", "٣", "zipf:2"),
    *("uniform", "uniform:5", "uniform:5-", "uniform:5-x", "uniform:1.5-3"),
    *("normal:5", "normal:5,-1", "normal:5,nan", "normal: 5,1", "normal:5,1:3", "normal:5,1:3-"),
]


@pytest.mark.parametrize("text", MISWRITTEN)
def test_what_is_written_otherwise_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is no distribution of lengths; write for example 128, uniform"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0", "uniform:0-5", "uniform:9-5", "uniform:1-99999999", "normal:5,1:9-5"])
def test_a_range_that_is_none_is_refused_with_its_numbers(text: str) -> None:
    numbers = text.rpartition(":")[2].split("-")
    with pytest.raises(ValueError, match=rf"^{numbers[0]} to {numbers[-1]} tokens are no range"):
        parse_lengths(text)


def test_a_mean_below_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mean of 0.5 tokens"):
        parse_lengths("lognormal:0.5,1")
