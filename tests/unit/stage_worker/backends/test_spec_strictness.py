"""Mock step times: accepted specifications and the resulting time of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_worker.backends.mock_spec import MockSpec
from wire.ids import RequestId, SequenceKey
from wire.steps import Decode, Prefill, Step, StepSlice

KEY = SequenceKey(RequestId(bytes(16)), 0)


def chunk(start: int, num_tokens: int) -> StepSlice:
    return StepSlice(KEY, 0, (1,) * num_tokens, Prefill(start, num_tokens, start + num_tokens))


def decode(position: int) -> StepSlice:
    return StepSlice(KEY, 0, (1,), Decode(position))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("step=20ms", MockSpec(step=0.02)),
        ("step=20ms,token=0.05ms", MockSpec(step=0.02, token=50e-6)),
        ("context=3us,token=7us,step=1s", MockSpec(step=1.0, token=7e-6, context=3e-6)),
        (" step=1.5s , token=0us", MockSpec(step=1.5)),
        ("step=0ms", MockSpec()),
    ],
)
def test_times_have_names_and_units(text: str, spec: MockSpec) -> None:
    parsed = MockSpec.parse(text)
    assert (parsed.step, parsed.token, parsed.context) == pytest.approx((spec.step, spec.token, spec.context))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mock time '': expected step=TIME, token=TIME, context=TIME"),
        ("step", "mock time 'step': expected step=TIME"),
        ("20ms", "mock time '20ms': expected"),
        ("step=20ms,", "mock time '': expected"),
        ("steps=20ms", "mock time 'steps=20ms': expected"),
        ("STEP=20ms", "mock time 'STEP=20ms': expected"),
        ("step=20ms,step=20ms", "mock time 'step' is given twice"),
        ("step=20", "mock time step='20': expected a number with us, ms or s, such as 20ms"),
        ("step=", "mock time step='': expected a number"),
        ("step=-20ms", "mock time step='-20ms': expected a number"),
        ("step=+20ms", "expected a number"),
        ("step=.5s", "expected a number"),
        ("step=1e3ms", "expected a number"),
        ("step=infs", "expected a number"),
        ("step=20min", "expected a number"),
        ("step=20MS", "expected a number"),
        ("step=20 ms", "expected a number"),
        ("step=\u0662\u0660ms", "expected a number"),
        ("step=20ms;token=1ms", "expected a number"),
        ("step=3601s", "mock time step='3601s': at most 3600s"),
        ("step=" + "9" * 400 + "s", "at most 3600s"),
    ],
)
def test_invalid_values_are_rejected_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared below
        MockSpec.parse(text)
    assert message in str(refused.value)


def step_of(*slices: StepSlice) -> Step:
    return Step.of(slices, epoch=1, step_id=0)


def test_a_step_without_slices_takes_no_time() -> None:
    assert MockSpec(step=1.0, token=1.0, context=1.0).step_s(step_of()) == 0.0


def test_a_step_takes_a_base_time_and_a_time_per_token() -> None:
    spec = MockSpec(step=0.02, token=0.001)
    assert spec.step_s(step_of(decode(7))) == pytest.approx(0.021)
    assert spec.step_s(step_of(decode(7), decode(0), chunk(0, 9))) == pytest.approx(0.031)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_context_counts_every_token_that_each_token_attends_to(start: int, num_tokens: int) -> None:
    """Includes the token itself; a chunk costs as much as its tokens one at a time."""
    spec = MockSpec(context=1.0)
    pairs = sum(position + 1 for position in range(start, start + num_tokens))
    assert spec.step_s(step_of(chunk(start, num_tokens))) == pytest.approx(pairs / 1000)
    alone = sum(spec.step_s(step_of(decode(position))) for position in range(start, start + num_tokens))
    assert spec.step_s(step_of(chunk(start, num_tokens))) == pytest.approx(alone)
