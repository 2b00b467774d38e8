"""Kinds of layers in a plan: their numbers add up to the planner's numbers of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import Blueprint, DType, Experts
from checkpoint.blueprint import Dense, Router
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import Plan, format_ranges, layer_ranges
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.coordinator.planner.small_models import GIB, USUAL_STEPS, llama, workers

EXPERTS = Experts(count=16, per_token=2, width=8, router=Router(), shared=Dense(width=8))


@pytest.fixture
def config() -> Blueprint:
    """Layers 0 and 1: full attention. 2: a window. 3 to 7: experts, with a window but in 5 and without it."""
    config = llama(num_layers=8, max_position_embeddings=8192)
    full = config.layers[0]
    windowed = replace(full, mixer=replace(full.mixer, window=100))
    sparse = replace(windowed, feed_forward=EXPERTS)
    wide = replace(full, feed_forward=EXPERTS, mixer=replace(full.mixer, rope=None))
    return replace(config, layers=(full, full, windowed, sparse, sparse, wide, sparse, sparse))


def plan_of(config: Blueprint, num_stages: int = 2) -> Plan:
    return make_plan(config, DType.BF16, workers(*[GIB] * num_stages), limits=USUAL_STEPS, block_size=16)


def test_kinds_are_named_in_words_with_their_layers_and_groups(config: Blueprint) -> None:
    plan = plan_of(config)
    found = layer_kinds(config, plan).kinds
    assert [(kind.name, format_ranges(kind.layers), kind.group) for kind in found] == [
        ("attention + dense", "0-1", 0),
        ("attention window 100 + dense", "2", 1),
        ("attention window 100 + 2 of 16 experts + shared expert", "3-4, 6-7", 1),
        ("attention without rotation + 2 of 16 experts + shared expert", "5", 0),
    ]
    blocks = {kind.group: kind.num_blocks for kind in found}
    assert blocks == {0: plan.num_blocks, 1: plan.other_num_blocks[0]}
    assert blocks[0] > blocks[1]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_kinds_add_up_to_stages(config: Blueprint, num_stages: int) -> None:
    plan = plan_of(config, num_stages)
    found = layer_kinds(config, plan).kinds
    counts = [sum(end - begin for begin, end in kind.layers) for kind in found]
    memory = StageMemory(
        config=config, dtype=DType.BF16, limits=plan.limits, block_size=16, num_stages=num_stages
    )
    outside = sum(memory.outside_bytes(stage.role) for stage in plan.stages)
    pairs = list(zip(counts, found, strict=True))
    assert sum(counts) == config.num_layers
    assert sum(n * kind.weight_bytes for n, kind in pairs) == (
        sum(stage.weight_bytes for stage in plan.stages) - outside
    )
    assert sum(n * kind.step_bytes for n, kind in pairs) == (
        sum(stage.cost for stage in plan.stages) - memory.head_cost
    )
    assert sum(n * kind.kv_bytes_per_token * kind.num_blocks * 16 for n, kind in pairs) == (
        sum(stage.kv_bytes for stage in plan.stages)
    )


def test_a_larger_batch_reads_more_experts(config: Blueprint) -> None:
    """One sequence reads 2 of 16 experts, eight sequences 16 * (1 - (7 / 8) ** 8) of them."""
    one_expert = 2 * 3 * EXPERTS.width * config.hidden_size
    read = []
    for num_sequences in (1, 8):
        limits = replace(USUAL_STEPS, max_step_sequences=num_sequences)
        plan = make_plan(config, DType.BF16, workers(GIB), limits=limits, block_size=16)
        layers = layer_kinds(config, plan)
        assert layers.step_sequences == num_sequences
        dense, sparse = layers.kinds[0], layers.kinds[2]
        assert dense.step_bytes == dense.weight_bytes
        assert dense.step_cost == 1.0
        assert sparse.step_cost == sparse.step_bytes / dense.step_bytes
        read.append(EXPERTS.count - (sparse.weight_bytes - sparse.step_bytes) / one_expert)
    assert read == pytest.approx([2, 16 * (1 - (7 / 8) ** 8)], abs=0.01)


def test_layers_in_a_row_are_one_range() -> None:
    assert layer_ranges([]) == ()
    assert layer_ranges([0, 1, 2, 4, 6, 7]) == ((0, 3), (4, 5), (6, 8))
    assert format_ranges(((0, 3), (4, 5), (6, 8))) == "0-2, 4, 6-7"
