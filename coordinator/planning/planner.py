"""Decides which worker runs which layers.

What a stage costs is the bytes of weights that one decode step reads there: its layers, and on the last stage
the final norm and output head. Decoding is bound by memory bandwidth (at small batch every weight is read
once per step and used a few times), so that is time, up to a factor that all stages share; and where compute
is the bound, in prefill, work is in the same proportion, as each weight element is one multiplication per
token. The embedding is a lookup of a few rows and counts nothing. Workers are taken to be equally fast: only
their memory is known.

The slowest stage sets the pace of the pipeline, so its cost is what is made small, subject to every worker
holding its weights, activations (`coordinator.stage_memory`) and KV for at least `MIN_KV_TOKENS` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from checkpoint import DType, ModelConfig
from coordinator.planning.plan import Plan, StagePlan, StepLimits, WorkerCapacity
from coordinator.planning.refusals import refuse_counts, refuse_layers, refuse_memory
from coordinator.planning.split import Split, SplitProblem, best_split
from coordinator.planning.stage_memory import StageMemory
from kvcache import KvWindow
from wire.roles import StageRole

MIN_KV_TOKENS = 512
"""A plan must hold this many tokens of KV, or one sequence of the longest allowed length if that is
shorter."""


def make_plan(
    config: ModelConfig,
    dtype: DType,
    workers: Sequence[WorkerCapacity],
    *,
    limits: StepLimits,
    block_size: int,
    layers: Sequence[int] | None = None,
    max_kv_tokens: int | None = None,
) -> Plan:
    """Give every worker one stage, and every layer of the model to one stage.

    Chosen is the split with the least cost of its slowest stage; among those the one with the most KV blocks;
    among those the most even one. Workers keep the given order where the model fits in that order; otherwise
    others of them become FIRST and LAST, which carry embeddings and head. `layers[i]`, where given, is the
    number of layers of `workers[i]` in the given order, and nothing is chosen.

    All stages get the same number of blocks, the most that every stage holds, but not more than
    `max_kv_tokens` (in tokens, if given) and not more than all sequences of a step hold at full length: few
    are that long, so this leaves room for the sequences of other steps in flight and for prefix reuse, while
    more would make a small model take all the memory there is. `limits.max_sequence_tokens` is lowered to the
    model's own limit.

    Raises PlanImpossible, with the numbers; ValueError for arguments that never make sense.
    """
    limits = limits.capped(config.max_position_embeddings)
    refuse_counts(config, workers, block_size=block_size, layers=layers, max_kv_tokens=max_kv_tokens)
    memory = StageMemory(config=config, dtype=dtype, limits=limits, block_size=block_size)
    problem = _problem(memory, workers, max_kv_tokens)
    if layers is not None:
        split = _given_split(memory, workers, layers, problem)
    else:
        found = best_split(problem)
        if found is None:
            refuse_memory(memory, workers, problem)
        split = found
    stages = tuple(_stage(memory, workers, split, stage) for stage in range(len(workers)))
    return Plan(
        stages=stages,
        num_blocks=split.num_blocks,
        block_size=block_size,
        dtype=dtype,
        limits=limits,
        window=KvWindow.of(config.layer_windows, limits.max_step_tokens),
    )


def _problem(
    memory: StageMemory, workers: Sequence[WorkerCapacity], max_kv_tokens: int | None
) -> SplitProblem:
    limits, block_size = memory.limits, memory.block_size
    # As many sequences of the greatest length as there are in steps when every stage has one and one waits.
    most = -(-(len(workers) + 1) * limits.max_step_sequences * limits.max_sequence_tokens // block_size)
    if max_kv_tokens is not None:
        most = min(most, max_kv_tokens // block_size)
    least = -(-min(limits.max_sequence_tokens, MIN_KV_TOKENS) // block_size)

    outside_layers = {role: memory.outside_bytes(role) for role in StageRole}
    activation_bytes = cache(memory.activation_bytes)  # asked for every worker and choice of ends alike
    layer_bytes, block_bytes = memory.layer_bytes, memory.block_bytes

    def max_layers(worker: int, role: StageRole, num_blocks: int) -> int:
        fixed = outside_layers[role] + activation_bytes(role, num_blocks)
        return (workers[worker].memory_bytes - fixed) // (layer_bytes + num_blocks * block_bytes)

    return SplitProblem(
        num_workers=len(workers),
        num_layers=memory.config.num_layers,
        layer_cost=layer_bytes,
        head_cost=memory.head_cost,
        min_blocks=min(least, most),
        max_blocks=most,
        max_layers=max_layers,
    )


def _given_split(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], problem: SplitProblem
) -> Split:
    refuse_layers(memory, workers, layers, problem.min_blocks)
    roles = [StageRole.of_stage(stage, len(layers)) for stage in range(len(layers))]

    def too_many(num_blocks: int) -> bool:
        return any(
            problem.max_layers(stage, role, num_blocks) < count
            for stage, (role, count) in enumerate(zip(roles, layers, strict=True))
        )

    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    num_blocks = candidates[bisect_left(candidates, True, key=too_many) - 1]
    return Split(order=tuple(range(len(layers))), layers=tuple(layers), num_blocks=num_blocks)


def _stage(memory: StageMemory, workers: Sequence[WorkerCapacity], split: Split, stage: int) -> StagePlan:
    role = StageRole.of_stage(stage, len(split.layers))
    begin, count = sum(split.layers[:stage]), split.layers[stage]
    worker = workers[split.order[stage]]
    return StagePlan(
        stage=stage,
        worker=worker.name,
        role=role,
        layer_begin=begin,
        layer_end=begin + count,
        weight_bytes=memory.weight_bytes(role, count),
        kv_bytes=memory.kv_bytes(count, split.num_blocks),
        activation_bytes=memory.activation_bytes(role, split.num_blocks),
        memory_bytes=worker.memory_bytes,
        cost=count * memory.layer_bytes + (memory.head_cost if role.has_head else 0),
    )
