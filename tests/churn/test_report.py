"""When memory and objects count as growing."""

from __future__ import annotations

import pytest

from tests.churn.report import MB, Report, Sample, growing_types

SECONDS = 1800


def report_of(first_mb: float, second_mb: float) -> Report:
    """Memory of `first_mb` until minute 20 and of `second_mb` from then on, an outlier in each."""
    samples = [Sample(at, int((first_mb if at < 1200 else second_mb) * MB)) for at in range(SECONDS)]
    samples += [Sample(700, int(500 * MB)), Sample(1600, int(900 * MB))]
    return Report(SECONDS, 20.0, samples)


@pytest.mark.parametrize(
    ("second_mb", "passes"), [(100.0, True), (101.9, True), (102.1, False), (80.0, True)]
)
def test_medians_of_the_two_windows_are_compared(second_mb: float, passes: bool) -> None:
    report = report_of(100.0, second_mb)
    assert report.growth_bytes == pytest.approx((second_mb - 100) * MB)
    assert report.has_passed is passes
    assert report.line().endswith("PASS" if passes else "FAIL")


def test_a_type_grows_when_every_count_is_above_the_one_before_by_more_than_noise() -> None:
    counts = [
        {"leak": 1000, "full": 100, "noise": 1000, "gone": 9000},
        {"leak": 3000, "full": 5000, "noise": 1100, "gone": 9000, "new": 500},
        {"leak": 5000, "full": 5001, "noise": 1200, "new": 1000},
    ]
    assert growing_types(counts) == {"leak": [1000, 3000, 5000], "new": [0, 500, 1000]}
    report = report_of(100.0, 100.0)
    report.counts += counts
    assert not report.has_passed
    assert "growing types: leak 1000->3000->5000, new 0->500->1000" in report.line()


def test_a_request_that_ended_wrongly_fails_the_run() -> None:
    report = report_of(100.0, 100.0)
    assert report.has_passed
    report.problems.append("short: AssertionError: wrong tokens")
    assert not report.has_passed
