"""Assigns layers to workers within their memory budgets, and explains why a plan is impossible.

Activation memory, with s bytes per element, T tokens and S sequences in the largest step, K tokens of KV, and
a longest sequence of C = min(max_sequence_tokens, K) tokens:

* T * `_token_bytes`: the residual stream with its normed copy (2 * hidden * s); float32 copies of both in the
  norm (2 * hidden * 4); q, k, v before and after rotation (2 * (q + 2 * kv) * s) and the attention output
  (q * s); gate, up and their product (3 * intermediate * s); one received and one sent frame
  (2 * hidden * s). Layers run one after the other and reuse this memory; the largest one of the model counts.
  A mixture of E experts instead has the router's logits, scores and order (E * 20), and for each expert that
  a token chooses its row, gate, up and their product, its result before and after sorting
  ((3 * hidden + 3 * width) * s), and the latter in float32 with its weight (8 * hidden).
* Latent attention has instead of q, k, v: latents before and after their norms, queries before and after
  rotation, in the width of latents, mixed latents, and the attention output twice; and, for a prompt, keys
  and values of some heads for C tokens, with a float32 copy of the keys.
* min(S * C, K) tokens of K and V gathered from the pages of one layer (2 * kv * s each): one more layer of
  KV. Padding of sequences that are gathered together, and copies of shared prefixes, are not counted.
* T * C * `_mask_bytes` for prefill: for every distinct window of the layers, the mask as bool and its
  temporary (2), in the run dtype and aligned for a kernel (2 * s). Scores are not counted: the fused kernels
  of scaled_dot_product_attention do not store them.
* with the head, min(S, T) rows of logits: in the run dtype (s), for sampling in float32 with a filtered copy
  (8), sorted with ids (12), and in float64 scaled, as probabilities, summed and cut (48).

The process itself is not part of the budget (see `WorkerCapacity`).

The cost of a stage is the bytes of weights that one decode step reads: its layers, and on the last stage the
final norm and the output head. Of a layer's E experts, a step of B sequences reads on average
E * (1 - (1 - k / E)^B), if each sequence chooses k; B is max_step_sequences / stages, so that all sequences
are evenly spread. Decoding is bound by memory bandwidth, because at small batch sizes every
weight is read once per step, so time is proportional to cost. In prefill, which is bound by compute, work has
the same proportion: one multiplication per weight element and token. The embedding is a lookup of a few rows
and costs nothing. All workers are assumed to be equally fast.

The slowest stage limits the pipeline, so the plan minimizes its cost, subject to every worker holding
weights, activations and KV for at least `MIN_KV_TOKENS` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from operator import mul
from typing import NoReturn

from checkpoint import (
    EXPANDED_ELEMENTS,
    Blueprint,
    DType,
    Experts,
    Latent,
    LayerPlan,
    Mixer,
    Opaque,
    ScaledDType,
    expert_weight_bytes,
    head_bytes,
    kv_bytes_per_token,
    layer_weight_bytes,
    stage_weight_bytes,
)
from checkpoint.dtypes import OVERFLOWS_F16
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan, StepLimits, WorkerCapacity
from coordinator.planner.split import Split, SplitProblem, best_split
from kvcache import KvGroup, KvWindow, group_windows
from wire.ids import StageRole
from wire.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of the stages of one model under one set of limits, in bytes.

    Layers may differ. Activations are those of the largest layer of the model.
    """

    config: Blueprint
    dtype: DType
    limits: StepLimits
    block_size: int
    num_stages: int
    kv_dtype: ScaledDType | None = None

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each layer."""
        hidden_size = self.config.hidden_size
        kinds = {kind: layer_weight_bytes(hidden_size, kind, self.dtype) for kind in self.config.kinds}
        return tuple(kinds[layer] for layer in self.config.layers)

    def layer_costs(self) -> tuple[int, ...]:
        """Bytes of weights of each layer that a decode step reads."""
        return tuple(size - self._unread_bytes(layer) for layer, size in enumerate(self.layer_bytes))

    @property
    def step_sequences(self) -> float:
        """Sequences of an average step, if all sequences are evenly spread over the stages; at least one."""
        return max(1.0, self.limits.max_step_sequences / self.num_stages)

    @cached_property
    def _of_experts(self) -> dict[int, tuple[float, int]]:
        """Layers with experts: probability that a token does not choose a given one, and bytes of all."""
        hidden_size = self.config.hidden_size
        return {
            index: (
                1.0 - layer.feed_forward.per_token / layer.feed_forward.count,
                expert_weight_bytes(hidden_size, layer, self.dtype),
            )
            for index, layer in enumerate(self.config.layers)
            if isinstance(layer.feed_forward, Experts)
        }

    def _unread_bytes(self, layer: int) -> int:
        """Bytes of a layer's experts that no sequence of an average step chooses."""
        if layer not in self._of_experts:
            return 0
        unchosen, num_bytes = self._of_experts[layer]
        unread: float = unchosen**self.step_sequences
        return round(num_bytes * unread)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each layer."""
        dtype = self.kv_dtype or self.dtype
        sizes = (kv_bytes_per_token(layer.mixer, dtype) for layer in self.config.layers)
        return tuple(self.block_size * size for size in sizes)

    @property
    def head_cost(self) -> int:
        """Cost of the head in a decode step: final norm and output matrix, tied or not."""
        return head_bytes(self.config, self.dtype)

    def cost(self, role: StageRole, layer_begin: int, layer_end: int) -> int:
        """Cost of a decode step on a stage."""
        unread = sum(self._unread_bytes(layer) for layer in range(layer_begin, layer_end))
        return (
            sum(self.layer_bytes[layer_begin:layer_end]) - unread + (self.head_cost if role.has_head else 0)
        )

    def weight_bytes(self, role: StageRole, layer_begin: int, layer_end: int) -> int:
        """Weights of a stage: its layers, and the embeddings and head of its role."""
        return self.outside_bytes(role) + sum(self.layer_bytes[layer_begin:layer_end])

    def outside_bytes(self, role: StageRole) -> int:
        """Weights of a role besides its layers. FIRST and LAST both hold tied embeddings, ONLY once."""
        return self._outside_bytes[role]

    @cached_property
    def _outside_bytes(self) -> Mapping[StageRole, int]:
        """By role; a search of a split asks hundreds of times."""
        one_layer = partial(stage_weight_bytes, self.config, self.dtype, 0, 1)
        return {
            role: one_layer(has_embeddings=role.has_embeddings, has_head=role.has_head) - self.layer_bytes[0]
            for role in StageRole
        }

    @cached_property
    def windows(self) -> tuple[KvWindow | None, ...]:
        """Window of each block group, in the order of the groups."""
        widths = group_windows(self.config.layer_windows)
        return tuple(KvWindow.of(width, self.limits.max_step_tokens) for width in widths)

    @cached_property
    def _layer_windows(self) -> tuple[KvWindow | None, ...]:
        max_step_tokens = self.limits.max_step_tokens
        return tuple(KvWindow.of(width, max_step_tokens) for width in self.config.layer_windows)

    def block_limits(self, most: int) -> tuple[int, ...]:
        """Blocks that each layer needs at most, if the first block group has up to `most`."""
        limits = {window: self.block_limit(window, most) for window in self.windows}
        return tuple(limits[window] for window in self._layer_windows)

    def block_limit(self, window: KvWindow | None, most: int) -> int:
        """Blocks that the group of `window` needs at most: `most` in the first group.

        Other groups hold the window and one step for every sequence in flight.
        """
        if window is None or window == self.windows[0]:
            return most
        return min(most, self.num_in_flight * window.num_blocks(self.block_size))

    def other_groups(self, num_blocks: int) -> tuple[KvGroup, ...]:
        """The block groups after the first, which has `num_blocks`."""
        return tuple(KvGroup(self.block_limit(window, num_blocks), window) for window in self.windows[1:])

    @property
    def num_in_flight(self) -> int:
        """Sequences in all steps: one step per stage and one that waits."""
        return (self.num_stages + 1) * self.limits.max_step_sequences

    def kv_bytes(self, layer_begin: int, layer_end: int, num_blocks: int) -> int:
        """KV pages of a stage, with `num_blocks` blocks in the first block group."""
        counts = self.block_limits(num_blocks)[layer_begin:layer_end]
        return sum(map(mul, counts, self.block_bytes[layer_begin:layer_end]))

    def activation_bytes(self, role: StageRole, num_blocks: int) -> int:
        """Activation memory of the largest step with `num_blocks` blocks in the cache."""
        limits, kv_tokens = self.limits, num_blocks * self.block_size
        longest = min(limits.max_sequence_tokens, kv_tokens)
        gathered = min(limits.max_step_sequences * longest, kv_tokens)
        size = limits.max_step_tokens * longest * self._mask_bytes()
        size += max(
            limits.max_step_tokens * token_bytes + gathered * kv_bytes
            for token_bytes, kv_bytes in self._kind_bytes
        )
        size += max((self._expanded_bytes(kind.mixer, longest) for kind in self.config.kinds), default=0)
        return size + (self._logits_bytes() if role.has_head else 0)

    def total_bytes(self, role: StageRole, layer_begin: int, layer_end: int, num_blocks: int) -> int:
        """Weights, KV pages and activations of a stage."""
        weights = self.weight_bytes(role, layer_begin, layer_end)
        kv = self.kv_bytes(layer_begin, layer_end, num_blocks)
        return weights + kv + self.activation_bytes(role, num_blocks)

    @cached_property
    def _kind_bytes(self) -> set[tuple[int, int]]:
        """Activation bytes of one token, and KV bytes of one token, in each kind of layers."""
        return {(self._token_bytes(kind), self._gathered_bytes(kind)) for kind in self.config.kinds}

    def _gathered_bytes(self, layer: LayerPlan) -> int:
        """Keys and values of one token that attention reads, and while they are read from rows with scales:
        these rows, and keys or values before their product with the scales.
        """
        size = kv_bytes_per_token(layer.mixer, self.dtype)
        if self.kv_dtype is None:
            return size
        return size + size // 2 + kv_bytes_per_token(layer.mixer, self.kv_dtype)

    def _expanded_bytes(self, mixer: Mixer, num_keys: int) -> int:
        """Keys and values that are expanded from latents at once, and their copies for products."""
        if not isinstance(mixer, Latent):
            return 0
        of_a_head = num_keys * (mixer.query_dim + mixer.value_dim)
        num_elements = max(of_a_head, min(EXPANDED_ELEMENTS, mixer.num_heads * of_a_head))
        return num_elements * (3 * self.dtype.size_bytes + 4)

    def _token_bytes(self, layer: LayerPlan) -> int:
        hidden_size, size = self.config.hidden_size, self.dtype.size_bytes
        residual = hidden_size * (2 * size + 2 * 4)
        attention = _mixer_elements(layer.mixer) * size
        return residual + attention + self._inner_bytes(layer) + 2 * hidden_size * size

    def _inner_bytes(self, layer: LayerPlan) -> int:
        """Bytes of one token within a feed-forward."""
        inner, hidden_size, size = layer.feed_forward, self.config.hidden_size, self.dtype.size_bytes
        if isinstance(inner, Opaque):
            return inner.inner_elements * size
        if not isinstance(inner, Experts):
            return 3 * inner.width * size
        shared = 0 if inner.shared is None else 3 * inner.shared.width * size
        of_a_choice = 3 * (hidden_size + inner.width) * size + 8 * hidden_size
        return 20 * inner.count + inner.per_token * of_a_choice + shared

    def _mask_bytes(self) -> int:
        return len(set(self.config.layer_windows)) * (2 + 2 * self.dtype.size_bytes)

    def _logits_bytes(self) -> int:
        rows = min(self.limits.max_step_sequences, self.limits.max_step_tokens)
        return rows * self.config.vocab_size * (self.dtype.size_bytes + 8 + 12 + 48)


def _mixer_elements(mixer: Mixer) -> int:
    """Elements of one token within a mixer."""
    if isinstance(mixer, Latent):
        absorbed = mixer.num_heads * (2 * mixer.kv_rank + mixer.rope_dim)
        down = 2 * (mixer.query_rank or 0) + 2 * mixer.page_shape.width
        return down + 2 * mixer.q_size + absorbed + 2 * mixer.o_size
    return 2 * (mixer.q_size + 2 * mixer.kv_size) + mixer.q_size


def validate_counts(
    config: Blueprint,
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
        _validate_layer_counts(layers, len(workers), config)
    if len(workers) > config.num_layers:
        raise PlanImpossible(
            f"{len(workers)} stages for a model of {config.num_layers} layers: the minimum is one per stage"
        )
    if len(workers) > len(config.legal_cuts) + 1:
        raise PlanImpossible(
            f"{len(workers)} stages for a model that can be cut into {len(config.legal_cuts) + 1}:"
            f" a stage can begin with {_listed_cuts(config)}"
        )
    if max_kv_tokens is not None and max_kv_tokens < block_size:
        raise PlanImpossible(
            f"max_kv_tokens is {max_kv_tokens}, the minimum is one block of {block_size} tokens"
        )


def _listed_cuts(config: Blueprint) -> str:
    cuts = [0, *sorted(config.legal_cuts)]
    return f"layer{'s' * (len(cuts) > 1)} {', '.join(map(str, cuts))} only"


def _validate_layer_counts(layers: Sequence[int], num_workers: int, config: Blueprint) -> None:
    text = ",".join(str(count) for count in layers) or "(none)"
    if len(layers) != num_workers:
        raise PlanImpossible(f"layers {text} are for {len(layers)} stages, got {num_workers} workers")
    if min(layers) < 1:
        raise PlanImpossible(f"layers {text}: stage {layers.index(min(layers))} needs at least one layer")
    if sum(layers) != config.num_layers:
        raise PlanImpossible(f"layers {text} sum to {sum(layers)}, the model has {config.num_layers}")
    for begin, _ in _layer_ranges(layers)[1:]:
        if begin not in config.legal_cuts:
            raise PlanImpossible(f"layers {text}: no stage can begin with layer {begin}")


def _layer_ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """First layer of each stage, and the layer after its last one."""
    return list(pairwise(accumulate(layers, initial=0)))


def validate_layers(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], num_blocks: int
) -> None:
    """Raise PlanImpossible if a stage of a given split does not fit its worker."""
    for stage, (worker, layer_range) in enumerate(zip(workers, _layer_ranges(layers), strict=True)):
        role = StageRole.of_stage(stage, len(layers))
        if memory.total_bytes(role, *layer_range, num_blocks) > worker.memory_bytes:
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
    """Fill each stage, leaving one range for each later stage; the last stage gets the rest."""
    cuts, sizes = problem.cuts, problem.layer_bytes(problem.min_blocks)
    sums = [0, *accumulate(sizes)]
    used = [0]
    for stage in range(len(workers) - 1):
        begin = used[-1]
        room = problem.room(stage, StageRole.of_stage(stage, len(workers)), problem.min_blocks)
        last = len(cuts) - len(workers) + stage
        fitting = (end for end in range(last, begin, -1) if sums[cuts[end]] - sums[cuts[begin]] <= room)
        used.append(next(fitting, begin + 1))
    edges = [cuts[cut] for cut in used] + [problem.num_layers]
    return [end - begin for begin, end in pairwise(edges)]


def _stage_need(
    memory: StageMemory, worker: WorkerCapacity, stage: int, layers: Sequence[int], num_blocks: int
) -> str:
    role = StageRole.of_stage(stage, len(layers))
    begin, end = _layer_ranges(layers)[stage]
    named = f"layers {begin}-{end - 1} need" if end - begin > 1 else f"layer {begin} needs"
    short = memory.total_bytes(role, begin, end, num_blocks) - worker.memory_bytes
    return (
        f"stage {stage} on {worker.name}: {named}"
        f" {format_size(memory.weight_bytes(role, begin, end))} weights"
        f" + {format_size(memory.activation_bytes(role, num_blocks))} activations"
        f" + {format_size(memory.kv_bytes(begin, end, num_blocks))} KV"
        f" for {num_blocks * memory.block_size} tokens,"
        f" but {worker.name} has {format_size(worker.memory_bytes)} ({format_size(short)} too little)"
    )


def _total_need(memory: StageMemory, workers: Sequence[WorkerCapacity], num_blocks: int) -> str:
    """Compare the model's total memory on this many stages with the workers' budgets."""
    roles = [StageRole.of_stage(stage, len(workers)) for stage in range(len(workers))]
    need = sum(memory.total_bytes(role, 0, 0, num_blocks) for role in roles)
    need += sum(memory.layer_bytes) + memory.kv_bytes(0, memory.config.num_layers, num_blocks)
    have = sum(worker.memory_bytes for worker in workers)
    return (
        f"The model needs {format_size(need)} in total on {len(workers)} stages,"
        f" the workers have {format_size(have)}"
    )


MIN_KV_TOKENS = 512
"""Minimum tokens of KV of a plan, unless the longest allowed sequence is shorter."""


def make_plan(
    config: Blueprint,
    dtype: DType,
    workers: Sequence[WorkerCapacity],
    *,
    limits: StepLimits,
    block_size: int,
    layers: Sequence[int] | None = None,
    max_kv_tokens: int | None = None,
    kv_dtype: ScaledDType | None = None,
) -> Plan:
    """Assign one stage to every worker, and every layer of the model to one stage.

    The split minimizes the cost of the slowest stage, then maximizes the KV blocks, then is as even as
    possible. Workers keep the given order if the model fits; otherwise other workers become FIRST and LAST,
    which have the embeddings and the head.

    All stages get the same number of blocks: the most that every stage holds, at most `max_kv_tokens`, and at
    most enough for the sequences of all steps in flight at full length. Few sequences are that long, which
    leaves room for prefix reuse, and a small model does not take all memory.

    `layers` fixes the number of layers per worker, in the given order. `limits.max_sequence_tokens` is
    lowered to the limit of the model. Raises PlanImpossible with the numbers, and ValueError for arguments
    that are invalid for every model.
    """
    limits = limits.capped(config.max_position_embeddings)
    validate_counts(config, workers, block_size=block_size, layers=layers, max_kv_tokens=max_kv_tokens)
    memory = StageMemory(
        config=config,
        dtype=dtype,
        limits=limits,
        block_size=block_size,
        num_stages=len(workers),
        kv_dtype=kv_dtype,
    )
    problem = _split_problem(memory, workers, max_kv_tokens)
    return _made_plan(memory, workers, _choose_split(memory, workers, layers, problem))


def _made_plan(memory: StageMemory, workers: Sequence[WorkerCapacity], split: Split) -> Plan:
    return Plan(
        stages=tuple(_stage(memory, workers, split, stage) for stage in range(len(workers))),
        num_blocks=split.num_blocks,
        block_size=memory.block_size,
        dtype=memory.dtype,
        kv_dtype=memory.kv_dtype,
        limits=memory.limits,
        window=memory.windows[0],
        other_groups=memory.other_groups(split.num_blocks),
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
    most = -(-memory.num_in_flight * limits.max_sequence_tokens // block_size)
    if max_kv_tokens is not None:
        most = min(most, max_kv_tokens // block_size)
    least = -(-min(limits.max_sequence_tokens, MIN_KV_TOKENS) // block_size)

    outside_layers = {role: memory.outside_bytes(role) for role in StageRole}
    activation_bytes = cache(memory.activation_bytes)  # called for every worker and choice of ends

    def room(worker: int, role: StageRole, num_blocks: int) -> int:
        return workers[worker].memory_bytes - outside_layers[role] - activation_bytes(role, num_blocks)

    return SplitProblem(
        num_workers=len(workers),
        layer_costs=memory.layer_costs(),
        weight_bytes=memory.layer_bytes,
        block_bytes=memory.block_bytes,
        block_limits=memory.block_limits(most),
        legal_cuts=memory.config.legal_cuts,
        head_cost=memory.head_cost,
        min_blocks=min(least, most),
        max_blocks=most,
        room=room,
    )


def _given_split(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], problem: SplitProblem
) -> Split:
    validate_layers(memory, workers, layers, problem.min_blocks)
    roles = [StageRole.of_stage(stage, len(layers)) for stage in range(len(layers))]
    stages = list(zip(workers, roles, _layer_ranges(layers), strict=True))

    def too_many(num_blocks: int) -> bool:
        return any(
            memory.total_bytes(role, begin, end, num_blocks) > worker.memory_bytes
            for worker, role, (begin, end) in stages
        )

    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    num_blocks = candidates[bisect_left(candidates, True, key=too_many) - 1]
    return Split(order=tuple(range(len(layers))), layers=tuple(layers), num_blocks=num_blocks)


def _stage(memory: StageMemory, workers: Sequence[WorkerCapacity], split: Split, stage: int) -> StagePlan:
    role = StageRole.of_stage(stage, len(split.layers))
    begin, end = _layer_ranges(split.layers)[stage]
    worker = workers[split.order[stage]]
    return StagePlan(
        stage=stage,
        worker=worker.name,
        role=role,
        layer_begin=begin,
        layer_end=end,
        weight_bytes=memory.weight_bytes(role, begin, end),
        kv_bytes=memory.kv_bytes(begin, end, split.num_blocks),
        activation_bytes=memory.activation_bytes(role, split.num_blocks),
        memory_bytes=worker.memory_bytes,
        cost=memory.cost(role, begin, end),
    )


def check_counts(config: CoordinatorConfig, model: ServedModel) -> None:
    """Check the configuration before workers join.

    Raises PlanImpossible for more stages than the model can be cut into, for impossible `layers`, and for
    sequences longer than the limit of the model.
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

    `config.layers` applies if there are as many workers as configured stages.
    """
    limits = StepLimits(
        max_step_tokens=config.max_step_tokens,
        max_step_sequences=config.max_step_sequences,
        max_sequence_tokens=_max_sequence_tokens(config, model),
    )
    return make_plan(
        model.config,
        model.dtype if config.dtype is not None else _run_dtype(model, workers),
        workers,
        limits=limits,
        block_size=config.block_size,
        layers=config.layers if len(workers) == config.num_stages else None,
        max_kv_tokens=config.max_kv_tokens,
        kv_dtype=model.kv_dtype,
    )


def _run_dtype(model: ServedModel, workers: Sequence[WorkerCapacity]) -> DType:
    """The checkpoint's dtype; for bfloat16 without support by all workers, float16 or float32.

    Float16 has the speed and size of bfloat16, and no range for the hidden states of some families.
    """
    if model.dtype is not DType.BF16 or all(worker.supports_bf16 for worker in workers):
        return model.dtype
    has_f16 = all(worker.supports_f16 for worker in workers)
    return DType.F16 if has_f16 and model.config.model_type not in OVERFLOWS_F16 else DType.F32
