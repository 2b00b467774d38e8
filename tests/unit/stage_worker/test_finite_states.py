"""Whose fault it is that something is not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stage_worker.finite_states import are_finite, check_answered, check_handed_on
from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.steps import Decode, Prefill, Slice, SliceError, SliceResult, Step

WIDTH = 8


def key(request: int, choice: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(bytes([request]) * 16), choice)


STEP = Step(
    epoch=1,
    step_id=3,
    digest=0,
    slices=(
        Slice(key(1), 0, (5, 6, 7), Prefill(0, 3, 3)),
        Slice(key(2), 0, (8,), Decode(9)),
        Slice(key(3), 0, (9,), Decode(4)),
        Slice(key(3, 1), 0, (9,), Decode(4)),
    ),
)


def states(*bad_rows: int, value: float = math.nan) -> torch.Tensor:
    hidden = torch.ones(6, WIDTH)
    for row in bad_rows:
        hidden[row, 3] = value
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_value_that_is_not_finite_is_seen(dtype: torch.dtype, value: float) -> None:
    assert are_finite(states().to(dtype))
    assert not are_finite(states(4, value=value).to(dtype))


def test_large_values_that_add_up_to_more_than_the_dtype_holds_are_finite() -> None:
    assert are_finite(torch.full((64, 64), 6e4, dtype=torch.float16))


@pytest.mark.parametrize("rows", [(), (0,), (0, 1, 2), (3,), (4, 5)], ids=str)
def test_one_request_alone_is_its_own_fault(rows: tuple[int, ...]) -> None:
    check_handed_on(STEP, None, states(*rows))
    check_handed_on(STEP, states(), states(*rows))


@pytest.mark.parametrize("rows", [(0, 3), (2, 5), range(6)], ids=str)
def test_several_requests_are_the_fault_of_the_stage(rows: tuple[int, ...]) -> None:
    with pytest.raises(StepFault, match=r"computed for \d of 3 requests is not finite") as raised:
        check_handed_on(STEP, states(), states(*rows))
    assert raised.value.kind is StepFaultKind.NON_FINITE


def test_a_step_of_one_request_without_a_finite_row_is_the_fault_of_the_stage() -> None:
    """With a finite row before it, what the request has brought itself is the cause."""
    step = replace(STEP, slices=STEP.slices[:1])
    check_handed_on(step, None, states(1, 2)[:3])
    check_handed_on(step, states(0)[:3], states(0, 1, 2)[:3])
    with pytest.raises(StepFault, match="1 of 1 requests"):
        check_handed_on(step, states()[:3], states(0, 1, 2)[:3])
    with pytest.raises(StepFault, match="1 of 1 requests"):
        check_answered(step, states()[:3], states(0, 1, 2)[:3], answers(0)[:1])
    check_answered(step, states()[:3], states(1, 2)[:3], answers(0)[:1])


def test_what_came_in_so_is_not_the_fault_of_this_stage() -> None:
    check_handed_on(STEP, states(0, 3), states(0, 1, 2, 3))
    check_handed_on(STEP, states(0), states(0, 3))
    with pytest.raises(StepFault):
        check_handed_on(STEP, states(0), states(0, 3, 4))


def answers(*bad: int, kind: int = stage_pb2.SliceError.KIND_NON_FINITE_LOGITS) -> list[SliceResult]:
    error = SliceError(kind, 1, "logits are not finite")
    return [
        SliceResult(part.sequence, 0, error if place in bad else 7) for place, part in enumerate(STEP.slices)
    ]


def test_logits_are_judged_like_hidden_states() -> None:
    check_answered(STEP, states(), states(), answers(1))
    check_answered(STEP, states(), states(), answers(2, 3))
    check_answered(STEP, states(0, 3), states(), answers(0, 1))
    check_answered(STEP, states(), states(), answers(0, 1, kind=stage_pb2.SliceError.KIND_SAMPLER))
    with pytest.raises(StepFault):
        check_answered(STEP, states(), states(), answers(0, 1))
