"""Says which number makes a plan impossible. Every function here raises PlanImpossible or returns nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from checkpoint import ModelConfig
from coordinator.planning.plan import PlanImpossible, WorkerCapacity, format_size
from coordinator.planning.split import SplitProblem
from coordinator.planning.stage_memory import StageMemory
from wire.roles import StageRole


def refuse_counts(
    config: ModelConfig,
    workers: Sequence[WorkerCapacity],
    *,
    block_size: int,
    layers: Sequence[int] | None,
    max_kv_tokens: int | None,
) -> None:
    """Counts that contradict each other, whatever the memory is. ValueError: a block size below 1."""
    if block_size < 1:
        raise ValueError(f"block size is {block_size} tokens, must be at least 1")
    if not workers:
        raise PlanImpossible("no workers to plan for")
    repeated = [name for name, count in Counter(worker.name for worker in workers).items() if count > 1]
    if repeated:
        raise PlanImpossible(f"two workers are called {repeated[0]}")
    if layers is not None:
        _refuse_layer_counts(layers, len(workers), config.num_layers)
    if len(workers) > config.num_layers:
        raise PlanImpossible(
            f"{len(workers)} stages for a model of {config.num_layers} layers: every stage needs at least one"
        )
    if max_kv_tokens is not None and max_kv_tokens < block_size:
        raise PlanImpossible(f"{max_kv_tokens} tokens of KV are less than one block of {block_size} tokens")


def _refuse_layer_counts(layers: Sequence[int], num_workers: int, num_layers: int) -> None:
    text = ",".join(str(count) for count in layers) or "(none)"
    if len(layers) != num_workers:
        raise PlanImpossible(
            f"layers {text} are for {len(layers)} stages, but there are {num_workers} workers"
        )
    if min(layers) < 1:
        raise PlanImpossible(f"layers {text} give stage {layers.index(min(layers))} no layer")
    if sum(layers) != num_layers:
        raise PlanImpossible(f"layers {text} sum to {sum(layers)}, but the model has {num_layers}")


def refuse_layers(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], num_blocks: int
) -> None:
    """A given split of which some stage does not fit its worker with `num_blocks` blocks."""
    for stage, (worker, count) in enumerate(zip(workers, layers, strict=True)):
        role = StageRole.of_stage(stage, len(layers))
        if memory.total_bytes(role, count, num_blocks) > worker.memory_bytes:
            need = _stage_need(memory, worker, stage, layers, num_blocks)
            raise PlanImpossible(f"{need}. {_overall(memory, workers, num_blocks)}")


def refuse_memory(memory: StageMemory, workers: Sequence[WorkerCapacity], problem: SplitProblem) -> NoReturn:
    """No split fits: shown on the one in the given order that fills every worker before the next."""
    layers = _fill(workers, problem)
    refuse_layers(memory, workers, layers, problem.min_blocks)
    raise AssertionError(f"layers {layers} fit, yet no split was found")


def _fill(workers: Sequence[WorkerCapacity], problem: SplitProblem) -> list[int]:
    """As many layers on each stage as it holds, leaving one for each later stage; the rest on the last
    one."""
    layers: list[int] = []
    for stage in range(len(workers) - 1):
        role = StageRole.of_stage(stage, len(workers))
        spare = problem.num_layers - sum(layers) - (len(workers) - 1 - stage)
        layers.append(max(1, min(spare, problem.max_layers(stage, role, problem.min_blocks))))
    return [*layers, problem.num_layers - sum(layers)]


def _stage_need(
    memory: StageMemory, worker: WorkerCapacity, stage: int, layers: Sequence[int], num_blocks: int
) -> str:
    role = StageRole.of_stage(stage, len(layers))
    begin, count = sum(layers[:stage]), layers[stage]
    named = f"layers {begin}-{begin + count - 1} need" if count > 1 else f"layer {begin} needs"
    short = memory.total_bytes(role, count, num_blocks) - worker.memory_bytes
    return (
        f"stage {stage} on {worker.name}: {named}"
        f" {format_size(memory.weight_bytes(role, count))} weights"
        f" + {format_size(memory.activation_bytes(role, num_blocks))} activations"
        f" + {format_size(memory.kv_bytes(count, num_blocks))} KV"
        f" for {num_blocks * memory.block_size} tokens,"
        f" but {worker.name} has {format_size(worker.memory_bytes)} ({format_size(short)} too little)"
    )


def _overall(memory: StageMemory, workers: Sequence[WorkerCapacity], num_blocks: int) -> str:
    """What the model takes on this many stages, whatever the split, against what the workers have."""
    roles = [StageRole.of_stage(stage, len(workers)) for stage in range(len(workers))]
    need = sum(memory.total_bytes(role, 0, num_blocks) for role in roles)
    num_layers = memory.config.num_layers
    need += num_layers * memory.layer_bytes + memory.kv_bytes(num_layers, num_blocks)
    have = sum(worker.memory_bytes for worker in workers)
    return (
        f"The model needs {format_size(need)} in all on {len(workers)} stages,"
        f" the workers have {format_size(have)}"
    )
