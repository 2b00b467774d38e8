"""When requests arrive."""

import math

import numpy as np
import pytest

from stageline.load.arrivals import Arrivals

NUM = 20_000


def gaps_of(arrivals: Arrivals, seed: int) -> np.ndarray:
    return np.diff(arrivals.first(NUM, np.random.default_rng(seed)))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_have_the_mean_and_the_variance_of_an_exponential(rate: float, seed: int) -> None:
    gaps = gaps_of(Arrivals(rate_per_s=rate), seed)
    # Standard errors of 20,000 draws: 0.7 % of the mean, 2 % of the variance.
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.var() == pytest.approx(1 / rate**2, rel=0.1)
    # A share of 1 / e of them is longer than the mean.
    assert (gaps > 1 / rate).mean() == pytest.approx(1 / math.e, abs=0.015)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_variance_and_leaves_the_rate(burstiness: float) -> None:
    gaps = gaps_of(Arrivals(rate_per_s=10, burstiness=burstiness), seed=5)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.var() == pytest.approx(0.01 / burstiness, rel=0.15)


def test_the_first_request_is_due_at_once_and_none_before_another() -> None:
    times = Arrivals(rate_per_s=3).first(500, np.random.default_rng(1))
    assert times.shape == (500,)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert Arrivals(rate_per_s=3).first(1, np.random.default_rng(1)).tolist() == [0.0]


def test_an_infinite_rate_is_all_at_once() -> None:
    times = Arrivals(rate_per_s=math.inf).first(7, np.random.default_rng(0))
    assert times.tolist() == [0.0] * 7


def test_a_duration_holds_all_arrivals_before_its_end() -> None:
    arrivals = Arrivals(rate_per_s=100)
    within = arrivals.within(30.0, np.random.default_rng(4))
    assert len(within) == pytest.approx(3000, rel=0.08)
    assert within[0] == 0
    assert 29.5 < within[-1] < 30
    assert (np.diff(within) >= 0).all()


def test_another_rate_is_the_same_pattern_at_another_speed() -> None:
    slow = Arrivals(rate_per_s=1).first(50, np.random.default_rng(9))
    fast = Arrivals(rate_per_s=8).first(50, np.random.default_rng(9))
    np.testing.assert_allclose(slow, fast * 8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate of {rate:g} per second is not above 0"):
        Arrivals(rate_per_s=rate)


@pytest.mark.parametrize("burstiness", [0.0, math.inf, math.nan])
def test_a_burstiness_that_is_none_is_refused(burstiness: float) -> None:
    with pytest.raises(ValueError, match=f"burstiness of {burstiness:g}"):
        Arrivals(rate_per_s=1, burstiness=burstiness)


def test_a_duration_with_endlessly_many_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="no certain number"):
        Arrivals(rate_per_s=math.inf).within(1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="more than 1000000 requests"):
        Arrivals(rate_per_s=1e9).within(1, np.random.default_rng(0))
