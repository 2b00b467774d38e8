from __future__ import annotations

import pytest

from bench.harness.spread import percentile
from bench.harness.streams import Stream, Window, decode_rate, decode_window, prefill_rate


def stream(first_s: float, gap_s: float, num_tokens: int, sent_s: float = 0.0) -> Stream:
    return Stream(sent_s, [first_s + gap_s * index for index in range(num_tokens)])


def test_the_decode_window_begins_with_the_last_stream() -> None:
    streams = [stream(1.0, 0.1, 64), stream(2.0, 0.1, 64), stream(1.5, 0.2, 64)]
    window = decode_window(streams, 10)
    assert window is not None
    assert window.begin_s == 2.0
    assert window.end_s == pytest.approx(3.9)


@pytest.mark.parametrize("num_tokens", [0, 1, 14, 15])
def test_the_window_needs_enough_tokens_of_the_slowest_stream(num_tokens: int) -> None:
    streams = [stream(1.0, 0.1, 64), stream(2.0, 0.1, num_tokens)]
    assert (decode_window(streams, 14) is not None) == (num_tokens == 15)


@pytest.mark.parametrize("shift_s", [0.0, 0.03, 0.06, 0.09])
def test_the_decode_rate_is_the_sum_of_the_rates_wherever_the_window_lies(shift_s: float) -> None:
    streams = [stream(0.0, 0.1, 100), stream(0.0, 0.1, 100), stream(0.05, 0.1, 100)]
    window = Window(1.0 + shift_s, 4.0 + shift_s)
    assert decode_rate(streams, window) == pytest.approx(30.0)


def test_prefill_before_the_window_does_not_count() -> None:
    early = Stream(0.0, [0.1, 1.1, 2.1, *(3.0 + 0.1 * index for index in range(30))])
    late = stream(3.0, 0.1, 30)
    window = decode_window([early, late], 20)
    assert window is not None
    assert decode_rate([early, late], window) == pytest.approx(20.0)


def test_a_stream_with_too_few_tokens_in_the_window_has_no_rate() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        decode_rate([stream(0.0, 1.0, 10)], Window(1.5, 3.5))


def test_the_prefill_rate_is_until_the_last_first_token() -> None:
    streams = [stream(1.0, 0.1, 1, sent_s=0.5), stream(2.5, 0.1, 3, sent_s=0.6)]
    assert prefill_rate(streams, 128) == pytest.approx(128.0)


def test_gaps_are_between_tokens_inside_the_window() -> None:
    assert Stream(0.0, [1.0, 2.0, 4.0, 8.0]).gaps_s(1.5, 8.0) == [2.0, 4.0]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.25, 1.75), (1.0, 4.0)])
def test_percentiles_are_linear_between_ranks(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)
