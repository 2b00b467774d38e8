"""Online least-squares fits of measured times."""

from __future__ import annotations

import random

import pytest

from coordinator.scheduler.cost_model import OnlineLeastSquares, RecentMedian


def test_two_rates_are_found_from_noisy_measurements() -> None:
    fit, noise = OnlineLeastSquares(), random.Random(1)
    for _ in range(200):
        x1, x2 = noise.uniform(1, 10), noise.uniform(1, 10)
        fit.add(x1, x2, (3 * x1 + 5 * x2) * noise.uniform(0.95, 1.05))
    assert fit.first == pytest.approx(3, rel=0.05)
    assert fit.second == pytest.approx(5, rel=0.05)


def test_indistinguishable_features_are_explained_by_the_first() -> None:
    fit = OnlineLeastSquares()
    for time in (9.0, 11.0, 10.0):
        fit.add(1.0, 8.0, time)
    assert fit.second == 0
    assert fit.predict(1.0, 800.0) == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("times", [(10.0, 5.0), (1.0, 9.0)])
def test_no_rate_is_negative(times: tuple[float, float]) -> None:
    fit = OnlineLeastSquares()
    for size, time in zip((1.0, 2.0), times, strict=True):
        fit.add(1.0, size, time)
    assert fit.first >= 0
    assert fit.second >= 0
    assert fit.predict(1.0, 1.5) > 0


def test_one_outlier_counts_little_and_a_new_speed_is_adopted() -> None:
    fit = OnlineLeastSquares()
    for _ in range(50):
        fit.add(1.0, 0.0, 10.0)
    fit.add(1.0, 0.0, 5_000.0)
    assert fit.predict(1.0, 0.0) < 12
    for _ in range(120):
        fit.add(1.0, 0.0, 100.0)
    assert fit.predict(1.0, 0.0) == pytest.approx(100, rel=0.05)


def test_no_estimate_exists_before_the_first_measurement() -> None:
    fit, median = OnlineLeastSquares(), RecentMedian()
    assert (fit.is_known, fit.predict(1.0, 2.0), median.value) == (False, 0.0, 0.0)


def test_the_median_is_taken_over_the_last_values() -> None:
    median = RecentMedian(3)
    for value in (1.0, 7.0, 5.0, 6.0):
        median.add(value)
    assert median.value == 6.0
    median.add(1.0)
    assert median.value == 5.0
