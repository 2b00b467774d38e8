from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest

from bench.figures.arrivals import ITL_TARGET_S, arrival_times_s, is_good
from bench.harness.streams import Stream


def test_arrivals_are_the_same_for_a_seed_and_have_the_requested_rate() -> None:
    times_s = arrival_times_s(4000, 5.0, seed=1)
    assert times_s == arrival_times_s(4000, 5.0, seed=1)
    assert times_s != arrival_times_s(4000, 5.0, seed=2)
    assert all(before < after for before, after in pairwise(times_s))
    assert mean(after - before for before, after in pairwise(times_s)) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    ("first_s", "gap_s", "good"),
    [
        (0.4, ITL_TARGET_S * 0.9, True),
        (0.41, ITL_TARGET_S * 0.9, False),
        (0.1, ITL_TARGET_S * 1.1, False),
    ],
)
def test_a_good_request_keeps_both_limits(first_s: float, gap_s: float, good: bool) -> None:
    stream = Stream(2.0, [2.0 + first_s + gap_s * index for index in range(64)])
    assert is_good(stream, lone_first_token_s=0.1 + 1e-9) is good
