"""Quantiles of many durations in bounded memory."""

from __future__ import annotations

import random

import pytest

from coordinator.observability.rates import RELATIVE_ERROR, LatencySketch


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 0.99, 1.0])
def test_quantiles_are_at_most_one_percent_off(share: float) -> None:
    draw = random.Random(3)
    durations = sorted(draw.lognormvariate(-4, 1.5) for _ in range(5000))
    sketch = LatencySketch()
    for duration in durations:
        sketch.add(duration)
    exact = durations[max(0, round(share * len(durations)) - 1)]
    assert sketch.quantile(share) == pytest.approx(exact, rel=1.01 * RELATIVE_ERROR)


def test_a_count_is_worth_as_many_durations() -> None:
    sketch = LatencySketch()
    sketch.add(0.010, 99)
    sketch.add(1.0)
    assert sketch.count == 100
    assert sketch.quantile(0.99) == pytest.approx(0.010, rel=0.011)
    assert sketch.quantile(1.0) == pytest.approx(1.0, rel=0.011)


def test_without_durations_there_are_no_quantiles() -> None:
    assert LatencySketch().quantile(0.5) is None


def test_merged_sketches_hold_all_durations() -> None:
    first, second = LatencySketch(), LatencySketch()
    first.add(0.1, 3)
    second.add(0.1, 2)
    second.add(0.2)
    merged = LatencySketch.merged([first, second])
    assert merged.count == 6
    assert first.count == 3


def test_absurd_durations_stay_within_bounds() -> None:
    sketch = LatencySketch()
    for duration in (-1.0, 0.0, 1e-12, 1e12):
        sketch.add(duration)
    assert sketch.count == 4
    assert sketch.quantile(1.0) == pytest.approx(86400, rel=0.011)
