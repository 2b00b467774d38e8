"""Pipeline depth and chunk size on a pipeline with known times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler.cost_model import CostModel, StepCost, decodes_cost
from coordinator.scheduler.policy import (
    MAX_LAP_OF_DECODES,
    MAX_PREFILL_SHARE,
    MIN_STEP_TOKENS,
    PLANNED_SHARE,
    UNMEASURED_STEP_TOKENS,
    WAITING_LAPS,
    BatchingPolicy,
    DecodeLoad,
    PrefillLoad,
    SchedulerLimits,
    StepPlan,
)
from wire.steps import StageTime


@dataclasses.dataclass(frozen=True)
class Stages:
    """Stages that take `base_us`, plus a time per decode, chunk token and million query-key pairs."""

    slowness: tuple[float, ...] = (1.0, 1.0)
    base_us: float = 10_000
    per_decode_us: float = 0
    per_token_us: float = 100
    per_million_pairs_us: float = 0
    transfer_us: float = 500

    def step_us(self, work: StepCost) -> float:
        """Time on a stage of slowness 1."""
        chunks = work.chunk_tokens * self.per_token_us + work.chunk_pairs * self.per_million_pairs_us / 1e6
        return self.base_us + work.decode_cost / 1024 * self.per_decode_us + chunks

    def chunk_step_us(self, start: int, num_tokens: int) -> float:
        work = StepCost()
        work.add_chunk(start, num_tokens)
        return self.step_us(work)

    def measured(self) -> CostModel:
        """The cost model after decodes and chunks of several sizes."""
        times = CostModel()
        for number in range(1, 30):
            self._observe(times, StepCost(decode_cost=decodes_cost(number, 0)))
            work = StepCost(decode_cost=decodes_cost(2, 0))
            work.add_chunk(64 * number, 32 * (1 + number % 8))
            self._observe(times, work)
        return times

    def _observe(self, times: CostModel, work: StepCost) -> None:
        computing = [self.step_us(work) * slowness for slowness in self.slowness]
        waiting = 300
        elapsed = sum(computing) + waiting * len(computing) + self.transfer_us
        times.observe(work, [StageTime(waiting, round(compute_us)) for compute_us in computing], elapsed)


def policy_of(stages: Stages, **limits: Any) -> BatchingPolicy:
    values = {
        "max_step_tokens": 512,
        "max_step_sequences": 64,
        "max_steps_in_flight": 20,
        "min_steps_in_flight": len(stages.slowness),
        **limits,
    }
    return BatchingPolicy(SchedulerLimits(**values), stages.measured())


def load_of(num_sequences: int) -> DecodeLoad:
    return DecodeLoad(num_sequences, decodes_cost(num_sequences, 0))


NO_DECODES = DecodeLoad(0, 0)
NO_PROMPTS = PrefillLoad(0, 0)


def prompts(num_tokens: int, *, is_alone: bool = False) -> PrefillLoad:
    return PrefillLoad(num_tokens, num_tokens, is_alone)


def plan_of(
    policy: BatchingPolicy, load: DecodeLoad, prefill: PrefillLoad, *, num_in_flight: int = 0
) -> StepPlan:
    plan = policy.plan_step(load, prefill, num_in_flight=num_in_flight, now_s=0.0)
    assert plan is not None
    return plan


def chunk_of(policy: BatchingPolicy, prefill: PrefillLoad, *, start: int = 0, end: int = 10**9) -> int:
    """The first chunk of a step without decodes."""
    return plan_of(policy, NO_DECODES, prefill).chunk_tokens(StepCost(), start=start, end=end)


ONE_PROMPT = prompts(10**9, is_alone=True)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 16])
def test_steps_that_cost_the_same_at_any_size_are_as_many_as_stages(num_stages: int) -> None:
    policy = policy_of(Stages(slowness=(1.0,) * num_stages))
    assert policy.steps_in_flight(load_of(48), NO_PROMPTS) == num_stages


def test_full_steps_are_one_more_than_stages_to_hide_transfers() -> None:
    policy = policy_of(Stages(slowness=(1.0, 1.0), transfer_us=2_000), max_step_sequences=4)
    assert policy.steps_in_flight(load_of(64), NO_PROMPTS) == 3


def test_slow_transfers_are_filled_with_more_steps() -> None:
    near, far = Stages(transfer_us=500), Stages(transfer_us=60_000)
    assert policy_of(near).steps_in_flight(load_of(64), NO_PROMPTS) == 2
    assert policy_of(far).steps_in_flight(load_of(64), NO_PROMPTS) == 8


def test_memory_bounds_the_number_of_steps() -> None:
    assert (
        policy_of(Stages(transfer_us=1e6), max_steps_in_flight=5).steps_in_flight(load_of(64), NO_PROMPTS)
        == 5
    )
    assert (
        policy_of(Stages(transfer_us=1e6), max_steps_in_flight=2).steps_in_flight(load_of(64), NO_PROMPTS)
        == 2
    )


def test_compute_bound_steps_hide_transfers_for_free() -> None:
    """Four steps of 4 ms: each is on its way for twice 4 and 8 ms, so a stage is always busy."""
    policy = policy_of(Stages(base_us=0, per_decode_us=1_000, transfer_us=8_000))
    assert policy.steps_in_flight(load_of(16), NO_PROMPTS) == 4


def test_an_uneven_pipeline_needs_no_more_steps_than_keep_its_slowest_stage_busy() -> None:
    policy = policy_of(Stages(slowness=(1.0, 0.2, 0.2, 0.2), transfer_us=400), max_step_sequences=4)
    assert policy.steps_in_flight(load_of(64), NO_PROMPTS) == 4


def test_without_measurements_there_is_a_step_for_each_stage() -> None:
    limits = SchedulerLimits(
        max_step_tokens=64, max_step_sequences=8, max_steps_in_flight=12, min_steps_in_flight=3
    )
    policy = BatchingPolicy(limits, CostModel())
    assert policy.steps_in_flight(load_of(10), NO_PROMPTS) == 3
    assert chunk_of(policy, ONE_PROMPT) == 64


def test_chunks_are_small_until_one_was_measured() -> None:
    limits = SchedulerLimits(max_step_tokens=4096, max_step_sequences=8, max_steps_in_flight=3)
    policy = BatchingPolicy(limits, CostModel())
    assert chunk_of(policy, ONE_PROMPT) == UNMEASURED_STEP_TOKENS
    plan = plan_of(policy, load_of(4), prompts(10**9))
    assert plan.chunk_tokens(StepCost(decode_cost=4096), start=512, end=10**9) == UNMEASURED_STEP_TOKENS


def test_no_hop_takes_longer_than_a_stage_computes() -> None:
    stages = Stages(slowness=(1.0, 1.0, 1.0))
    sizes = []
    for hop_us in (0.0, 0.5, 1.5, 2.0, 5.0):
        factor = hop_us * stages.per_token_us
        policy = policy_of(stages, hop_us=(factor / 2, factor), max_step_tokens=4096)
        sizes.append(policy._prefill_step_tokens(100_000))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1], "the hops fill like stages"
    slowest = policy._slowest
    for hop_us, size in zip((1.5, 2.0), sizes[2:4], strict=True):
        transfer_us = size * hop_us * stages.per_token_us
        assert transfer_us <= 1.05 * (slowest.decode_us(0) + slowest.chunk_us(size, 0))
    assert sizes[4] == MIN_STEP_TOKENS


def test_prefill_alone_has_one_step_more_than_stages() -> None:
    policy = policy_of(Stages(slowness=(1.0,) * 4))
    assert policy.steps_in_flight(NO_DECODES, ONE_PROMPT) == 5


def test_a_fixed_number_of_steps_is_kept() -> None:
    policy = policy_of(Stages(transfer_us=1e6), max_steps_in_flight=3, min_steps_in_flight=None)
    assert (
        policy.steps_in_flight(load_of(64), NO_PROMPTS) == policy.steps_in_flight(NO_DECODES, ONE_PROMPT) == 3
    )


# Chunks


def test_chunks_get_shorter_as_the_context_grows_so_that_they_take_equal_time() -> None:
    stages = Stages(base_us=0, per_million_pairs_us=20_000)
    policy = policy_of(stages)
    sizes = {start: chunk_of(policy, ONE_PROMPT, start=start) for start in (0, 2_000, 8_000, 30_000)}
    assert sizes[0] == 512
    assert sizes[2_000] > sizes[8_000] > sizes[30_000] > 0
    full_us = stages.chunk_step_us(0, 512)
    for start, size in sizes.items():
        assert stages.chunk_step_us(start, size) == pytest.approx(full_us, rel=0.1)


def test_chunks_stay_full_where_the_context_costs_nothing() -> None:
    policy = policy_of(Stages())
    assert chunk_of(policy, ONE_PROMPT, start=100_000) == 512


@pytest.mark.parametrize(("num_stages", "num_tokens"), [(2, 2048), (4, 2048), (4, 8192), (8, 20_000)])
def test_a_burst_of_prompts_is_split_for_the_earliest_completion(num_stages: int, num_tokens: int) -> None:
    stages = Stages(slowness=(1.0,) * num_stages)
    policy = policy_of(stages, max_step_tokens=4096)

    def makespan_us(size: int) -> float:
        return (-(-num_tokens // size) + num_stages - 1) * stages.chunk_step_us(0, size)

    plan = plan_of(policy, NO_DECODES, prompts(num_tokens, is_alone=True))
    size = plan.chunk_tokens(StepCost(), start=0, end=10**9)
    best = min(makespan_us(num_tokens) for num_tokens in range(64, 4097, 8))
    assert makespan_us(size) <= 1.05 * best
    rest = plan.chunk_tokens(StepCost(chunk_tokens=size // 2), start=0, end=10**9)
    assert rest == size - size // 2


def test_the_chunk_size_does_not_depend_on_a_fixed_number_of_steps() -> None:
    stages = Stages(slowness=(1.0, 1.0))
    fixed = policy_of(stages, max_step_tokens=4096, max_steps_in_flight=8, min_steps_in_flight=8)
    free = policy_of(stages, max_step_tokens=4096)
    sizes = {chunk_of(policy, prompts(8192, is_alone=True)) for policy in (fixed, free)}
    assert len(sizes) == 1


def test_a_step_of_prefill_ends_with_a_prompt_where_it_can() -> None:
    policy = policy_of(Stages(), max_step_tokens=4096)
    plan = plan_of(policy, NO_DECODES, prompts(8192, is_alone=True))
    size = plan.chunk_tokens(StepCost(), start=0, end=10**9)
    assert plan.chunk_tokens(StepCost(), start=0, end=size + size // 4) == size + size // 4
    assert plan.chunk_tokens(StepCost(), start=0, end=2 * size) == size
    nearly_full = StepCost(chunk_tokens=size * 3 // 4)
    assert plan.chunk_tokens(nearly_full, start=0, end=2 * size) == 0
    assert plan.chunk_tokens(nearly_full, start=0, end=size // 2) == size // 2


@pytest.mark.parametrize("slowdown", [1.2, 1.4, 2.0])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_prefill_slows_decodes_down_as_much_as_allowed_and_no_token_much_more(
    slowdown: float, num_sequences: int
) -> None:
    stages = Stages(per_million_pairs_us=5_000)
    policy, load = policy_of(stages, max_decode_slowdown=slowdown), load_of(num_sequences)
    cycle_us = 2 * stages.base_us + stages.transfer_us
    steps_per_cycle = min(2, num_sequences)
    start, added = 0, list[float]()
    for _ in range(400):
        plan = plan_of(policy, load, prompts(10**9))
        size = plan.chunk_tokens(StepCost(), start=start, end=10**9)
        step = StepCost()
        if size:
            step.add_chunk(start, size)
        prefill_us = stages.step_us(step) - stages.base_us
        policy.record_step(load, plan, step, 0.0)
        start += size
        added.append(prefill_us)
    average = 1 + steps_per_cycle * sum(added[20:]) / len(added[20:]) / cycle_us
    assert average == pytest.approx(slowdown, rel=0.1)
    assert max(added) <= 1.05 * max(MAX_PREFILL_SHARE, 2 * (slowdown - 1)) * cycle_us
    # Chunks are large and few, so that most tokens are not late at all.
    if slowdown <= 1.4:
        assert sum(increment > 0 for increment in added) * steps_per_cycle <= 0.5 * len(added)


def test_with_a_slowdown_the_rest_of_a_prompt_does_not_wait_longer_than_its_own_cost() -> None:
    policy, load = policy_of(Stages(), max_decode_slowdown=1.4), load_of(16)
    policy.record_step(load, plan_of(policy, load, prompts(512)), StepCost(chunk_tokens=320), 0.0)
    waited = 0
    while not (plan := plan_of(policy, load, prompts(20))).chunk_tokens(StepCost(), start=492, end=512):
        policy.record_step(load, plan, StepCost(), 0.0)
        waited += 1
    # It had 17,425 us, spent 32,000, and saves 4,100 us a step; 20 tokens take 2,000 of them.
    assert waited == 4


def test_chunks_that_cost_nothing_are_full() -> None:
    """Small ones may take less than a step of decodes has been measured to take."""
    policy = policy_of(Stages(per_token_us=0))
    assert chunk_of(policy, ONE_PROMPT, start=700) == 512
    plan = plan_of(policy, load_of(4), prompts(10**9))
    assert plan.chunk_tokens(StepCost(decode_cost=4096), start=700, end=10**9) == 512


# Prompts beside decodes


def filled(policy: BatchingPolicy, load: DecodeLoad, plan: StepPlan) -> StepCost:
    """A step with an even share of the decodes and as much of a long prompt as it takes."""
    step = StepCost(decode_cost=load.cost // plan.num_steps)
    if size := plan.chunk_tokens(step, start=0, end=10**9):
        step.add_chunk(0, size)
    policy.record_step(load, plan, step, 0.0)
    return step


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_sequences", [1, 16, 64])
def test_a_lap_of_steps_with_prompts_takes_the_target(num_stages: int, num_sequences: int) -> None:
    stages = Stages(slowness=(1.0,) * num_stages, base_us=2_000, per_decode_us=50, transfer_us=200)
    policy, load = policy_of(stages, max_step_tokens=4096, itl_target_s=0.2), load_of(num_sequences)
    lap_us = sum(stages.step_us(filled(policy, load, plan)) for plan in full_pipeline(policy, load))
    assert 0.85 * PLANNED_SHARE * 0.2e6 <= lap_us <= 1.01 * PLANNED_SHARE * 0.2e6


def full_pipeline(policy: BatchingPolicy, load: DecodeLoad) -> Iterator[StepPlan]:
    """The plans of one lap in a pipeline that computes prompts all the time."""
    num_steps = policy.steps_in_flight(load, prompts(10**6))
    now_s, step_s = 0.0, PLANNED_SHARE * 0.2 / num_steps
    for number in range(2 * num_steps):
        plan = policy.plan_step(load, prompts(10**6), num_in_flight=min(number, num_steps - 1), now_s=now_s)
        assert plan is not None
        if number >= num_steps:
            yield plan
        else:
            policy.record_step(load, plan, StepCost(decode_cost=1, chunk_tokens=1), now_s)
        now_s += step_s


@given(
    num_stages=st.integers(1, 16),
    num_sequences=st.integers(1, 256),
    base_us=st.integers(100, 50_000),
    per_decode_us=st.integers(0, 2_000),
    per_token_us=st.integers(1, 1_000),
    target_s=st.floats(0.005, 2.0),
)
def test_a_step_never_exceeds_its_share_of_the_lap(
    num_stages: int,
    num_sequences: int,
    base_us: int,
    per_decode_us: int,
    per_token_us: int,
    target_s: float,
) -> None:
    """Except for one token of a prompt, so that prompts never starve."""
    stages = Stages((1.0,) * num_stages, base_us, per_decode_us, per_token_us)
    policy, load = policy_of(stages, max_step_tokens=4096, itl_target_s=target_s), load_of(num_sequences)
    decode_lap_us = policy.lap_budget_us(load, NO_PROMPTS)
    for _ in range(3):
        plan = plan_of(policy, load, prompts(10**6))
        step = filled(policy, load, plan)
        lap_us = policy.lap_budget_us(load, prompts(10**6))
        assert step.chunk_tokens >= 1
        step_us = policy.predicted_us(step)
        assert step_us <= lap_us / plan.num_steps * 1.01 + per_token_us * 17 or step.chunk_tokens == 1
        assert lap_us <= max(target_s * 1e6, MAX_LAP_OF_DECODES * decode_lap_us)
        assert decode_lap_us >= PLANNED_SHARE * target_s * 1e6


def test_prompts_progress_even_where_decodes_fill_the_step() -> None:
    policy, load = policy_of(Stages(per_decode_us=1_000), max_step_sequences=256), load_of(256)
    plan = plan_of(policy, load, prompts(1_000))
    full = StepCost(decode_cost=load.cost)
    assert plan.time_left_us(full) < 0
    assert plan.chunk_tokens(full, start=0, end=1_000) == 1


def test_the_lap_exceeds_the_target_only_if_the_waiting_prompts_need_it() -> None:
    stages = Stages(base_us=60_000, transfer_us=0)
    policy, load = policy_of(stages), load_of(8)
    short, long = (policy.lap_budget_us(load, prompts(number)) for number in (100, 10**6))
    assert short == pytest.approx(120_000 + 100 * stages.per_token_us / WAITING_LAPS, rel=0.05)
    assert long == pytest.approx(MAX_LAP_OF_DECODES * 120_000, rel=0.05)


def test_a_step_behind_others_is_shorter_by_the_wait_for_them() -> None:
    policy, load = policy_of(Stages(base_us=1_000, transfer_us=0)), load_of(2)
    free = plan_of(policy, load, prompts(10**6))
    policy.record_step(load, free, StepCost(decode_cost=1024, chunk_tokens=250), 0.0)
    behind = plan_of(policy, load, prompts(10**6), num_in_flight=1)
    # The first leaves the slowest stage after 26 ms, and two of three steps of a lap are left.
    lap_us = PLANNED_SHARE * 100_000
    assert free.max_step_us == pytest.approx(lap_us / 3, rel=0.02)
    assert behind.max_step_us == pytest.approx((lap_us - 26_000) / 2, rel=0.05)


def test_decodes_share_a_step_while_prompts_wait_and_spread_out_again() -> None:
    policy, load = policy_of(Stages(slowness=(1.0,) * 4, base_us=1_000)), load_of(16)
    assert plan_of(policy, load, prompts(1_000)).num_shares == 1
    assert plan_of(policy, load, NO_PROMPTS).num_shares == 4


def test_decodes_spread_out_while_prompts_wait_for_blocks() -> None:
    policy, load = policy_of(Stages(slowness=(1.0,) * 4, base_us=1_000)), load_of(16)
    plan = plan_of(policy, load, prompts(1_000))
    policy.record_step(load, plan, StepCost(decode_cost=load.cost), 0.0)
    assert plan_of(policy, load, prompts(1_000)).num_shares == 4
    policy.record_step(load, plan, StepCost(decode_cost=load.cost, chunk_tokens=16), 0.0)
    assert plan_of(policy, load, prompts(1_000)).num_shares == 1


def test_a_burst_is_bounded_before_its_first_decode_but_a_lone_prompt_is_not() -> None:
    policy = policy_of(Stages(slowness=(1.0,)), max_step_tokens=4096)
    assert chunk_of(policy, prompts(4096, is_alone=True)) == 4096
    assert chunk_of(policy, prompts(4096)) == pytest.approx(
        (PLANNED_SHARE * 100_000 - 500 - 10_000) / 100, rel=0.02
    )


@pytest.mark.parametrize(
    "values",
    [
        {"min_steps_in_flight": 0},
        {"min_steps_in_flight": 9},
        {"max_decode_slowdown": 1.0},
        {"max_decode_slowdown": math.nan},
        {"itl_target_s": 0.0},
        {"itl_target_s": -1.0},
        {"itl_target_s": math.nan},
        {"itl_target_s": math.inf},
        {"max_step_tokens": 0},
    ],
)
def test_impossible_limits_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SchedulerLimits(**{"max_step_tokens": 8, "max_step_sequences": 8, "max_steps_in_flight": 8, **values})
