"""Figures of a run, compared with values computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from stageline.load.results import INTERRUPTED, Limits, distribution, summarize, timeline
from tests.unit.stageline.load.runs import record, run_of

ms = pytest.approx

# Due at 1.0, sent 0.1 late; tokens at 1.5, 1.6 (two of them), 2.0.
FIRST = record(0, (1.5, 1), (1.6, 2), (2.0, 1), due_s=1.0, sent_s=1.1)
# Due and sent at 2.0; a single token at 2.25.
SECOND = record(1, (2.25, 1), due_s=2.0)
FAILED = record(2, (2.5, 1), due_s=2.0, status="DEADLINE_EXCEEDED")
REFUSED = record(3, due_s=3.0, sent_s=3.0, status="RESOURCE_EXHAUSTED")
STOPPED = record(4, (3.5, 2), due_s=3.0, status=INTERRUPTED)
RUN = run_of(FIRST, SECOND, FAILED, REFUSED, STOPPED, duration_s=4.0, num_planned=9)


def test_latencies_of_one_request_count_from_when_it_was_due() -> None:
    assert FIRST.ttft_s == ms(0.5)
    assert FIRST.e2e_s == ms(1.0)
    assert FIRST.lag_s == ms(0.1)
    assert FIRST.gaps_s == ms([0.1, 0.4]), "one for each message after the first, however many tokens it has"
    assert FIRST.tpot_s == ms(0.5 / 3), "three tokens after the first, in half a second"
    assert SECOND.tpot_s is None
    assert SECOND.gaps_s == []


def test_a_wait_for_a_slot_counts_as_latency_and_not_as_lag() -> None:
    waited = replace(FIRST, sent_s=1.3, slot_wait_s=0.25)
    assert waited.lag_s == ms(0.05)
    assert waited.ttft_s == FIRST.ttft_s


def test_completed_and_failed_requests_are_counted_separately() -> None:
    summary = summarize(RUN, Limits())
    assert (summary.num_planned, summary.num_due) == (9, 5)
    assert (summary.num_completed, summary.num_failed, summary.num_interrupted) == (2, 2, 1)
    assert summary.failures == {"DEADLINE_EXCEEDED": 1, "RESOURCE_EXHAUSTED": 1}


def test_rates_are_per_second_of_the_whole_run() -> None:
    summary = summarize(RUN, Limits())
    assert summary.requests_per_s == ms(2 / 4)
    assert summary.output_tokens_per_s == ms((4 + 1 + 1 + 2) / 4), "every token that came"
    assert summary.input_tokens_per_s == ms(20 / 4), "the prompts of what completed"
    assert summary.tokens_per_message == ms(8 / 6)
    assert summary.cpu_share == ms(0.1)


def test_latencies_count_completed_requests_only() -> None:
    summary = summarize(RUN, Limits())
    assert summary.ttft_s is not None
    assert (summary.ttft_s.num_samples, summary.ttft_s.mean, summary.ttft_s.max) == ms((2, 0.375, 0.5))
    assert summary.itl_s is not None
    assert (summary.itl_s.num_samples, summary.itl_s.mean) == ms((2, 0.25))
    assert summary.tpot_s is not None
    assert summary.tpot_s.num_samples == 1
    assert summary.e2e_s is not None
    assert summary.e2e_s.p50 == ms((1.0 + 0.25) / 2)


def test_percentiles_are_numpys_linear_ones() -> None:
    values = np.random.default_rng(3).exponential(size=137)
    found = distribution(values.tolist())
    assert found is not None
    expected = np.percentile(values, [50, 90, 95, 99])
    np.testing.assert_allclose([found.p50, found.p90, found.p95, found.p99], expected)
    assert (found.mean, found.max, found.num_samples) == ms((values.mean(), values.max(), 137))
    # By hand: between ranks 0 and 1 of two values lie 90 % of the way.
    two = distribution([3.0, 1.0])
    assert two is not None
    assert (two.p50, two.p90) == ms((2.0, 2.8))


def test_an_empty_sample_has_no_distribution() -> None:
    assert distribution([None, None]) is None
    nothing = summarize(run_of(duration_s=1.0, num_planned=3), Limits(ttft_s=1))
    assert (nothing.ttft_s, nothing.tokens_per_message, nothing.max_concurrency) == (None, None, 0)


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        (Limits(), 2),
        (Limits(ttft_s=0.5), 2),
        (Limits(ttft_s=0.499), 1),
        (Limits(itl_s=0.401), 2),
        (Limits(itl_s=0.399), 1),  # the longest gap counts, not the mean
        (Limits(tpot_s=0.2), 2),
        (Limits(tpot_s=0.16), 1),
        (Limits(e2e_s=0.999), 1),
        (Limits(e2e_s=0.2), 0),
        (Limits(ttft_s=0.4, itl_s=0.5), 1),
    ],
)
def test_goodput_counts_completed_requests_within_every_limit(limits: Limits, num_good: int) -> None:
    summary = summarize(RUN, limits)
    assert summary.num_good == num_good
    assert summary.goodput_per_s == ms(num_good / 4)


def test_a_failed_request_is_never_good() -> None:
    assert not Limits(ttft_s=100).are_met(FAILED)
    assert not Limits().are_met(STOPPED)


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_limit_is_rejected(limit_s: float) -> None:
    with pytest.raises(ValueError, match=f"limit of {limit_s * 1e3:g} ms"):
        Limits(tpot_s=limit_s)


def test_concurrency_counts_from_sending_to_the_end() -> None:
    # Running: 1.1 to 2.0, 2.0 to 2.25, 2.0 to 2.5, 3.0 to 3.0, 3.0 to 3.5.
    summary = summarize(RUN, Limits())
    assert summary.max_concurrency == 2, "one that begins when another ends does not overlap it"
    assert summary.mean_concurrency == ms((0.9 + 0.25 + 0.5 + 0.5) / 4)


def test_the_timeline_is_tokens_and_mean_concurrency_of_each_interval() -> None:
    course = timeline(RUN, num_intervals=4)
    assert course.interval_s == 1.0
    assert course.output_tokens_per_s == ms([0, 3, 3, 2])
    assert course.concurrency == ms([0, 0.9, 0.75, 0.5])
    fine = timeline(RUN)
    assert sum(fine.output_tokens_per_s) * fine.interval_s == ms(8)


def test_unsent_requests_never_count_as_running() -> None:
    waiting = replace(REFUSED, sent_s=None, ended_s=3.2, status=INTERRUPTED)
    run = run_of(FIRST, waiting, duration_s=4.0)
    assert summarize(run, Limits()).max_concurrency == 1
    assert waiting.lag_s is None
