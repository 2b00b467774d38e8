"""Workers of unequal speed get unequal shares of the layers, and similar ones equal shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import Blueprint, DType, Experts, expert_weight_bytes
from coordinator.planner.plan import Plan, PlanImpossible, WorkerCapacity
from coordinator.planner.planner import make_plan
from coordinator.planner.rates import TOLERANCE, levelled, settled
from coordinator.planner.stage_memory import StageMemory
from tests.properties import examples
from tests.unit.coordinator.planner.small_models import (
    GIB,
    SMALL_STEPS,
    USUAL_STEPS,
    llama,
    llama_8b,
    workers,
)
from tests.unit.coordinator.planner.test_expert_plans import mixed_model
from wire.device_rates import DeviceRates
from wire.ids import StageRole

H100 = DeviceRates.parse("3350:800")
A100 = DeviceRates.parse("2000:312")
L4 = DeviceRates.parse("300:121")


def scaled(rates: DeviceRates, factor: float) -> DeviceRates:
    return DeviceRates(
        bytes_per_s=rates.bytes_per_s * factor, operations_per_s=rates.operations_per_s * factor
    )


def with_rates(rates: Sequence[DeviceRates | None], memory_bytes: int = 80 * GIB) -> list[WorkerCapacity]:
    capacities = workers(*[memory_bytes] * len(rates))
    return [replace(worker, rates=rate) for worker, rate in zip(capacities, rates, strict=True)]


def plan_of(config: Blueprint, capacities: Sequence[WorkerCapacity]) -> Plan:
    return make_plan(config, DType.BF16, capacities, limits=USUAL_STEPS, block_size=16)


def shares(config: Blueprint, *rates: DeviceRates | None) -> list[int]:
    return [stage.num_layers for stage in plan_of(config, with_rates(rates)).stages]


def test_a_faster_device_gets_more_layers_in_proportion() -> None:
    assert shares(llama_8b(), H100, A100, H100) == [13, 8, 11]  # the head is work of two layers
    assert shares(llama_8b(), H100, L4) == [31, 1]
    assert shares(llama_8b(), L4, H100) == [2, 30]


def test_devices_of_equal_bandwidth_differ_by_their_products_where_those_take_longer() -> None:
    slow = replace(H100, operations_per_s=H100.operations_per_s / 20)
    assert shares(llama_8b(), H100, slow, H100) == [14, 7, 11]  # reads 0.13 ms, computes 0.23
    half = replace(H100, operations_per_s=H100.operations_per_s / 2)
    assert shares(llama_8b(), H100, half, H100) == shares(llama_8b(), None, None, None)


@pytest.mark.parametrize("noise", [0.87, 0.93, 1.07, 1.14])
def test_similar_devices_get_equal_shares_whatever_was_measured(noise: float) -> None:
    equal = plan_of(llama_8b(), with_rates([None] * 3))
    assert plan_of(llama_8b(), with_rates([H100, scaled(H100, noise), H100])) == equal
    assert plan_of(llama_8b(), with_rates([H100] * 3)) == equal


def test_a_worker_without_rates_makes_all_count_as_equally_fast() -> None:
    assert plan_of(llama_8b(), with_rates([H100, None, L4])) == plan_of(llama_8b(), with_rates([None] * 3))


def test_noise_of_similar_devices_changes_no_share_beside_slower_ones() -> None:
    found = {
        tuple(shares(llama_8b(), scaled(H100, one), A100, scaled(H100, other)))
        for one, other in ((1.0, 1.05), (1.05, 1.0), (1.0, 1.0))
    }
    assert found == {(13, 8, 11)}


def test_levels_join_neighbours_and_keep_gaps() -> None:
    rates = [scaled(H100, factor) for factor in (1.0, 1.1, 2.0, 1.2)]
    found = levelled(rates)
    assert found is not None
    assert [rate.bytes_per_s / H100.bytes_per_s for rate in found] == pytest.approx([1.1, 1.1, 2.0, 1.1])
    assert levelled([H100, None]) is levelled([]) is levelled([None]) is levelled([H100]) is None


def test_a_worker_that_rejoins_keeps_its_rates_if_they_are_similar() -> None:
    assert settled(scaled(H100, 1.1), H100) == H100
    slower = scaled(H100, 0.8)
    assert settled(slower, H100) == slower
    assert settled(None, H100) is None
    assert settled(H100, None) == H100


def test_a_plan_by_rates_has_the_time_of_each_stage() -> None:
    plan = plan_of(llama_8b(), with_rates([H100, A100]))
    first, last = plan.stages
    assert first.step_s == pytest.approx(first.cost / 3350e9, rel=1e-6)
    assert last.step_s == pytest.approx(last.cost / 2000e9, rel=1e-6)
    assert (first.rates, last.rates) == (H100, A100)
    assert {stage.step_s for stage in plan_of(llama_8b(), with_rates([H100, H100])).stages} == {None}


def test_a_sequence_meets_only_the_experts_that_it_chooses() -> None:
    config = mixed_model()
    memory = StageMemory(config=config, dtype=DType.BF16, limits=USUAL_STEPS, block_size=16, num_stages=2)
    layer, experts = config.layers[-1], config.layers[-1].feed_forward
    assert isinstance(experts, Experts)
    of_experts = expert_weight_bytes(config.hidden_size, layer, DType.BF16) // 2
    dense = memory.layer_bytes[-1] // 2 - of_experts
    products = (dense + of_experts * experts.per_token / experts.count) * 32
    slow = DeviceRates(bytes_per_s=1e15, operations_per_s=1e9)
    assert memory.step_ps(slow)[-1] == pytest.approx(2 * products / 1e9 * 1e12, rel=1e-6)


FACTORS = st.sampled_from([1.0, 1.05, 1.5, 2.0, 4.0, 10.0])


@st.composite
def unequal(draw: st.DrawFn) -> tuple[Blueprint, list[WorkerCapacity]]:
    """A small model on 2 to 4 workers of one or several speeds, whose memory may be short."""
    config = llama(num_layers=draw(st.integers(4, 8)), vocab_size=draw(st.integers(8, 400)))
    memory = small_memory(config, 1)
    everything = memory.total_bytes(StageRole.ONLY, 0, config.num_layers, 32)
    num_workers = draw(st.integers(2, 4))
    sizes = st.just(GIB) | st.integers(everything // 2, everything)
    factors = draw(st.lists(FACTORS, min_size=num_workers, max_size=num_workers))
    capacities = workers(*draw(st.lists(sizes, min_size=num_workers, max_size=num_workers)))
    return config, rated(capacities, [scaled(L4, factor) for factor in factors])


def rated(capacities: Sequence[WorkerCapacity], rates: Sequence[DeviceRates]) -> list[WorkerCapacity]:
    return [replace(worker, rates=rate) for worker, rate in zip(capacities, rates, strict=True)]


def small_memory(config: Blueprint, num_stages: int) -> StageMemory:
    return StageMemory(
        config=config, dtype=DType.F32, limits=SMALL_STEPS, block_size=4, num_stages=num_stages
    )


def slowest_ps(config: Blueprint, rates: Sequence[DeviceRates], layers: Sequence[int]) -> int:
    """Time of the slowest stage with these layers, by the cost model."""
    memory = small_memory(config, len(layers))
    edges = list(pairwise([sum(layers[:stage]) for stage in range(len(layers) + 1)]))
    times = [sum(memory.step_ps(rate)[slice(*edge)]) for rate, edge in zip(rates, edges, strict=True)]
    times[-1] += memory.head_ps(rates[-1])
    return max(times)


def small_plan(config: Blueprint, capacities: Sequence[WorkerCapacity]) -> Plan | None:
    try:
        return make_plan(config, DType.F32, capacities, limits=SMALL_STEPS, block_size=4)
    except PlanImpossible:
        return None


@settings(max_examples=examples(3))
@given(unequal())
def test_no_split_in_this_order_is_faster(problem: tuple[Blueprint, list[WorkerCapacity]]) -> None:
    """In particular equal shares are not."""
    config, capacities = problem
    plan = small_plan(config, capacities)
    if plan is None or [stage.worker for stage in plan.stages] != [worker.name for worker in capacities]:
        return
    rates = levelled([worker.rates for worker in capacities]) or [L4] * len(capacities)
    memory = small_memory(config, len(capacities))
    roles = [StageRole.of_stage(stage, len(capacities)) for stage in range(len(capacities))]

    def fits(cuts: Sequence[int]) -> bool:
        stages = zip(roles, pairwise(cuts), capacities, strict=True)
        return all(memory.total_bytes(role, *edge, 8) <= worker.memory_bytes for role, edge, worker in stages)

    found = slowest_ps(config, rates, [stage.num_layers for stage in plan.stages])
    for inner in combinations(range(1, config.num_layers), len(capacities) - 1):
        cuts = (0, *inner, config.num_layers)
        if fits(cuts):
            # Devices of one speed are planned by bytes, and the time of each layer is rounded.
            others = slowest_ps(config, rates, [end - begin for begin, end in pairwise(cuts)])
            assert found <= others + config.num_layers


@pytest.mark.full
@settings(max_examples=examples(6))
@given(unequal(), st.integers(0, 3), st.sampled_from([1.3, 2.0, 5.0]))
def test_a_faster_device_never_slows_the_pipeline(
    problem: tuple[Blueprint, list[WorkerCapacity]], number: int, factor: float
) -> None:
    """By rates that are apart by more than the tolerance, which would move the level of others."""
    config, capacities = problem
    levels = levelled([worker.rates for worker in capacities]) or (L4,) * len(capacities)
    number %= len(capacities)
    faster = [scaled(rate, factor if at == number else 1.0) for at, rate in enumerate(levels)]
    if not all(
        max(one.bytes_per_s, other.bytes_per_s) > TOLERANCE * min(one.bytes_per_s, other.bytes_per_s)
        for one, other in combinations({*levels, *faster}, 2)
    ):
        return
    before, after = (small_plan(config, rated(capacities, rates)) for rates in (levels, faster))
    if before is None or after is None:
        return
    ordered = [[stage.worker for stage in plan.stages] for plan in (before, after)]
    if ordered[0] == ordered[1] == [worker.name for worker in capacities]:
        layers = [[stage.num_layers for stage in plan.stages] for plan in (before, after)]
        assert slowest_ps(config, faster, layers[1]) <= slowest_ps(config, levels, layers[0])


@given(st.lists(FACTORS, min_size=3, max_size=4))
def test_of_two_middle_stages_the_faster_has_no_fewer_layers(factors: list[float]) -> None:
    config = llama(num_layers=12)
    factors = [1.0, *factors, 1.0]
    capacities = with_rates([scaled(L4, factor) for factor in factors], GIB)
    plan = small_plan(config, capacities)
    assert plan is not None
    rates = levelled([worker.rates for worker in capacities]) or (L4,) * len(factors)
    middle = [(rates[at].bytes_per_s, plan.stages[at].num_layers) for at in range(1, len(factors) - 1)]
    for (slow, fewer), (fast, more) in combinations(sorted(middle, key=lambda pair: pair[0]), 2):
        assert slow == fast or more >= fewer
