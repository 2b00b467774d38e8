"""The hint when to come again follows the pace at which requests end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.pace import Pace


def pace_of(*ends_s: float) -> Pace:
    pace = Pace()
    for now_s in ends_s:
        pace.note_end(now_s)
    return pace


def test_a_second_where_nothing_is_known() -> None:
    assert pace_of().retry_after_s == 1.0
    assert pace_of(100.0).retry_after_s == 1.0


def test_the_first_interval_counts_whole_and_every_other_one_a_fifth() -> None:
    assert pace_of(100.0, 102.0).retry_after_s == 2.0
    assert pace_of(100.0, 102.0, 109.0).retry_after_s == pytest.approx(2 + (7 - 2) / 5)


@pytest.mark.parametrize(("interval_s", "hint_s"), [(0.0, 0.1), (0.01, 0.1), (29.0, 29.0), (1e9, 30.0)])
def test_the_hint_is_never_at_once_and_never_beyond_patience(interval_s: float, hint_s: float) -> None:
    assert pace_of(*(number * interval_s for number in range(9))).retry_after_s == pytest.approx(hint_s)


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=30))
def test_the_hint_is_between_the_shortest_and_the_longest_interval(intervals_s: list[float]) -> None:
    now_s, pace = 0.0, pace_of(0.0)
    for interval_s in intervals_s:
        pace.note_end(now_s := now_s + interval_s)
    assert min(intervals_s) - 1e-6 <= pace.retry_after_s <= max(intervals_s) + 1e-6


def test_a_new_pace_shows_after_a_while() -> None:
    slow = [number * 10.0 for number in range(10)]
    fast = [90.0 + number * 0.5 for number in range(1, 30)]
    assert pace_of(*slow, *fast).retry_after_s == pytest.approx(0.5, rel=0.1)
