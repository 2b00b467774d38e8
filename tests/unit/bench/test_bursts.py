from __future__ import annotations

import pytest

from bench.harness.bursts import Burst
from bench.harness.streams import Stream


def stream(sent_s: float, *arrivals_s: float) -> Stream:
    return Stream(sent_s, list(arrivals_s))


def burst(all_s: float, *, first_s: float = 1.0) -> Burst:
    """Two requests of 100 tokens and 11 new ones, whose prefill alone takes a second."""
    prefill = [stream(5.0, 5.5), stream(5.1, 6.0)]
    early = [10.5 + 0.1 * index for index in range(11)]
    late = [10.0 + first_s + (all_s - first_s) * index / 10 for index in range(11)]
    streams = [stream(10.0, *early), stream(10.1, *late)]
    return Burst.of(prefill, streams, prompt_tokens=100)


def test_rates_of_a_burst() -> None:
    measured = burst(all_s=3.0, first_s=1.5)
    assert (measured.prefill_s, measured.first_token_s, measured.all_s) == pytest.approx((1.0, 1.5, 3.0))
    assert measured.prefill_rate == pytest.approx(200.0)
    assert measured.decode_rate == pytest.approx(2 * 10 / 2.0)
    assert measured.all_rate == pytest.approx(22 / 3.0)


def test_a_burst_of_prefill_followed_by_steady_decode_is_its_bound() -> None:
    """20 tokens at 10 per second after a second of prefill."""
    measured = burst(all_s=3.0)
    assert measured.bound_rate(10.0) == pytest.approx(measured.all_rate)
    assert measured.bound_rate(20.0) == pytest.approx(22 / 2.0)


@pytest.mark.parametrize(
    ("prefill", "streams"),
    [
        ([stream(0, 1)], [stream(0, 1, 2), stream(0, 1, 2)]),
        ([stream(0, 1), stream(0, 1)], [stream(0, 1, 2), stream(0, 1)]),
        ([stream(0, 1), stream(0, 1, 2)], [stream(0, 1, 2), stream(0, 1, 2)]),
        ([stream(0, 1)], [stream(0)]),
    ],
)
def test_requests_that_differ_are_no_burst(prefill: list[Stream], streams: list[Stream]) -> None:
    with pytest.raises(ValueError, match="token"):
        Burst.of(prefill, streams, prompt_tokens=1)
