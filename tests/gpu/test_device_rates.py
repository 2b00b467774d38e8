"""The speed of a device is measured alike each time; no other test may run beside this one."""

from __future__ import annotations

import time

import pytest
import torch

from coordinator.planner.rates import settled
from stage_worker.backends.torch_device import measure_rates

pytestmark = pytest.mark.gpu

MOST_S = 5.0
"""Of a measurement, with libraries that are loaded first."""


def test_a_device_is_measured_alike_each_time(prepared: torch.device) -> None:
    if prepared.type == "cpu":
        pytest.skip("a CPU is shared with other processes")
    started = time.perf_counter()
    first = measure_rates(prepared)
    assert time.perf_counter() - started < MOST_S
    second = measure_rates(prepared)
    assert settled(second, first) == first
    assert first.bytes_per_s > 50e9
    assert first.operations_per_s > 1e12
