"""The planner assigns every layer to one stage within memory, with an optimal split."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import Blueprint, DType
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from coordinator.planner.plan import DeviceKind, Plan, PlanImpossible, StepLimits, WorkerCapacity
from coordinator.planner.planner import make_plan, plan_for
from coordinator.planner.stage_memory import StageMemory
from kvcache import KvGroup, KvWindow
from tests.properties import examples
from tests.unit.coordinator.planner.small_models import (
    GIB,
    SMALL_STEPS,
    USUAL_STEPS,
    llama,
    llama_8b,
    workers,
)
from wire.ids import StageRole
from wire.staging import hop_segment_bytes
from wire.tensors import HopRoute

BLOCK_SIZE = 4
MAX_CPU_S = 5.0
"""Of plans that take 0.1 s; trying all of them would take hours."""
Objective = tuple[int, int, int]


def small_plan(config: Blueprint, capacities: Sequence[WorkerCapacity]) -> Plan:
    return make_plan(config, DType.F32, capacities, limits=SMALL_STEPS, block_size=BLOCK_SIZE)


def small_memory(config: Blueprint) -> StageMemory:
    return StageMemory(
        config=config, dtype=DType.F32, limits=SMALL_STEPS, block_size=BLOCK_SIZE, num_stages=1
    )


def on_one_host(capacities: Sequence[WorkerCapacity]) -> list[WorkerCapacity]:
    return [replace(capacity, memory_domain="host") for capacity in capacities]


def test_memory_that_stages_of_a_host_share_is_part_of_their_budgets() -> None:
    config = llama(num_layers=6)
    payload = SMALL_STEPS.max_step_tokens * config.hidden_size * DType.F32.size_bytes
    apart = small_plan(config, workers(80_000, 80_000, 80_000))
    plan = small_plan(config, on_one_host(workers(80_000, 80_000, 80_000)))
    assert [stage.segment_bytes for stage in plan.stages] == [*[hop_segment_bytes(payload)] * 2, 0]
    for stage, alone in zip(plan.stages, apart.stages, strict=True):
        parts = stage.weight_bytes + stage.kv_bytes + stage.activation_bytes
        assert stage.total_bytes == parts + stage.segment_bytes <= stage.memory_bytes
        assert alone.segment_bytes == 0
    assert plan.num_blocks < apart.num_blocks
    with pytest.raises(PlanImpossible, match=r"activations \+ 32\.0 KiB shared with the next stage \+ .* KV"):
        small_plan(config, on_one_host(workers(40_000, 40_000, 40_000)))


@pytest.mark.parametrize("route", HopRoute, ids=lambda route: route.value)
def test_a_plan_counts_shared_memory_only_if_hidden_states_may_travel_there(route: HopRoute) -> None:
    config = CoordinatorConfig(num_stages=2, hidden_states=route)
    plan = plan_for(config, open_model(config), on_one_host(workers(GIB, GIB)))
    assert [bool(stage.segment_bytes) for stage in plan.stages] == [route is HopRoute.AUTO, False]


def test_only_a_hop_within_a_host_shares_memory() -> None:
    capacities = workers(80_000, 80_000, 80_000)
    mixed = [replace(capacities[0], memory_domain="a"), replace(capacities[1], memory_domain="b")]
    plan = small_plan(llama(num_layers=6), [*mixed, replace(capacities[2], memory_domain="b")])
    assert [bool(stage.segment_bytes) for stage in plan.stages] == [False, True, False]


def test_a_gpu_shares_as_much_of_its_memory_as_of_its_host() -> None:
    capacities = [
        replace(capacity, device=DeviceKind.GPU) for capacity in on_one_host(workers(2 * GIB, 2 * GIB))
    ]
    first, last = small_plan(llama(num_layers=6), capacities).stages
    assert first.segment_bytes > 0 and last.segment_bytes == 0
    parts = first.weight_bytes + first.kv_bytes + first.activation_bytes + first.buffer_bytes
    assert first.total_bytes == parts + first.overhead_bytes + first.segment_bytes
    assert first.pinned_bytes == first.buffer_bytes + first.segment_bytes
    assert last.pinned_bytes == last.buffer_bytes


Ranges = Sequence[tuple[int, int]]
TotalBytes = Callable[[StageRole, int, int, int], int]


def splits(config: Blueprint, num_stages: int) -> Iterator[Ranges]:
    for inner in combinations(sorted(config.legal_cuts), num_stages - 1):
        yield list(pairwise((0, *inner, config.num_layers)))


def objective(
    memory: StageMemory, total_bytes: TotalBytes, ranges: Ranges, capacities: Sequence[int]
) -> Objective | None:
    """(slowest cost, minus blocks, sum of squared costs) of one split, or None when it does not fit."""
    roles = [StageRole.of_stage(stage, len(ranges)) for stage in range(len(ranges))]
    stages = [(role, *edges, size) for role, edges, size in zip(roles, ranges, capacities, strict=True)]
    least = SMALL_STEPS.max_sequence_tokens // BLOCK_SIZE
    num_sequences = (len(ranges) + 1) * SMALL_STEPS.max_step_sequences
    most = num_sequences * SMALL_STEPS.max_sequence_tokens // BLOCK_SIZE
    too_many = bisect_left(
        range(most + 1),
        True,
        key=lambda blocks: any(total_bytes(*stage, blocks) > size for *stage, size in stages),
    )
    if too_many <= least:
        return None
    costs = [memory.cost(role, begin, end) for role, begin, end, _ in stages]
    return max(costs), 1 - too_many, sum(cost * cost for cost in costs)


def best_by_trying(memory: StageMemory, orders: Sequence[Sequence[int]]) -> Objective | None:
    total_bytes = cache(memory.total_bytes)  # the splits have most stages in common
    tried = [
        objective(memory, total_bytes, ranges, order)
        for order in orders
        for ranges in splits(memory.config, len(order))
    ]
    return min((found for found in tried if found is not None), default=None)


def with_kinds(config: Blueprint, kinds: Sequence[int], legal_cuts: frozenset[int]) -> Blueprint:
    """The model with layers of kind 0 (as they are), 1 (no KV to speak of), 2 (20 times the weights)."""
    layer = config.layers[0]
    narrow = replace(layer, mixer=replace(layer.mixer, num_kv_heads=1, head_dim=2))
    wide = replace(layer, feed_forward=replace(layer.feed_forward, width=30 * layer.feed_forward.width))
    layers = tuple((layer, narrow, wide)[kind] for kind in kinds)
    return replace(config, layers=layers, legal_cuts=legal_cuts)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Blueprint, list[WorkerCapacity]]:
    """A small model and 1 to 4 workers with memory for none to about all of it."""
    config = llama(
        num_layers=draw(st.integers(4, 7)), tied=draw(st.booleans()), vocab_size=draw(st.integers(8, 600))
    )
    return config, draw(capacities_for(config, max_workers=4))


@st.composite
def mixed_problems(draw: st.DrawFn) -> tuple[Blueprint, list[WorkerCapacity]]:
    """As `problems`, with layers of unequal size, of which only some can begin a stage."""
    kinds = draw(st.lists(st.integers(0, 2), min_size=4, max_size=8))
    inner = range(1, len(kinds))
    illegal = draw(st.sets(st.sampled_from(inner), max_size=len(inner) - 1))
    model = llama(num_layers=len(kinds), tied=draw(st.booleans()), vocab_size=draw(st.integers(8, 600)))
    config = with_kinds(model, kinds, frozenset(inner) - illegal)
    return config, draw(capacities_for(config, max_workers=min(4, len(config.legal_cuts) + 1)))


@st.composite
def misplaced_problems(draw: st.DrawFn) -> tuple[Blueprint, list[WorkerCapacity]]:
    """5 workers, of which the first or the last has memory for a small middle stage only."""
    kinds = draw(st.lists(st.integers(0, 2), min_size=5, max_size=8))
    config = with_kinds(llama(num_layers=len(kinds), vocab_size=400), kinds, frozenset(range(1, len(kinds))))
    memory = small_memory(config)
    middle = memory.total_bytes(StageRole.MIDDLE, 0, config.num_layers, 8)
    sizes = st.integers(middle // 6, middle) | st.integers(middle, middle + memory.head_cost * 6)
    drawn = draw(st.lists(sizes, min_size=5, max_size=5))
    drawn[draw(st.sampled_from([0, -1]))] = memory.total_bytes(StageRole.MIDDLE, 0, 1, 8)
    return config, workers(*drawn)


@settings(max_examples=examples(2))
@given(misplaced_problems())
def test_no_other_choice_of_first_and_last_worker_is_better(
    problem: tuple[Blueprint, list[WorkerCapacity]],
) -> None:
    check_that_no_split_is_better(*problem)


@st.composite
def capacities_for(draw: st.DrawFn, config: Blueprint, *, max_workers: int) -> list[WorkerCapacity]:
    everything = small_memory(config).total_bytes(StageRole.ONLY, 0, config.num_layers, 64)
    return workers(*draw(st.lists(st.integers(0, everything * 5 // 4), min_size=1, max_size=max_workers)))


@settings(max_examples=examples(2))
@given(problems())
def test_no_split_is_better_than_the_plan(problem: tuple[Blueprint, list[WorkerCapacity]]) -> None:
    check_that_no_split_is_better(*problem)


@settings(max_examples=examples(4))
@given(mixed_problems())
def test_no_legal_split_of_unequal_layers_is_better_than_the_plan(
    problem: tuple[Blueprint, list[WorkerCapacity]],
) -> None:
    check_that_no_split_is_better(*problem)


def check_that_no_split_is_better(config: Blueprint, capacities: Sequence[WorkerCapacity]) -> None:
    memory = small_memory(config)
    sizes = [worker.memory_bytes for worker in capacities]
    in_order = best_by_trying(memory, [sizes])
    in_any_order = in_order or best_by_trying(memory, sorted(set(permutations_of_ends(sizes))))
    if in_any_order is None:
        with pytest.raises(PlanImpossible, match="too little"):
            small_plan(config, capacities)
        return
    plan = small_plan(config, capacities)
    costs = [stage.cost for stage in plan.stages]
    assert (max(costs), -plan.num_blocks) == in_any_order[:2]
    if in_order is not None:
        assert [stage.worker for stage in plan.stages] == [worker.name for worker in capacities]
        assert sum(cost * cost for cost in costs) == in_order[2]


def permutations_of_ends(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Orders with any two workers at the ends, and the others as given in between."""
    for first, last in permutations(range(len(sizes)), 2):
        middle = (size for worker, size in enumerate(sizes) if worker not in (first, last))
        yield (sizes[first], *middle, sizes[last])


@given(st.one_of(problems(), mixed_problems()))
def test_every_layer_once_in_order_and_every_worker_within_memory(
    problem: tuple[Blueprint, list[WorkerCapacity]],
) -> None:
    config, capacities = problem
    try:
        plan = small_plan(config, capacities)
    except PlanImpossible:
        return
    layers = [layer for stage in plan.stages for layer in range(stage.layer_begin, stage.layer_end)]
    assert layers == list(range(config.num_layers))
    assert all(stage.num_layers >= 1 for stage in plan.stages)
    assert config.legal_cuts.issuperset(stage.layer_begin for stage in plan.stages[1:])
    assert sorted(stage.worker for stage in plan.stages) == sorted(worker.name for worker in capacities)
    assert [stage.role for stage in plan.stages] == [
        StageRole.of_stage(i, len(capacities)) for i in range(len(capacities))
    ]
    memory = small_memory(config)
    for stage in plan.stages:
        total = memory.total_bytes(stage.role, stage.layer_begin, stage.layer_end, plan.num_blocks)
        assert stage.total_bytes == total <= stage.memory_bytes
    assert plan.num_kv_tokens >= plan.max_sequence_tokens == 32


def test_the_head_counts_as_work_of_the_last_stage() -> None:
    config = llama(num_layers=8, vocab_size=1)
    memory = small_memory(config)
    head_of_two_layers = llama(num_layers=8, vocab_size=2 * memory.layer_bytes[0] // (4 * 16))
    layers = [stage.num_layers for stage in small_plan(head_of_two_layers, workers(GIB, GIB)).stages]
    assert layers == [5, 3]


def test_equal_workers_get_equal_work() -> None:
    plan = small_plan(llama(num_layers=7), workers(GIB, GIB, GIB))
    assert [stage.num_layers for stage in plan.stages] == [3, 2, 2]


def test_a_small_first_worker_moves_to_where_it_fits() -> None:
    config = llama(num_layers=8, vocab_size=600)
    memory = small_memory(config)
    small = memory.total_bytes(StageRole.MIDDLE, 0, 1, 8)
    plan = small_plan(config, workers(small, GIB, GIB))
    assert [stage.worker for stage in plan.stages] == ["gpu-b", "gpu-a", "gpu-c"]
    assert plan.stages[1].num_layers == 1


def test_kv_is_capped_by_the_sequences_in_flight_and_by_the_caller() -> None:
    config = llama()
    most = SMALL_STEPS.max_step_sequences * SMALL_STEPS.max_sequence_tokens
    assert small_plan(config, workers(GIB)).num_kv_tokens == 2 * most
    assert small_plan(config, workers(GIB, GIB)).num_kv_tokens == 3 * most
    asked = make_plan(
        config, DType.F32, workers(GIB), limits=SMALL_STEPS, block_size=BLOCK_SIZE, max_kv_tokens=23
    )
    assert asked.num_kv_tokens == 20
    assert asked.max_sequence_tokens == 20


def test_sequences_are_bound_by_model_caller_and_cache() -> None:
    config = llama_8b()
    sizes = workers(24 * GIB, 24 * GIB, 8 * GIB)
    long = make_plan(
        config, DType.BF16, sizes, limits=USUAL_STEPS.capped(10**9), block_size=16, max_kv_tokens=1024
    )
    assert long.limits.max_sequence_tokens == 8192
    assert long.max_sequence_tokens == 1024
    beyond = llama(max_position_embeddings=16)
    assert small_plan(beyond, workers(GIB)).max_sequence_tokens == 16


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [((5, 5), 4, 40), ((5, 3), 4, 40), ((5, 5), 2, 8), ((5, None), 4, 16), ((12, 12), 4, 16)],
)
def test_the_cache_bounds_no_sequence_whose_window_fits_into_it(
    windows: tuple[int | None, ...], num_blocks: int, longest: int
) -> None:
    """With a chunk of one block of 4, a window of 5 takes up to 3 blocks and one of 12 up to 5."""
    layer = llama(num_layers=2).layers[0]
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for window in windows)
    config = replace(llama(num_layers=2), layers=layers, max_position_embeddings=40)
    limits = replace(SMALL_STEPS, max_sequence_tokens=100)
    plan = make_plan(
        config, DType.F32, workers(GIB), limits=limits, block_size=4, max_kv_tokens=4 * num_blocks
    )
    assert plan.num_blocks == num_blocks
    assert plan.max_sequence_tokens == longest


def test_given_layers_are_used_unchanged() -> None:
    plan = make_plan(
        llama_8b(),
        DType.BF16,
        workers(24 * GIB, 24 * GIB, 8 * GIB),
        limits=USUAL_STEPS,
        block_size=16,
        layers=(14, 14, 4),
    )
    ranges = [(stage.layer_begin, stage.layer_end) for stage in plan.stages]
    assert ranges == [(0, 14), (14, 28), (28, 32)]
    assert min(stage.free_bytes for stage in plan.stages) >= 0


def test_given_layers_get_the_most_blocks_that_fit() -> None:
    config = llama()
    memory = small_memory(config)
    size = memory.total_bytes(StageRole.ONLY, 0, 8, 12)
    for extra, blocks in ((-1, 11), (0, 12)):
        plan = make_plan(
            config,
            DType.F32,
            workers(size + extra),
            limits=SMALL_STEPS,
            block_size=BLOCK_SIZE,
            layers=[8],
        )
        assert plan.num_blocks == blocks


def test_tied_embeddings_count_on_both_ends_and_once_on_only() -> None:
    tied, untied = (small_memory(llama(tied=flag, vocab_size=400)) for flag in (True, False))
    matrix = 400 * 16 * 4
    assert tied.outside_bytes(StageRole.FIRST) == matrix
    assert tied.outside_bytes(StageRole.LAST) == matrix + 16 * 4
    assert tied.outside_bytes(StageRole.ONLY) == matrix + 16 * 4
    assert untied.outside_bytes(StageRole.ONLY) == 2 * matrix + 16 * 4
    assert tied.outside_bytes(StageRole.MIDDLE) == 0


@pytest.mark.parametrize("ends_gib", [40.0, 1.0])
def test_200_layers_on_64_workers_are_planned_quickly(ends_gib: float) -> None:
    sizes = [int(ends_gib * GIB), *[(6, 8, 12, 16, 24, 40)[i % 6] * GIB for i in range(62)], 40 * GIB]
    begin = time.process_time()
    plan = make_plan(llama_8b(200), DType.BF16, workers(*sizes), limits=USUAL_STEPS, block_size=16)
    assert time.process_time() - begin < MAX_CPU_S
    assert (plan.stages[0].worker != "gpu-a") == (ends_gib == 1.0)


@pytest.mark.parametrize("first_gib", [40, 2])
def test_80_unequal_layers_on_64_workers_are_planned_quickly(first_gib: int) -> None:
    kinds = [0] * 8 + [2, 1, 1] * 24
    config = with_kinds(llama_8b(80), kinds, frozenset(range(1, 80)) - {3, 30, 50})
    sizes = [size * GIB for size in (first_gib, *((6, 16, 12, 24, 40, 8) * 11)[:62], 40)]
    begin = time.process_time()
    plan = make_plan(config, DType.BF16, workers(*sizes), limits=USUAL_STEPS, block_size=16)
    assert time.process_time() - begin < MAX_CPU_S
    assert (plan.stages[0].worker != "gpu-a") == (first_gib == 2)


def test_a_small_worker_gets_a_small_layer_between_larger_ones() -> None:
    """Greedy filling gives the first worker both small layers and leaves none for the second one."""
    config = with_kinds(llama(), [1, 1, 2, 2], frozenset({1, 2, 3}))
    memory = small_memory(config)
    small = memory.total_bytes(StageRole.MIDDLE, 0, 1, 8)
    plan = small_plan(config, workers(GIB, small, GIB))
    assert [stage.worker for stage in plan.stages] == ["gpu-a", "gpu-b", "gpu-c"]
    assert [stage.num_layers for stage in plan.stages] == [1, 1, 2]


def test_activations_are_those_of_the_largest_layer_of_the_model() -> None:
    equal = llama(num_layers=4)
    mixed = with_kinds(equal, [0, 1, 2, 0], frozenset({1, 2, 3}))
    wide = with_kinds(equal, [2, 2, 2, 2], frozenset({1, 2, 3}))
    needs = [small_memory(config).activation_bytes(StageRole.MIDDLE, 8) for config in (equal, mixed, wide)]
    assert needs[0] < needs[1] == needs[2]


def test_windowed_layers_get_blocks_for_the_windows_in_flight_only() -> None:
    """Two stages: three steps of two sequences, which see 5 tokens and compute up to 4 at once."""
    base = llama(num_layers=4, max_position_embeddings=512)
    config = replace(
        base,
        layers=tuple(
            replace(layer, mixer=replace(layer.mixer, window=None if index % 2 else 5))
            for index, layer in enumerate(base.layers)
        ),
    )
    limits = StepLimits(max_step_tokens=4, max_step_sequences=2, max_sequence_tokens=512)
    made = make_plan(config, DType.F32, workers(GIB, GIB), limits=limits, block_size=BLOCK_SIZE)
    held = 3 * 2 * KvWindow(5, 4).num_blocks(BLOCK_SIZE)
    assert (made.window, made.num_blocks) == (None, 3 * 2 * 512 // BLOCK_SIZE)
    assert made.other_groups == (KvGroup(held, KvWindow(5, 4)),)
    assert made.max_sequence_tokens == 512
    block_bytes = made.stages[0].kv_bytes // (made.num_blocks + held)
    assert [stage.kv_bytes for stage in made.stages] == [block_bytes * (made.num_blocks + held)] * 2
    plain = make_plan(base, DType.F32, workers(GIB, GIB), limits=limits, block_size=BLOCK_SIZE)
    assert plain.stages[0].kv_bytes == 2 * block_bytes * plain.num_blocks
    few = make_plan(
        config, DType.F32, workers(GIB, GIB), limits=limits, block_size=BLOCK_SIZE, max_kv_tokens=40
    )
    assert (few.num_blocks, few.other_num_blocks) == (10, (10,))


def two_shapes(num_layers: int = 6) -> Blueprint:
    """Every third layer sees all tokens and has keys of 1 x 32 elements, the others 5 tokens and 2 x 8."""
    base = llama(num_layers=num_layers, max_position_embeddings=512)
    usual = base.layers[0]
    windowed = replace(usual, mixer=replace(usual.mixer, num_kv_heads=2, head_dim=8, window=5))
    full = replace(usual, mixer=replace(usual.mixer, num_kv_heads=1, head_dim=32))
    return replace(base, layers=tuple(windowed if (i + 1) % 3 else full for i in range(num_layers)))


def test_blocks_of_each_group_are_planned_with_the_bytes_of_their_own_shape() -> None:
    config = two_shapes()
    limits = StepLimits(max_step_tokens=4, max_step_sequences=2, max_sequence_tokens=512)
    made = make_plan(
        config, DType.F32, workers(GIB, GIB), limits=limits, block_size=BLOCK_SIZE, layers=(2, 4)
    )
    (windowed,) = made.other_num_blocks
    full_bytes = made.num_blocks * BLOCK_SIZE * 2 * 32 * 4
    windowed_bytes = windowed * BLOCK_SIZE * 2 * 16 * 4
    assert windowed < made.num_blocks
    assert [stage.kv_bytes for stage in made.stages] == [
        2 * windowed_bytes,
        2 * full_bytes + 2 * windowed_bytes,
    ]


def test_the_group_whose_blocks_are_larger_decides_how_many_tokens_fit() -> None:
    """A worker with bytes for n blocks of full layers beside the windows gets n of them, and no more."""
    config, limits = (
        two_shapes(),
        StepLimits(max_step_tokens=4, max_step_sequences=2, max_sequence_tokens=512),
    )
    ample = make_plan(config, DType.F32, workers(GIB), limits=limits, block_size=BLOCK_SIZE)
    memory = StageMemory(
        config=config, dtype=DType.F32, limits=ample.limits, block_size=BLOCK_SIZE, num_stages=1
    )
    wanted = ample.num_blocks // 2
    needed = memory.total_bytes(StageRole.ONLY, 0, config.num_layers, wanted)
    for spare, num_blocks in ((0, wanted), (-1, wanted - 1)):
        tight = make_plan(config, DType.F32, workers(needed + spare), limits=limits, block_size=BLOCK_SIZE)
        assert tight.num_blocks == num_blocks
