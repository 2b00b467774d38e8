"""Pipeline depth and chunk size on a pipeline with known times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.scheduler.cost_model import CostModel, StepCost, chunk_pairs, decodes_cost
from coordinator.scheduler.policy import (
    MAX_PREFILL_SHARE,
    BatchingPolicy,
    DecodeLoad,
    PrefillLoad,
    SchedulerLimits,
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
        "max_decode_slowdown": 1.4,
        **limits,
    }
    return BatchingPolicy(SchedulerLimits(**values), stages.measured())


def load_of(num_sequences: int) -> DecodeLoad:
    return DecodeLoad(num_sequences, decodes_cost(num_sequences, 0))


NO_DECODES = DecodeLoad(0, 0)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 16])
def test_steps_that_cost_the_same_at_any_size_are_as_many_as_stages(num_stages: int) -> None:
    policy = policy_of(Stages(slowness=(1.0,) * num_stages))
    assert policy.steps_in_flight(load_of(48)) == num_stages


def test_full_steps_are_one_more_than_stages_to_hide_transfers() -> None:
    policy = policy_of(Stages(slowness=(1.0, 1.0), transfer_us=2_000), max_step_sequences=4)
    assert policy.steps_in_flight(load_of(64)) == 3


def test_slow_transfers_are_filled_with_more_steps() -> None:
    near, far = Stages(transfer_us=500), Stages(transfer_us=60_000)
    assert policy_of(near).steps_in_flight(load_of(64)) == 2
    assert policy_of(far).steps_in_flight(load_of(64)) == 8


def test_memory_bounds_the_number_of_steps() -> None:
    assert policy_of(Stages(transfer_us=1e6), max_steps_in_flight=5).steps_in_flight(load_of(64)) == 5
    assert policy_of(Stages(transfer_us=1e6), max_steps_in_flight=2).steps_in_flight(load_of(64)) == 2


def test_compute_bound_steps_hide_transfers_for_free() -> None:
    """Four steps of 4 ms: each is on its way for twice 4 and 8 ms, so a stage is always busy."""
    policy = policy_of(Stages(base_us=0, per_decode_us=1_000, transfer_us=8_000))
    assert policy.steps_in_flight(load_of(16)) == 4


def test_an_uneven_pipeline_needs_no_more_steps_than_keep_its_slowest_stage_busy() -> None:
    policy = policy_of(Stages(slowness=(1.0, 0.2, 0.2, 0.2), transfer_us=400), max_step_sequences=4)
    assert policy.steps_in_flight(load_of(64)) == 4


def test_without_measurements_there_is_a_step_for_each_stage() -> None:
    limits = SchedulerLimits(
        max_step_tokens=64, max_step_sequences=8, max_steps_in_flight=12, min_steps_in_flight=3
    )
    policy = BatchingPolicy(limits, CostModel())
    assert policy.steps_in_flight(load_of(10)) == 3
    assert policy.chunk_tokens(NO_DECODES, PrefillLoad(10**9, 0), start=0, end=10**9) == 64
    assert policy.chunk_tokens(load_of(10), PrefillLoad(10**9, 0), start=512, end=10**9) == 64


def test_prefill_alone_has_one_step_more_than_stages() -> None:
    policy = policy_of(Stages(slowness=(1.0,) * 4))
    assert policy.steps_in_flight(NO_DECODES) == 5


def test_a_fixed_number_of_steps_is_kept() -> None:
    policy = policy_of(Stages(transfer_us=1e6), max_steps_in_flight=3, min_steps_in_flight=None)
    assert policy.steps_in_flight(load_of(64)) == policy.steps_in_flight(NO_DECODES) == 3


# Chunks


def test_chunks_get_shorter_as_the_context_grows_so_that_they_take_equal_time() -> None:
    stages = Stages(base_us=0, per_million_pairs_us=20_000)
    policy = policy_of(stages)
    sizes = {
        start: policy.chunk_tokens(NO_DECODES, PrefillLoad(10**9, 0), start=start, end=10**9)
        for start in (0, 2_000, 8_000, 30_000)
    }
    assert sizes[0] == 512
    assert sizes[2_000] > sizes[8_000] > sizes[30_000] > 0
    full_us = stages.chunk_step_us(0, 512)
    for start, size in sizes.items():
        assert stages.chunk_step_us(start, size) == pytest.approx(full_us, rel=0.1)


def test_chunks_stay_full_where_the_context_costs_nothing() -> None:
    policy = policy_of(Stages())
    assert policy.chunk_tokens(NO_DECODES, PrefillLoad(10**9, 0), start=100_000, end=10**9) == 512


@pytest.mark.parametrize(("num_stages", "num_tokens"), [(2, 2048), (4, 2048), (4, 8192), (8, 20_000)])
def test_a_burst_of_prompts_is_split_for_the_earliest_completion(num_stages: int, num_tokens: int) -> None:
    stages = Stages(slowness=(1.0,) * num_stages)
    policy = policy_of(stages, max_step_tokens=4096)

    def makespan_us(size: int) -> float:
        return (-(-num_tokens // size) + num_stages - 1) * stages.chunk_step_us(0, size)

    size = policy.chunk_tokens(NO_DECODES, PrefillLoad(num_tokens), start=0, end=10**9)
    best = min(makespan_us(num_tokens) for num_tokens in range(64, 4097, 8))
    assert makespan_us(size) <= 1.05 * best
    rest = policy.chunk_tokens(NO_DECODES, PrefillLoad(num_tokens, step_tokens=size // 2), start=0, end=10**9)
    assert rest == size - size // 2


def test_the_chunk_size_does_not_depend_on_a_fixed_number_of_steps() -> None:
    stages = Stages(slowness=(1.0, 1.0))
    fixed = policy_of(stages, max_step_tokens=4096, max_steps_in_flight=8, min_steps_in_flight=8)
    free = policy_of(stages, max_step_tokens=4096)
    sizes = {
        policy.chunk_tokens(NO_DECODES, PrefillLoad(8192), start=0, end=10**9) for policy in (fixed, free)
    }
    assert len(sizes) == 1


def test_a_step_of_prefill_ends_with_a_prompt_where_it_can() -> None:
    policy = policy_of(Stages(), max_step_tokens=4096)
    burst = PrefillLoad(8192)
    size = policy.chunk_tokens(NO_DECODES, burst, start=0, end=10**9)
    assert policy.chunk_tokens(NO_DECODES, burst, start=0, end=size + size // 4) == size + size // 4
    assert policy.chunk_tokens(NO_DECODES, burst, start=0, end=2 * size) == size
    nearly_full = PrefillLoad(8192, step_tokens=size * 3 // 4)
    assert policy.chunk_tokens(NO_DECODES, nearly_full, start=0, end=2 * size) == 0
    assert policy.chunk_tokens(NO_DECODES, nearly_full, start=0, end=size // 2) == size // 2


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
        size = policy.chunk_tokens(load, PrefillLoad(10**9), start=start, end=10**9)
        prefill_us = policy.chunk_us(start=start, num_tokens=size) if size else 0.0
        pairs_us = chunk_pairs(start, size) * stages.per_million_pairs_us / 1e6
        assert not size or prefill_us == pytest.approx(size * stages.per_token_us + pairs_us, rel=0.02)
        policy.record_step(load, prefill_us=prefill_us)
        start += size
        added.append(prefill_us)
    average = 1 + steps_per_cycle * sum(added[20:]) / len(added[20:]) / cycle_us
    assert average == pytest.approx(slowdown, rel=0.1)
    assert max(added) <= 1.05 * max(MAX_PREFILL_SHARE, 2 * (slowdown - 1)) * cycle_us
    # Chunks are large and few, so that most tokens are not late at all.
    if slowdown <= 1.4:
        assert sum(increment > 0 for increment in added) * steps_per_cycle <= 0.5 * len(added)


def test_the_rest_of_a_prompt_does_not_wait_longer_than_its_own_cost() -> None:
    policy, load = policy_of(Stages()), load_of(16)
    policy.record_step(load, prefill_us=32_000)
    waited = 0
    while not policy.chunk_tokens(load, PrefillLoad(20), start=492, end=512):
        policy.record_step(load, prefill_us=0)
        waited += 1
    # It had 17,425 us, spent 32,000, and saves 4,100 us a step; 20 tokens take 2,000 of them.
    assert waited == 4


def test_chunks_that_cost_nothing_are_full() -> None:
    """Small ones may take less than a step of decodes has been measured to take."""
    policy = policy_of(Stages(per_token_us=0))
    assert policy.chunk_tokens(NO_DECODES, PrefillLoad(10**9, 0), start=700, end=10**9) == 512
    assert policy.chunk_tokens(load_of(4), PrefillLoad(10**9, 0), start=700, end=10**9) == 512


@pytest.mark.parametrize(
    "values",
    [
        {"min_steps_in_flight": 0},
        {"min_steps_in_flight": 9},
        {"max_decode_slowdown": 1.0},
        {"max_step_tokens": 0},
    ],
)
def test_impossible_limits_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SchedulerLimits(**{"max_step_tokens": 8, "max_step_sequences": 8, "max_steps_in_flight": 8, **values})
