"""Step limits shrink after an out-of-memory step, down to the smallest valid step."""

from __future__ import annotations

import pytest

from coordinator.cluster.step_limits import MemoryLimits
from coordinator.planner.plan import StagePlan
from coordinator.scheduler.policy import SchedulerLimits
from wire.ids import Incarnation, StageRole

PLAN = SchedulerLimits(max_step_tokens=512, max_step_sequences=64, max_steps_in_flight=8)

ONE, OTHER = (Incarnation(bytes([number]) * 16) for number in (1, 2))


def bounds(limits: MemoryLimits) -> tuple[int, int]:
    applied = limits.apply(PLAN)
    return applied.max_step_tokens, applied.max_step_sequences


def stage_of(number: int, num_layers: int = 4) -> StagePlan:
    return StagePlan(
        stage=number,
        worker=f"w{number}",
        role=StageRole.MIDDLE,
        layer_begin=4,
        layer_end=4 + num_layers,
        weight_bytes=1,
        kv_bytes=1,
        activation_bytes=1,
        memory_bytes=3,
        cost=1,
    )


def note(
    limits: MemoryLimits, num_tokens: int, num_sequences: int, *, worker: Incarnation = ONE, stage: int = 2
) -> bool:
    return limits.record_out_of_memory(
        worker,
        stage_of(stage),
        PLAN,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        block_size=16,
    )


def test_no_limit_applies_before_memory_was_short() -> None:
    limits = MemoryLimits()
    assert limits.apply(PLAN) is PLAN
    assert limits.text == ""


def test_the_limit_becomes_half_of_the_step_that_did_not_fit() -> None:
    limits = MemoryLimits()
    limits.begin_stage(1, ONE, stage_of(2))
    assert note(limits, 400, 10)
    assert bounds(limits) == (192, 5)
    assert limits.text == (
        "steps are limited to 192 tokens and 5 sequences, because stage 2 ran out of memory"
    )
    assert note(limits, 192, 1)
    assert bounds(limits) == (96, 1)


def test_the_limit_shrinks_to_one_block_and_one_sequence_and_then_fails() -> None:
    limits = MemoryLimits()
    limits.begin_stage(1, ONE, stage_of(2))
    sizes = []
    while note(limits, *bounds(limits)):
        sizes.append(bounds(limits))
    assert sizes[-1] == (16, 1)
    assert len(sizes) <= 10
    assert bounds(limits) == (16, 1)


def test_a_plan_without_the_worker_begins_with_steps_of_full_size() -> None:
    limits = MemoryLimits()
    limits.begin_stage(1, ONE, stage_of(2))
    note(limits, 512, 64)
    limits.begin_stage(1, ONE, stage_of(2))
    assert bounds(limits) == (256, 32)
    limits.begin_stage(2, OTHER, stage_of(2))
    assert limits.apply(PLAN) is PLAN
    assert limits.text == ""
    limits.begin_stage(3, ONE, stage_of(2))
    assert limits.apply(PLAN) is PLAN


@pytest.mark.parametrize(("num_layers", "expected"), [(3, (512, 64)), (4, (256, 32)), (8, (256, 32))])
def test_the_limits_stay_while_the_worker_has_as_many_layers(
    num_layers: int, expected: tuple[int, int]
) -> None:
    limits = MemoryLimits()
    limits.begin_stage(1, ONE, stage_of(2))
    note(limits, 512, 64)
    limits.begin_stage(2, OTHER, stage_of(0))
    limits.begin_stage(2, ONE, stage_of(1, num_layers))
    assert bounds(limits) == expected
    assert limits.text == (
        ""
        if num_layers < 4
        else "steps are limited to 256 tokens and 32 sequences, because stage 1 ran out of memory"
    )


def test_the_least_limits_of_all_stages_apply() -> None:
    limits = MemoryLimits()
    note(limits, 512, 8)
    assert bounds(limits) == (256, 4)
    note(limits, 128, 4, worker=OTHER, stage=3)
    assert bounds(limits) == (64, 2)
    assert limits.text.endswith("64 tokens and 2 sequences, because stage 3 ran out of memory")
    limits.begin_stage(1, ONE, stage_of(2))
    assert bounds(limits) == (256, 4)
