"""Plans of layers with and without experts balance what steps read, and count every expert's memory."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import prod

import pytest

from checkpoint import Blueprint, DType, Experts, LayerPlan
from checkpoint.blueprint import Router
from checkpoint.tensors import role_shapes
from coordinator.planner.plan import Plan
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.coordinator.planner.small_models import GIB, USUAL_STEPS, llama_8b, workers
from wire.ids import StageRole

NUM_STAGES = 4
NUM_TRIALS = 20
EXPERTS = Experts(count=64, per_token=4, width=512, router=Router())
FEW_WIDE = Experts(count=8, per_token=2, width=7168, router=Router())


def mixed_model(experts: Experts = EXPERTS, *, num_layers: int = 32, first: int = 10) -> Blueprint:
    """`first` layers without experts, then every second one with experts."""
    config = llama_8b(num_layers)
    sparse = replace(config.layers[0], feed_forward=experts)
    layers = tuple(
        sparse if index >= first and index % 2 else layer for index, layer in enumerate(config.layers)
    )
    return replace(config, layers=layers, vocab_size=8000)


def simulated_step_bytes(config: Blueprint, plan: LayerPlan, num_sequences: int) -> float:
    """Mean bytes that a step reads of a layer's weights, with experts drawn for each sequence."""
    shapes = role_shapes(config.hidden_size, plan)
    if not isinstance(plan.feed_forward, Experts):
        return 2.0 * sum(map(prod, shapes.values()))
    of_experts = sum(prod(shape) for shape in shapes.values() if len(shape) == 3)
    fixed = sum(map(prod, shapes.values())) - of_experts
    count, per_token = plan.feed_forward.count, plan.feed_forward.per_token
    draw = random.Random(7)
    hit = [
        len({expert for _ in range(num_sequences) for expert in draw.sample(range(count), per_token)})
        for _ in range(NUM_TRIALS)
    ]
    return 2.0 * (fixed + of_experts * sum(hit) / NUM_TRIALS / count)


def simulated_times(config: Blueprint, plan: Plan, num_sequences: int) -> list[float]:
    """Bytes that each stage reads in a decode step, to which its time is proportional."""
    bytes_of = cache(lambda layer: simulated_step_bytes(config, layer, num_sequences))
    times = [
        sum(bytes_of(layer) for layer in config.layers[stage.layer_begin : stage.layer_end])
        for stage in plan.stages
    ]
    times[-1] += 2.0 * config.hidden_size * (config.vocab_size + 1)
    return times


@pytest.mark.matrix(6)
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("step_sequences", [1, 8, 64])
@pytest.mark.parametrize(("experts", "first"), [(EXPERTS, 20), (FEW_WIDE, 20), (EXPERTS, 1)])
def test_simulated_step_times_of_stages_differ_by_at_most_a_tenth(
    experts: Experts, first: int, step_sequences: int, num_stages: int
) -> None:
    config = mixed_model(experts, num_layers=160, first=first)
    limits = replace(USUAL_STEPS, max_step_sequences=step_sequences * num_stages)
    plan = make_plan(config, DType.BF16, workers(*[400 * GIB] * num_stages), limits=limits, block_size=16)
    times = simulated_times(config, plan, step_sequences)
    assert max(times) <= 1.1 * min(times)
    assert [stage.cost for stage in plan.stages] == pytest.approx(times, rel=0.05)
    assert all(stage.total_bytes <= stage.memory_bytes for stage in plan.stages)


def test_balanced_times_are_not_balanced_memory() -> None:
    config = mixed_model()
    plan = make_plan(config, DType.BF16, workers(*[80 * GIB] * NUM_STAGES), limits=USUAL_STEPS, block_size=16)
    times = simulated_times(config, plan, USUAL_STEPS.max_step_sequences // NUM_STAGES)
    sizes = [stage.weight_bytes for stage in plan.stages]
    assert max(times) <= 1.1 * min(times)
    assert max(sizes) > 1.3 * min(sizes), "a plan by memory would do as well"


def test_one_sequence_reads_the_experts_of_one_token() -> None:
    config = mixed_model()
    limits = replace(USUAL_STEPS, max_step_sequences=1)
    memory = StageMemory(config=config, dtype=DType.BF16, limits=limits, block_size=16, num_stages=NUM_STAGES)
    one_expert = 2 * 3 * EXPERTS.width * config.hidden_size
    unread = memory.layer_bytes[11] - memory.layer_costs()[11]
    assert unread == (EXPERTS.count - EXPERTS.per_token) * one_expert
    assert memory.layer_costs()[0] == memory.layer_bytes[0]


def test_memory_counts_all_experts_and_a_row_for_each_choice() -> None:
    config = mixed_model()
    memory = StageMemory(
        config=config, dtype=DType.BF16, limits=USUAL_STEPS, block_size=16, num_stages=NUM_STAGES
    )
    one_expert = 2 * 3 * EXPERTS.width * config.hidden_size
    assert memory.weight_bytes(StageRole.MIDDLE, 11, 12) > EXPERTS.count * one_expert
    more = replace(config.layers[11], feed_forward=replace(EXPERTS, per_token=8))
    layers = tuple(more if isinstance(layer.feed_forward, Experts) else layer for layer in config.layers)
    larger = replace(memory, config=replace(config, layers=layers))
    rows = USUAL_STEPS.max_step_tokens * 4
    added = larger.activation_bytes(StageRole.MIDDLE, 64) - memory.activation_bytes(StageRole.MIDDLE, 64)
    assert added >= rows * 2 * config.hidden_size
