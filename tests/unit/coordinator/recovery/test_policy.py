"""Timeouts are positive and finite, and a lease tolerates a lost heartbeat."""

from __future__ import annotations

import math

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.recovery.policy import RecoveryPolicy

FIELDS = ["heartbeat_interval_s", "lease_s", "epoch_timeout_s", "recovery_timeout_s"]


def test_the_defaults_are_valid() -> None:
    timing = RecoveryPolicy()
    assert timing.lease_s >= 2 * timing.heartbeat_interval_s


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_wait_that_is_not_positive_and_finite_is_rejected_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}, must be in \(0, inf\)"):
        RecoveryPolicy(**{name: value})


def test_a_lease_shorter_than_two_heartbeats_is_rejected_with_both() -> None:
    RecoveryPolicy(heartbeat_interval_s=0.5, lease_s=1.0)
    with pytest.raises(ValueError, match=r"lease of 0\.9 s is less than two heartbeats of 0\.5 s"):
        RecoveryPolicy(heartbeat_interval_s=0.5, lease_s=0.9)


@pytest.mark.parametrize(("max_stages", "expected"), [(None, 2), (2, 2), (5, 5)])
def test_the_flag_decides_how_far_the_pipeline_grows(max_stages: int | None, expected: int) -> None:
    config = CoordinatorConfig(num_stages=2, max_stages=max_stages)
    assert config.recovery_policy.max_stages == expected
