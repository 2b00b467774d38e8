"""Parsing of mock step times."""

from __future__ import annotations

import pytest

from stage_worker.backends.contract import DeviceError
from stage_worker.backends.mock_compute import MockDevice
from stage_worker.backends.mock_spec import MockSpec
from tests.unit.coordinator.scheduler.pipeline_model import key_of
from wire.steps import Decode, Prefill, Step, StepSlice


def decode(position: int) -> StepSlice:
    return StepSlice(key_of(0), 0, (1,), Decode(position))


def step_of(slices: list[StepSlice]) -> Step:
    return Step.of(slices, epoch=1, step_id=0)


def chunk(start: int, size: int) -> StepSlice:
    return StepSlice(key_of(1), 0, (1,) * size, Prefill(start, size, start + size))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("step=20ms,token=0.05ms", MockSpec(step=0.02, token=0.00005)),
        ("step=0ms", MockSpec()),
        (" token=3us , step=1s", MockSpec(step=1.0, token=3e-6)),
        ("context=1.5ms", MockSpec(context=0.0015)),
    ],
)
def test_times_have_names_and_units(text: str, spec: MockSpec) -> None:
    assert MockSpec.parse(text).step == pytest.approx(spec.step)
    assert MockSpec.parse(text).token == pytest.approx(spec.token)
    assert MockSpec.parse(text).context == pytest.approx(spec.context)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("20ms", "'20ms'"),
        ("step", "'step'"),
        ("step=20", "step='20'"),
        ("step=-20ms", "step='-20ms'"),
        ("step=20min", "step='20min'"),
        ("step=nanms", "step='nanms'"),
        ("step=1e3ms", "step='1e3ms'"),
        ("pause=20ms", "'pause=20ms'"),
        ("step=20ms,step=30ms", "'step' is given twice"),
        ("step=20ms,", "''"),
    ],
)
def test_unknown_keys_are_rejected_by_name(text: str, named: str) -> None:
    with pytest.raises(ValueError, match="mock time") as raised:
        MockSpec.parse(text)
    assert named in str(raised.value)


def test_step_time_is_the_sum_of_base_token_and_context_time() -> None:
    spec = MockSpec(step=1.0, token=0.1, context=10.0)
    assert spec.step_s(step_of([])) == 0
    assert spec.step_s(step_of([decode(99)])) == pytest.approx(1.0 + 0.1 + 10 * 0.1)
    assert spec.step_s(step_of([chunk(0, 4)])) == pytest.approx(1.0 + 0.4 + 10 * (1 + 2 + 3 + 4) / 1000)
    assert spec.step_s(step_of([decode(0), chunk(10, 2)])) == pytest.approx(
        1.0 + 0.3 + 10 * (1 + 11 + 12) / 1000
    )


def test_failures_are_counts_and_off_by_default() -> None:
    spec = MockSpec.parse("step=5ms,poison_after=100,hang_after=7,oom_at=64")
    assert (spec.poison_after, spec.hang_after, spec.oom_at) == (100, 7, 64)
    spec = MockSpec.parse("step=5ms")
    assert (spec.poison_after, spec.hang_after, spec.oom_at) == (None, None, None)


@pytest.mark.parametrize("text", ["poison_after=0", "hang_after=5ms", "oom_at=-1", "poison_after=1.5"])
def test_an_invalid_count_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number from 1 to"):
        MockSpec.parse(text)


def test_a_poisoned_device_stays_failed_and_out_of_memory_allows_smaller_steps() -> None:
    device = MockDevice(MockSpec(poison_after=2))
    device.compute(1)
    device.compute(1)
    for _ in range(2):
        with pytest.raises(DeviceError):
            device.compute(1)
    device = MockDevice(MockSpec(oom_at=8, hang_after=1))
    with pytest.raises(MemoryError):
        device.compute(8)
    device.compute(7)
    assert not device.is_hung
    device.compute(7)
    assert device.is_hung
