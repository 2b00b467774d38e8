"""Assigns layers to workers within their memory budgets, and explains why a plan is impossible.

Activation memory, with s bytes per element, T tokens and S sequences in the largest step, K tokens of KV, and
a longest sequence of C = min(max_sequence_tokens, K) tokens:

* T * `_token_bytes`: the residual stream with its normed copy (2 * hidden * s); float32 copies of both in the
  norm (2 * hidden * 4); q, k, v before and after rotation (2 * (q + 2 * kv) * s) and the attention output
  (q * s); gate, up and their product (3 * intermediate * s); one received and one sent frame
  (2 * hidden * s). Layers run one after the other and reuse this memory.
* min(S * C, K) tokens of K and V gathered from the pages of one layer (2 * kv * s each): one more layer of
  KV. Padding of sequences that are gathered together, and copies of shared prefixes, are not counted.
* T * C * `_mask_bytes` for prefill: for every distinct window of the layers, the mask as bool and its
  temporary (2), in the run dtype and aligned for a kernel (2 * s). Scores are not counted: the fused kernels
  of scaled_dot_product_attention do not store them.
* with the head, min(S, T) rows of logits: in the run dtype (s), for sampling in float32 with a filtered copy
  (8), sorted with ids (12), and in float64 scaled, as probabilities, summed and cut (48).

The process itself is not part of the budget (see `WorkerCapacity`).

The cost of a stage is the bytes of weights that one decode step reads: its layers, and on the last stage the
final norm and the output head. Decoding is bound by memory bandwidth, because at small batch sizes every
weight is read once per step, so time is proportional to cost. In prefill, which is bound by compute, work has
the same proportion: one multiplication per weight element and token. The embedding is a lookup of a few rows
and costs nothing. All workers are assumed to be equally fast.

The slowest stage limits the pipeline, so the plan minimizes its cost, subject to every worker holding
weights, activations and KV for at least `MIN_KV_TOKENS` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NoReturn

from checkpoint import (
    DType,
    ModelConfig,
    head_bytes,
    kv_bytes_per_token_per_layer,
    layer_weight_bytes,
    stage_weight_bytes,
)
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan, StepLimits, WorkerCapacity
from coordinator.planner.split import Split, SplitProblem, best_split
from kvcache import KvWindow
from wire.ids import StageRole
from wire.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of the stages of one model under one set of limits, in bytes. All layers have the same size."""

    config: ModelConfig
    dtype: DType
    limits: StepLimits
    block_size: int

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the weights of one layer."""
        return layer_weight_bytes(self.config, self.dtype)

    @property
    def head_cost(self) -> int:
        """Cost of the head in a decode step: final norm and output matrix, tied or not."""
        return head_bytes(self.config, self.dtype)

    def weight_bytes(self, role: StageRole, num_layers: int) -> int:
        """Weights of a stage: its layers, and the embeddings and head of its role."""
        return self.outside_bytes(role) + num_layers * self.layer_bytes

    def outside_bytes(self, role: StageRole) -> int:
        """Weights of a role besides its layers. FIRST and LAST both hold tied embeddings, ONLY once."""
        with_one_layer = stage_weight_bytes(
            self.config, self.dtype, 0, 1, has_embeddings=role.has_embeddings, has_head=role.has_head
        )
        return with_one_layer - self.layer_bytes

    def kv_bytes(self, num_layers: int, num_blocks: int) -> int:
        """KV pages of `num_blocks` blocks in each of `num_layers` layers."""
        return num_layers * num_blocks * self.block_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_size * kv_bytes_per_token_per_layer(self.config, self.dtype)

    def activation_bytes(self, role: StageRole, num_blocks: int) -> int:
        """Activation memory of the largest step with `num_blocks` blocks in the cache."""
        limits, kv_tokens = self.limits, num_blocks * self.block_size
        longest = min(limits.max_sequence_tokens, kv_tokens)
        gathered = min(limits.max_step_sequences * longest, kv_tokens)
        size = limits.max_step_tokens * (self._token_bytes() + longest * self._mask_bytes())
        size += gathered * kv_bytes_per_token_per_layer(self.config, self.dtype)
        return size + (self._logits_bytes() if role.has_head else 0)

    def total_bytes(self, role: StageRole, num_layers: int, num_blocks: int) -> int:
        """Weights, KV pages and activations of a stage."""
        weights = self.weight_bytes(role, num_layers)
        return weights + self.kv_bytes(num_layers, num_blocks) + self.activation_bytes(role, num_blocks)

    def _token_bytes(self) -> int:
        config, size = self.config, self.dtype.size_bytes
        residual = config.hidden_size * (2 * size + 2 * 4)
        attention = (2 * (config.q_size + 2 * config.kv_size) + config.q_size) * size
        return residual + attention + 3 * config.intermediate_size * size + 2 * config.hidden_size * size

    def _mask_bytes(self) -> int:
        return len(set(self.config.layer_windows)) * (2 + 2 * self.dtype.size_bytes)

    def _logits_bytes(self) -> int:
        rows = min(self.limits.max_step_sequences, self.limits.max_step_tokens)
        return rows * self.config.vocab_size * (self.dtype.size_bytes + 8 + 12 + 48)


def validate_counts(
    config: ModelConfig,
    workers: Sequence[WorkerCapacity],
    *,
    block_size: int,
    layers: Sequence[int] | None,
    max_kv_tokens: int | None,
) -> None:
    """Raise PlanImpossible for contradicting counts, and ValueError for a block size below 1."""
    if block_size < 1:
        raise ValueError(f"block size is {block_size} tokens, must be at least 1")
    if not workers:
        raise PlanImpossible("no workers to plan for")
    repeated = [name for name, count in Counter(worker.name for worker in workers).items() if count > 1]
    if repeated:
        raise PlanImpossible(f"worker name {repeated[0]} is used twice")
    if layers is not None:
        _validate_layer_counts(layers, len(workers), config.num_layers)
    if len(workers) > config.num_layers:
        raise PlanImpossible(
            f"{len(workers)} stages for a model of {config.num_layers} layers: the minimum is one per stage"
        )
    if max_kv_tokens is not None and max_kv_tokens < block_size:
        raise PlanImpossible(
            f"max_kv_tokens is {max_kv_tokens}, the minimum is one block of {block_size} tokens"
        )


def _validate_layer_counts(layers: Sequence[int], num_workers: int, num_layers: int) -> None:
    text = ",".join(str(count) for count in layers) or "(none)"
    if len(layers) != num_workers:
        raise PlanImpossible(f"layers {text} are for {len(layers)} stages, got {num_workers} workers")
    if min(layers) < 1:
        raise PlanImpossible(f"layers {text}: stage {layers.index(min(layers))} needs at least one layer")
    if sum(layers) != num_layers:
        raise PlanImpossible(f"layers {text} sum to {sum(layers)}, the model has {num_layers}")


def validate_layers(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], num_blocks: int
) -> None:
    """Raise PlanImpossible if a stage of a given split does not fit its worker."""
    for stage, (worker, count) in enumerate(zip(workers, layers, strict=True)):
        role = StageRole.of_stage(stage, len(layers))
        if memory.total_bytes(role, count, num_blocks) > worker.memory_bytes:
            need = _stage_need(memory, worker, stage, layers, num_blocks)
            raise PlanImpossible(f"{need}. {_total_need(memory, workers, num_blocks)}")


def raise_memory_shortage(
    memory: StageMemory, workers: Sequence[WorkerCapacity], problem: SplitProblem
) -> NoReturn:
    """Raise PlanImpossible with the numbers of a split that fills the workers in their given order."""
    layers = _fill(workers, problem)
    validate_layers(memory, workers, layers, problem.min_blocks)
    raise AssertionError(f"layers {layers} fit, but no split was found")


def _fill(workers: Sequence[WorkerCapacity], problem: SplitProblem) -> list[int]:
    """Fill each stage, leaving one layer for each later stage; the last stage gets the rest."""
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


def _total_need(memory: StageMemory, workers: Sequence[WorkerCapacity], num_blocks: int) -> str:
    """Compare the model's total memory on this many stages with the workers' budgets."""
    roles = [StageRole.of_stage(stage, len(workers)) for stage in range(len(workers))]
    need = sum(memory.total_bytes(role, 0, num_blocks) for role in roles)
    num_layers = memory.config.num_layers
    need += num_layers * memory.layer_bytes + memory.kv_bytes(num_layers, num_blocks)
    have = sum(worker.memory_bytes for worker in workers)
    return (
        f"The model needs {format_size(need)} in total on {len(workers)} stages,"
        f" the workers have {format_size(have)}"
    )


MIN_KV_TOKENS = 512
"""Minimum tokens of KV of a plan, unless the longest allowed sequence is shorter."""


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
    """Assign one stage to every worker, and every layer of the model to one stage.

    The split minimizes the cost of the slowest stage, then maximizes the KV blocks, then is as even as
    possible. Workers keep the given order if the model fits; otherwise other workers become FIRST and LAST,
    which have the embeddings and the head.

    All stages get the same number of blocks: the most that every stage holds, at most `max_kv_tokens`, and at
    most enough for the sequences of all steps in flight at full length. Few sequences are that long, which
    leaves room for prefix reuse, and a small model does not take all memory.

    `layers` fixes the number of layers per worker, in the given order. `limits.max_sequence_tokens` is
    lowered to the limit of the model.

    Raises PlanImpossible with the numbers, and ValueError for arguments that are invalid for every model.
    """
    limits = limits.capped(config.max_position_embeddings)
    validate_counts(config, workers, block_size=block_size, layers=layers, max_kv_tokens=max_kv_tokens)
    memory = StageMemory(config=config, dtype=dtype, limits=limits, block_size=block_size)
    problem = _split_problem(memory, workers, max_kv_tokens)
    split = _choose_split(memory, workers, layers, problem)
    stages = tuple(_stage(memory, workers, split, stage) for stage in range(len(workers)))
    return Plan(
        stages=stages,
        num_blocks=split.num_blocks,
        block_size=block_size,
        dtype=dtype,
        limits=limits,
        window=KvWindow.of(config.layer_windows, limits.max_step_tokens),
    )


def _choose_split(
    memory: StageMemory,
    workers: Sequence[WorkerCapacity],
    layers: Sequence[int] | None,
    problem: SplitProblem,
) -> Split:
    """The given split, or the best one."""
    if layers is not None:
        return _given_split(memory, workers, layers, problem)
    split = best_split(problem)
    if split is None:
        raise_memory_shortage(memory, workers, problem)
    return split


def _split_problem(
    memory: StageMemory, workers: Sequence[WorkerCapacity], max_kv_tokens: int | None
) -> SplitProblem:
    limits, block_size = memory.limits, memory.block_size
    # Sequences of maximum length in all steps: one step per stage and one that waits.
    most = -(-(len(workers) + 1) * limits.max_step_sequences * limits.max_sequence_tokens // block_size)
    if max_kv_tokens is not None:
        most = min(most, max_kv_tokens // block_size)
    least = -(-min(limits.max_sequence_tokens, MIN_KV_TOKENS) // block_size)

    outside_layers = {role: memory.outside_bytes(role) for role in StageRole}
    activation_bytes = cache(memory.activation_bytes)  # called for every worker and choice of ends
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
    validate_layers(memory, workers, layers, problem.min_blocks)
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


def check_counts(config: CoordinatorConfig, model: ServedModel) -> None:
    """Check the configuration before workers join.

    Raises PlanImpossible for more stages than layers, for `layers` with a wrong sum, and for sequences
    longer than the limit of the model.
    """
    _max_sequence_tokens(config, model)
    validate_counts(
        model.config,
        [WorkerCapacity(name=f"stage {stage}", memory_bytes=1) for stage in range(config.num_stages)],
        block_size=config.block_size,
        layers=config.layers,
        max_kv_tokens=config.max_kv_tokens,
    )


def _max_sequence_tokens(config: CoordinatorConfig, model: ServedModel) -> int:
    model_limit = model.config.max_position_embeddings
    given = config.max_sequence_tokens
    if given is not None and given > model_limit:
        raise PlanImpossible(
            f"--max-model-len is {given}, but the model's limit is {model_limit} (max_position_embeddings): "
            "lower --max-model-len or omit it"
        )
    return given or model_limit


def plan_for(config: CoordinatorConfig, model: ServedModel, workers: Sequence[WorkerCapacity]) -> Plan:
    """Make the plan of a coordinator for these workers. Raises PlanImpossible.

    `config.layers` applies if there are as many workers as configured stages. A bfloat16 checkpoint runs in
    float32 if a worker does not support bfloat16, unless `config.dtype` is set.
    """
    limits = StepLimits(
        max_step_tokens=config.max_step_tokens,
        max_step_sequences=config.max_step_sequences,
        max_sequence_tokens=_max_sequence_tokens(config, model),
    )
    dtype = model.dtype
    if config.dtype is None and dtype is DType.BF16 and not all(worker.supports_bf16 for worker in workers):
        dtype = DType.F32
    return make_plan(
        model.config,
        dtype,
        workers,
        limits=limits,
        block_size=config.block_size,
        layers=config.layers if len(workers) == config.num_stages else None,
        max_kv_tokens=config.max_kv_tokens,
    )
