"""Step limits shrink after an out-of-memory step, down to the smallest valid step."""

from __future__ import annotations

from coordinator.cluster.step_limits import MemoryLimits
from coordinator.scheduler.policy import SchedulerLimits

PLAN = SchedulerLimits(max_step_tokens=512, max_step_sequences=64, max_steps_in_flight=8)


def bounds(limits: MemoryLimits) -> tuple[int, int]:
    applied = limits.apply(PLAN)
    return applied.max_step_tokens, applied.max_step_sequences


def note(limits: MemoryLimits, num_tokens: int, num_sequences: int) -> bool:
    return limits.record_out_of_memory(
        2, PLAN, num_tokens=num_tokens, num_sequences=num_sequences, block_size=16
    )


def test_no_limit_applies_before_memory_was_short() -> None:
    limits = MemoryLimits()
    assert limits.apply(PLAN) is PLAN
    assert limits.text == ""


def test_the_limit_becomes_half_of_the_step_that_did_not_fit() -> None:
    limits = MemoryLimits()
    limits.begin_plan(1)
    assert note(limits, 400, 10)
    assert bounds(limits) == (192, 5)
    assert limits.text == (
        "steps are limited to 192 tokens and 5 sequences, because stage 2 ran out of memory"
    )
    assert note(limits, 192, 1)
    assert bounds(limits) == (96, 1)


def test_the_limit_shrinks_to_one_block_and_one_sequence_and_then_fails() -> None:
    limits = MemoryLimits()
    limits.begin_plan(1)
    sizes = []
    while note(limits, *bounds(limits)):
        sizes.append(bounds(limits))
    assert sizes[-1] == (16, 1)
    assert len(sizes) <= 10
    assert bounds(limits) == (16, 1)


def test_another_plan_begins_with_steps_of_full_size() -> None:
    limits = MemoryLimits()
    limits.begin_plan(1)
    note(limits, 512, 64)
    limits.begin_plan(1)
    assert bounds(limits) == (256, 32)
    limits.begin_plan(2)
    assert limits.apply(PLAN) is PLAN
    assert limits.text == ""
