"""Clock offset, estimated from the send and receive times of heartbeats and responses."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.clock import KEPT_EXCHANGES, ClusterClock, Exchange, wall_clock_us

AHEAD_US = 5_000_000


def exchange(*, ahead_us: int, there_us: int, back_us: int, sent_us: int = 10**15) -> Exchange:
    """A heartbeat and its response after 7 us; the remote clock is `ahead_us` ahead."""
    received_us = sent_us + there_us + ahead_us
    answered_us = received_us + 7
    return Exchange(sent_us, received_us, answered_us, answered_us - ahead_us + back_us)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=KEPT_EXCHANGES),
)
def test_the_offset_error_is_within_its_uncertainty(ahead_us: int, ways: list[tuple[int, int]]) -> None:
    clock = ClusterClock()
    for there_us, back_us in ways:
        clock.note(exchange(ahead_us=ahead_us, there_us=there_us, back_us=back_us))
    assert clock.uncertainty_us is not None
    assert abs(clock.offset_us - ahead_us) <= 2 * clock.uncertainty_us + 1
    if clock.offset_us:
        assert abs(clock.offset_us - ahead_us) <= clock.uncertainty_us + 1


def test_the_exchange_of_shortest_round_trip_counts() -> None:
    clock = ClusterClock()
    clock.note(exchange(ahead_us=AHEAD_US, there_us=200, back_us=200))
    clock.note(exchange(ahead_us=AHEAD_US, there_us=90_000, back_us=100))
    assert clock.offset_us == AHEAD_US
    assert clock.uncertainty_us == 200


def test_an_offset_below_its_uncertainty_is_zero() -> None:
    clock = ClusterClock()
    clock.note(exchange(ahead_us=0, there_us=400, back_us=100))
    assert clock.offset_us == 0
    clock.note(exchange(ahead_us=300, there_us=300, back_us=300))
    assert clock.offset_us == 0


def test_old_exchanges_are_forgotten_when_clocks_drift() -> None:
    clock = ClusterClock()
    clock.note(exchange(ahead_us=0, there_us=10, back_us=10))
    for _ in range(KEPT_EXCHANGES):
        clock.note(exchange(ahead_us=AHEAD_US, there_us=50, back_us=50))
    assert clock.offset_us == AHEAD_US


def test_exchanges_before_a_clock_change_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClusterClock()
    clock.note(exchange(ahead_us=AHEAD_US, there_us=10, back_us=10))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + AHEAD_US * 1000)
    clock.refresh()
    clock.note(exchange(ahead_us=0, there_us=60, back_us=60))
    assert clock.offset_us == 0
    assert clock.uncertainty_us == 60


def test_an_exchange_of_negative_duration_is_ignored() -> None:
    clock = ClusterClock()
    clock.note(exchange(ahead_us=AHEAD_US, there_us=-40, back_us=10))
    assert clock.uncertainty_us is None


def test_timestamps_are_converted_to_coordinator_time() -> None:
    clock = ClusterClock()
    before_us, now_s, after_us = wall_clock_us(), time.monotonic(), wall_clock_us()
    clock.note(exchange(ahead_us=AHEAD_US, there_us=10, back_us=10))
    assert before_us - 1000 <= clock.at_us(now_s) - AHEAD_US <= after_us + 1000
