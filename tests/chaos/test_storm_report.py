"""Failure criteria of a storm and the counted pauses."""

from __future__ import annotations

import pytest

from tests.chaos.storm_load import Ended, Outcome
from tests.chaos.storm_report import StormReport, percentile

ARRIVED_S = (10.0, 10.1, 11.6, 11.7)


def ended(outcome: Outcome = Outcome.DONE, arrived_s: tuple[float, ...] = ARRIVED_S) -> Ended:
    return Ended(0, outcome, "", started_s=9.5, ended_s=12.0, arrived_s=arrived_s)


def report_of(*requests: Ended) -> StormReport:
    return StormReport(1, 60.0, ended=list(requests), faults=[(10.5, "kill -9 a worker")])


def test_a_pause_is_the_longest_time_between_two_tokens() -> None:
    request = ended()
    assert request.longest_gap == (10.1, 11.6)
    assert request.pause_s == pytest.approx(1.5)
    assert request.first_token_s == pytest.approx(0.5)
    assert ended(arrived_s=()).pause_s == 0.0


def test_only_requests_with_a_fault_between_tokens_count_as_struck() -> None:
    struck, before, after = ended(), ended(arrived_s=(9.6, 10.4)), ended(arrived_s=(10.6, 11.0))
    assert report_of(struck, before, after).struck == [struck]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.WRONG])
def test_a_request_that_failed_or_got_wrong_tokens_fails_the_storm(outcome: Outcome) -> None:
    report = report_of(ended(), ended(outcome))
    assert not report.is_right
    assert report.lines()[-1] == "failed"
    assert any(f"PROBLEM: {outcome.value}" in line for line in report.lines())


def test_leftovers_fail_the_storm() -> None:
    report = report_of(ended())
    assert report.is_right
    report.leaks.append("a process still runs")
    assert not report.is_right


def test_pauses_beyond_the_limits_fail_the_storm_with_a_message() -> None:
    assert report_of(ended(arrived_s=(10.0, 11.4))).lines()[-1] == "passed"
    slow = report_of(ended(arrived_s=(10.0, 11.6)))
    assert slow.is_right and not slow.is_fast
    assert slow.lines()[-1] == "failed"
    assert "pause: median 1.60 s (limit 1.5 s), p95 1.60 s (limit 5 s): MISSED" in slow.lines()


def test_percentiles_are_observed_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 1.0)] == [50.0, 95.0, 100.0]
    assert percentile([], 0.5) == 0.0
