"""Step timeouts: relative to steps of the same size, at least two seconds."""

from __future__ import annotations

import pytest

from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.cost_model import StepCost
from coordinator.scheduler.in_flight import StepsInFlight, StepTimeoutEstimator
from wire.steps import Step, StepResult


def estimator_of(*ratios: float) -> StepTimeoutEstimator:
    """The limit after results with these ratios of measured to predicted time."""
    estimator = StepTimeoutEstimator(DEFAULT_POLICY)
    for ratio in ratios:
        estimator.observe(ratio * 0.1, 0.1)
    return estimator


@pytest.mark.parametrize(("unknown_s", "limit_s"), [(10.0, 10.0), (0.5, DEFAULT_POLICY.min_step_timeout_s)])
def test_without_measurements_the_limit_for_unknown_steps_applies(unknown_s: float, limit_s: float) -> None:
    assert StepTimeoutEstimator(DEFAULT_POLICY).limit_s(1.0, unknown_s=unknown_s) == limit_s
    assert estimator_of(1.0).limit_s(0.0, unknown_s=unknown_s) == limit_s


def test_fast_steps_have_two_seconds() -> None:
    assert estimator_of(1.0).limit_s(0.01, unknown_s=10.0) == DEFAULT_POLICY.min_step_timeout_s == 2.0


def test_the_limit_grows_with_the_work() -> None:
    estimator = estimator_of(*[1.5] * 10)
    assert estimator.limit_s(1.0, unknown_s=0.0) == pytest.approx(12.0)
    assert estimator.limit_s(60.0, unknown_s=0.0) == pytest.approx(DEFAULT_POLICY.step_slowdown * 1.5 * 60)


def test_one_of_a_hundred_does_not_count_and_two_do() -> None:
    assert estimator_of(*[1.0] * 99, 50.0).limit_s(1.0, unknown_s=0.0) == pytest.approx(8.0)
    assert estimator_of(*[1.0] * 98, 50.0, 50.0).limit_s(1.0, unknown_s=0.0) == pytest.approx(400.0)


def test_old_entries_are_forgotten() -> None:
    assert estimator_of(*[50.0] * 512, *[1.0] * 512).limit_s(1.0, unknown_s=0.0) == pytest.approx(8.0)


def test_unpredicted_steps_are_not_learned_from() -> None:
    estimator = StepTimeoutEstimator(DEFAULT_POLICY)
    estimator.observe(100.0, 0.0)
    assert estimator.limit_s(1.0, unknown_s=3.0) == 3.0


def step(step_id: int) -> Step:
    return Step.of((), epoch=1, step_id=step_id, starts=(), ends=(), signals=(), digest=0)


def test_a_step_waits_from_the_answer_before_on() -> None:
    steps = StepsInFlight(DEFAULT_POLICY)
    for step_id in range(3):
        steps.add(step(step_id), StepCost(), 0.0)
    assert steps.overdue(2.0, lambda work: 0.0, unknown_s=0.0) is None
    late = steps.overdue(2.5, lambda work: 0.0, unknown_s=0.0)
    assert late is not None
    assert (late.step.step_id, late.waited_s, late.limit_s) == (0, 2.5, 2.0)
    assert steps.take(StepResult.of(1, 0, ()), 2.5).waited_s == 2.5
    assert steps.overdue(4.5, lambda work: 0.0, unknown_s=0.0) is None
    late = steps.overdue(4.6, lambda work: 0.0, unknown_s=0.0)
    assert late is not None
    assert late.step.step_id == 1


def test_a_step_that_is_sent_into_an_idle_pipeline_waits_from_then_on() -> None:
    steps = StepsInFlight(DEFAULT_POLICY)
    steps.add(step(0), StepCost(), 0.0)
    steps.take(StepResult.of(1, 0, ()), 1.0)
    assert steps.overdue(1000.0, lambda work: 0.0, unknown_s=0.0) is None
    steps.add(step(1), StepCost(), 1000.0)
    assert steps.overdue(1001.0, lambda work: 0.0, unknown_s=0.0) is None
    assert steps.take(StepResult.of(1, 1, ()), 1001.5).waited_s == 1.5
