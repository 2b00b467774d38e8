from __future__ import annotations

import pytest

from bench.harness.figure import Better, Figure, NotMeasured, Round, Verdict, against_best, of_rounds
from tests.unit.bench.runs import figure, latency


def test_a_ratio_is_measured_to_bound() -> None:
    assert figure(measured=80, bound=100).ratio == 0.8
    assert figure(measured=80, bound=100).spread is None


def test_the_ratio_of_several_rounds_is_the_median_of_their_ratios() -> None:
    rounds = [Round(10, 10), Round(20, 40), Round(90, 100)]
    result = of_rounds("speed", rounds, unit="tok/s", how="counted")
    assert (result.measured, result.bound) == (20, 40)
    assert result.ratios == (1.0, 0.5, 0.9)
    assert result.ratio == 0.9
    assert result.spread == pytest.approx(0.5 / 0.9)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (figure(measured=80, target=0.8), Verdict.REACHED),
        (figure(measured=79, target=0.8), Verdict.MISSED),
        (figure(measured=79), Verdict.NO_TARGET),
        (latency(107, target=1.08), Verdict.REACHED),
        (latency(109, target=1.08), Verdict.MISSED),
        (figure(measured=101, target=0.8, limit=1.0), Verdict.IMPOSSIBLE),
        (figure(measured=100, target=0.8, limit=1.0), Verdict.REACHED),
        (latency(99, target=1.08, limit=1.0), Verdict.IMPOSSIBLE),
        (latency(101, target=1.08, limit=1.0), Verdict.REACHED),
    ],
)
def test_the_verdict_follows_the_direction_of_improvement(result: Figure, verdict: Verdict) -> None:
    assert result.verdict is verdict


@pytest.mark.parametrize(("measured", "bound"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_a_figure_that_is_not_positive_was_not_measured(measured: float, bound: float) -> None:
    with pytest.raises(NotMeasured, match="speed"):
        figure(measured=measured, bound=bound)


def test_a_peer_counts_with_its_best_round() -> None:
    result = of_rounds("speed", against_best([100, 120], [20, 50]), unit="tok/s", how="counted")
    assert result.ratios == (2.0, 2.4)


def test_a_figure_needs_a_round() -> None:
    with pytest.raises(NotMeasured):
        of_rounds("speed", [], unit="tok/s", how="counted", better=Better.HIGHER)
