"""Assigns layers to workers within their memory budgets, and explains why a plan is impossible.

The slowest stage limits the pipeline, so the plan minimizes its cost, subject to every worker holding
weights, activations and KV (see `coordinator.planner.stage_memory`) for at least `MIN_KV_TOKENS` tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import NoReturn

from checkpoint import Blueprint, Compressed, DType, ScaledDType
from checkpoint.dtypes import OVERFLOWS_F16
from checkpoint.held import has_held, stage_table_bytes, table_bytes
from checkpoint.implementation import Implementation
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel
from coordinator.planner.plan import (
    DeviceKind,
    Plan,
    PlanImpossible,
    StagePlan,
    StepLimits,
    WorkerCapacity,
    format_layers,
)
from coordinator.planner.rates import levelled
from coordinator.planner.split import Costs, Split, SplitProblem, best_split
from coordinator.planner.stage_memory import StageMemory
from wire.device_rates import DeviceRates
from wire.ids import StageRole
from wire.sizes import format_size
from wire.tensors import HopRoute, WireDType


def _check_entries_fit(config: Blueprint, block_size: int) -> None:
    """Raise PlanImpossible for blocks that cannot hold whole entries, and no entry whole blocks."""
    for layer in config.kinds:
        compressor = layer.mixer.compressor if isinstance(layer.mixer, Compressed) else None
        if compressor is not None and not compressor.fits(block_size):
            raise PlanImpossible(
                f"block size is {block_size} tokens, {config.model_type!r} has entries of {compressor.ratio}:"
                " one must be a multiple of the other"
            )


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
    _check_entries_fit(config, block_size)
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
        _check_tables(memory, worker, f"stage {stage} on {worker.name}", *layer_range)
        if _stage_bytes(memory, workers, stage, role, layer_range, num_blocks) > worker.memory_bytes:
            need = _stage_need(memory, workers, stage, layers, num_blocks)
            raise PlanImpossible(f"{need}. {_total_need(memory, workers, num_blocks)}")


def _check_tables(memory: StageMemory, worker: WorkerCapacity, place: str, begin: int, end: int) -> None:
    """Raise PlanImpossible for tables of layers [begin, end) that the worker's host has no memory for.

    `place` names the worker in the message.
    """
    tables, room = memory.host_table_bytes(begin, end, worker.device), worker.host_memory_bytes
    if room is not None and tables > room:
        found = [layer for layer in range(begin, end) if memory.config.layers[layer].ngrams is not None]
        raise PlanImpossible(
            f"{place}: {format_layers(found[0], found[-1] + 1)} need{'s' * (len(found) == 1)}"
            f" {format_size(tables)} of host memory for tables of n-grams, which a GPU reads there, but the"
            f" host of {worker.name} has {format_size(room)} ({format_size(tables - room)} too little):"
            " add a worker whose host has more memory"
        )


def _stage_bytes(
    memory: StageMemory,
    workers: Sequence[WorkerCapacity],
    index: int,
    role: StageRole,
    layer_range: tuple[int, int],
    num_blocks: int,
) -> int:
    """What a stage takes of a worker's budget."""
    segment = _segment_bytes(memory, workers, index, role)
    return memory.total_bytes(role, *layer_range, num_blocks, workers[index].device) + segment


def _segment_bytes(
    memory: StageMemory, workers: Sequence[WorkerCapacity], index: int, role: StageRole
) -> int:
    """Memory that a stage shares with the next one, if some other worker is on its host.

    Which one is next is open while layers are distributed, and whether GPUs can share memory until they do.
    """
    others = (other for number, other in enumerate(workers) if number != index)
    if not any(_share_memory(workers[index], other) for other in others):
        return 0
    return memory.segment_bytes(role)


def _share_memory(one: WorkerCapacity, other: WorkerCapacity) -> bool:
    return bool(one.memory_domain) and one.memory_domain == other.memory_domain


def raise_memory_shortage(
    memory: StageMemory, workers: Sequence[WorkerCapacity], problem: SplitProblem
) -> NoReturn:
    """Raise PlanImpossible with the numbers of a split that fills the workers in their given order."""
    _check_some_host(memory, workers)
    layers = _fill(workers, problem)
    validate_layers(memory, workers, layers, problem.min_blocks)
    raise AssertionError(f"layers {layers} fit, but no split was found")


def _check_some_host(memory: StageMemory, workers: Sequence[WorkerCapacity]) -> None:
    """Raise PlanImpossible for a layer whose tables no worker's host has memory for, if all have GPUs."""
    rooms = [(worker.host_memory_bytes, worker) for worker in workers]
    known = [(room, worker) for room, worker in rooms if room is not None]
    if len(known) < len(workers) or any(worker.device is DeviceKind.HOST for worker in workers):
        return
    _, best = max(known, key=lambda pair: pair[0])
    for layer in range(memory.config.num_layers):
        _check_tables(memory, best, f"{best.name} with the most host memory", layer, layer + 1)


def _fill(workers: Sequence[WorkerCapacity], problem: SplitProblem) -> list[int]:
    """Fill each stage, leaving one range for each later stage; the last stage gets the rest."""
    cuts, used = problem.cuts, [0]
    for stage in range(len(workers) - 1):
        has_tables = problem.table_room(stage) is None
        sums = [0, *accumulate(problem.layer_bytes(problem.min_blocks, has_tables=has_tables))]
        begin = used[-1]
        room = problem.room(stage, StageRole.of_stage(stage, len(workers)), problem.min_blocks)
        last = len(cuts) - len(workers) + stage
        fitting = (end for end in range(last, begin, -1) if sums[cuts[end]] - sums[cuts[begin]] <= room)
        used.append(next(fitting, begin + 1))
    edges = [cuts[cut] for cut in used] + [problem.num_layers]
    return [end - begin for begin, end in pairwise(edges)]


def _stage_need(
    memory: StageMemory, workers: Sequence[WorkerCapacity], stage: int, layers: Sequence[int], num_blocks: int
) -> str:
    role, worker = StageRole.of_stage(stage, len(layers)), workers[stage]
    begin, end = _layer_ranges(layers)[stage]
    named = f"layers {begin}-{end - 1} need" if end - begin > 1 else f"layer {begin} needs"
    short = _stage_bytes(memory, workers, stage, role, (begin, end), num_blocks) - worker.memory_bytes
    buffers = memory.buffer_bytes(role, num_blocks, worker.device)
    buffers += memory.overhead_bytes(role, worker.device)
    shared = _segment_bytes(memory, workers, stage, role)
    on_host = memory.host_table_bytes(begin, end, worker.device)
    tables = stage_table_bytes(memory.config, memory.dtype, begin, end) - on_host
    return (
        f"stage {stage} on {worker.name}: {named}"
        f" {format_size(memory.weight_bytes(role, begin, end, worker.device))} weights"
        f"{f' ({format_size(tables)} in a table of n-grams, which no cut divides)' if tables else ''}"
        f" + {format_size(memory.activation_bytes(role, num_blocks, worker.device))} activations"
        f"{f' + {format_size(buffers)} buffers and workspaces' if buffers else ''}"
        f"{f' + {format_size(shared)} shared with the next stage' if shared else ''}"
        f" + {format_size(memory.kv_bytes(begin, end, num_blocks))} KV"
        f" for {num_blocks * memory.block_size} tokens"
        f"{f' and {memory.num_states} recurrent states' if memory.num_states else ''},"
        f" but {worker.name} has {format_size(worker.memory_bytes)} ({format_size(short)} too little)"
    )


def _total_need(memory: StageMemory, workers: Sequence[WorkerCapacity], num_blocks: int) -> str:
    """Compare the model's total memory on this many stages with the workers' budgets."""
    roles = [StageRole.of_stage(stage, len(workers)) for stage in range(len(workers))]
    need = sum(
        _stage_bytes(memory, workers, stage, role, (0, 0), num_blocks) for stage, role in enumerate(roles)
    )
    need += sum(memory.layer_bytes) + memory.kv_bytes(0, memory.config.num_layers, num_blocks)
    if all(worker.device is not DeviceKind.HOST for worker in workers):
        need -= stage_table_bytes(memory.config, memory.dtype, 0, memory.config.num_layers)
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
    wire_dtype: WireDType | None = None,
    prefix_caching: bool = True,
    implementation: Implementation = Implementation.NATIVE,
    shares_memory: bool = True,
) -> Plan:
    """Assign one stage to every worker, and every layer of the model to one stage.

    The split minimizes the cost of the slowest stage, then maximizes the KV blocks, then is as even as
    possible. Workers keep the given order if the model fits; otherwise others become FIRST and LAST.

    All stages get the same number of blocks: the most that every stage holds, at most `max_kv_tokens`, and at
    most enough for all steps in flight at full length, so that a small model does not take all memory.
    `layers` fixes the number of layers per worker, in order. `limits.max_sequence_tokens` is lowered to the
    model's limit. Raises PlanImpossible with the numbers, ValueError for arguments invalid for every model.
    """
    validate_counts(config, workers, block_size=block_size, layers=layers, max_kv_tokens=max_kv_tokens)
    memory = StageMemory(
        config=config,
        dtype=dtype,
        limits=limits.capped(config.longest_sequence),
        block_size=block_size,
        num_stages=len(workers),
        kv_dtype=kv_dtype,
        wire_dtype=wire_dtype,
        implementation=implementation,
        shares_memory=shares_memory,
    )
    if config.is_recurrent:
        return _plan_with_states(memory, workers, layers, max_kv_tokens, prefix_caching=prefix_caching)
    return _plan_of(memory, workers, layers, _split_problem(memory, workers, max_kv_tokens))


MIN_STATES = 2
"""Recurrent states of a plan at least: one of a sequence, and one that it continues from."""


def _plan_with_states(
    memory: StageMemory,
    workers: Sequence[WorkerCapacity],
    layers: Sequence[int] | None,
    max_kv_tokens: int | None,
    *,
    prefix_caching: bool,
) -> Plan:
    """A plan with states for all sequences in flight and as many snapshots, or with fewer of them.

    States are halved until the KV cache holds the longest sequence, or until they take no more memory than
    the blocks: a cache of two states would be of use to two sequences only, however long they may be. Without
    prefix caching no state is saved, and there are none for snapshots. Raises PlanImpossible.
    """
    num_states = max(MIN_STATES, memory.num_in_flight * (2 if prefix_caching else 1))
    while True:
        sized = replace(memory, num_states=num_states)
        problem = _split_problem(sized, workers, max_kv_tokens)
        try:
            plan = _plan_of(sized, workers, layers, problem)
        except PlanImpossible:
            if num_states == MIN_STATES:
                raise
        else:
            longest = min(memory.limits.max_sequence_tokens, problem.max_blocks * memory.block_size)
            is_enough = plan.num_kv_tokens >= longest or _is_balanced(sized, plan)
            if num_states == MIN_STATES or is_enough:
                return plan
        num_states = max(MIN_STATES, num_states // 2)


def _is_balanced(memory: StageMemory, plan: Plan) -> bool:
    """Whether recurrent states take no more memory than blocks, over all stages."""
    of_states = memory.states_bytes(0, plan.num_layers)
    return 2 * of_states <= sum(stage.kv_bytes for stage in plan.stages)


def _plan_of(
    memory: StageMemory,
    workers: Sequence[WorkerCapacity],
    layers: Sequence[int] | None,
    problem: SplitProblem,
) -> Plan:
    split = _choose_split(memory, workers, layers, problem)
    stages = tuple(_stage(memory, workers, split, stage) for stage in range(len(workers)))
    _check_hosts(stages, workers)
    return Plan(
        stages=stages,
        num_blocks=split.num_blocks,
        block_size=memory.block_size,
        dtype=memory.dtype,
        kv_dtype=memory.kv_dtype,
        holds_stored=memory.config.holds_stored,
        num_states=memory.num_states,
        limits=memory.limits,
        window=memory.windows[0],
        other_groups=memory.other_groups(split.num_blocks),
    )


def _check_hosts(stages: Sequence[StagePlan], workers: Sequence[WorkerCapacity]) -> None:
    """Raise PlanImpossible for GPUs of one host with more tables than it has memory for.

    The search counts the tables of one stage at a time. A worker offers what was free at its start, less by
    tables of earlier ones: the largest offer is the host's.
    """
    for worker in workers:
        rooms = {one.name: one.host_memory_bytes for one in workers if _are_on_one_host(worker, one)}
        known = [room for room in rooms.values() if room is not None]
        held = [stage for stage in stages if stage.table_bytes and stage.worker in rooms]
        tables, room = sum(stage.table_bytes for stage in held), max(known, default=0)
        if len(known) == len(rooms) and tables > room:
            names = ", ".join(stage.worker for stage in held)
            raise PlanImpossible(
                f"{names} on one host need {format_size(tables)} of its memory for tables of n-grams, which"
                f" GPUs read there, but it has {format_size(room)} ({format_size(tables - room)} too little):"
                " run them on several hosts"
            )


def _are_on_one_host(one: WorkerCapacity, other: WorkerCapacity) -> bool:
    return one.name == other.name or _share_memory(one, other)


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

    tables = tuple(table_bytes(layer, memory.dtype) for layer in memory.config.layers)
    rooms = (_table_room(worker, sum(tables)) for worker in workers)
    outside_layers = {role: memory.outside_bytes(role) for role in StageRole}
    step_bytes = cache(memory.step_bytes)  # called for every worker and choice of ends

    def room(worker: int, role: StageRole, num_blocks: int) -> int:
        capacity = workers[worker]
        taken = outside_layers[role] + _segment_bytes(memory, workers, worker, role)
        return capacity.memory_bytes - taken - step_bytes(role, num_blocks, capacity.device)

    return SplitProblem(
        num_workers=len(workers),
        costs=_costs(memory, _rates(workers)),
        weight_bytes=tuple(
            weights + memory.num_states * state
            for weights, state in zip(memory.layer_bytes, memory.state_bytes, strict=True)
        ),
        block_bytes=memory.block_bytes,
        block_limits=memory.block_limits(most),
        entry_bytes=memory.entry_bytes,
        legal_cuts=memory.config.legal_cuts,
        min_blocks=min(least, most),
        max_blocks=most,
        room=room,
        table_bytes=tables,
        table_rooms=tuple(rooms) if any(tables) else (),
    )


def _table_room(worker: WorkerCapacity, most: int) -> int | None:
    """Memory for tables beside the budget; None if they are in it, `most` if it is any number."""
    if worker.device is DeviceKind.HOST:
        return None
    return most if worker.host_memory_bytes is None else worker.host_memory_bytes


def _rates(workers: Sequence[WorkerCapacity]) -> tuple[DeviceRates | None, ...]:
    """The rates that costs count with, none of them if they make no difference."""
    return levelled([worker.rates for worker in workers]) or (None,) * len(workers)


def _costs(memory: StageMemory, rates: Sequence[DeviceRates | None]) -> tuple[Costs, ...]:
    """By worker: picoseconds, or without rates bytes that a step reads."""
    found = {
        rate: Costs(memory.layer_costs(), memory.head_cost)
        if rate is None
        else Costs(memory.step_ps(rate), memory.head_ps(rate))
        for rate in set(rates)
    }
    return tuple(found[rate] for rate in rates)


def _given_split(
    memory: StageMemory, workers: Sequence[WorkerCapacity], layers: Sequence[int], problem: SplitProblem
) -> Split:
    validate_layers(memory, workers, layers, problem.min_blocks)
    roles = [StageRole.of_stage(stage, len(layers)) for stage in range(len(layers))]
    stages = list(zip(workers, roles, _layer_ranges(layers), strict=True))

    def too_many(num_blocks: int) -> bool:
        return any(
            _stage_bytes(memory, workers, stage, role, layer_range, num_blocks) > worker.memory_bytes
            for stage, (worker, role, layer_range) in enumerate(stages)
        )

    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    num_blocks = candidates[bisect_left(candidates, True, key=too_many) - 1]
    return Split(order=tuple(range(len(layers))), layers=tuple(layers), num_blocks=num_blocks)


def _stage(memory: StageMemory, workers: Sequence[WorkerCapacity], split: Split, stage: int) -> StagePlan:
    role = StageRole.of_stage(stage, len(split.layers))
    begin, end = _layer_ranges(split.layers)[stage]
    worker, rates = workers[split.order[stage]], _rates(workers)[split.order[stage]]
    following = [workers[index] for index in split.order[stage + 1 : stage + 2]]
    shares_memory = any(_share_memory(worker, other) for other in following)
    return StagePlan(
        stage=stage,
        worker=worker.name,
        role=role,
        layer_begin=begin,
        layer_end=end,
        weight_bytes=memory.weight_bytes(role, begin, end, worker.device),
        table_bytes=memory.host_table_bytes(begin, end, worker.device),
        kv_bytes=memory.kv_bytes(begin, end, split.num_blocks),
        activation_bytes=memory.activation_bytes(role, split.num_blocks, worker.device),
        buffer_bytes=memory.buffer_bytes(role, split.num_blocks, worker.device),
        overhead_bytes=memory.overhead_bytes(role, worker.device),
        segment_bytes=memory.segment_bytes(role) if shares_memory else 0,
        device=worker.device,
        memory_bytes=worker.memory_bytes,
        cost=memory.cost(role, begin, end),
        rates=rates,
        step_s=None if rates is None else _step_s(memory, rates, role, begin, end),
    )


def _step_s(memory: StageMemory, rates: DeviceRates, role: StageRole, begin: int, end: int) -> float:
    head = memory.head_ps(rates) if role.has_head else 0
    return (sum(memory.step_ps(rates)[begin:end]) + head) / 1e12


def check_counts(config: CoordinatorConfig, model: ServedModel) -> None:
    """Check the configuration before workers join.

    Raises PlanImpossible for more stages than the model can be cut into, for impossible `layers`, and for
    sequences longer than the limit of the model.
    """
    _max_sequence_tokens(config, model)
    validate_counts(
        model.config,
        [WorkerCapacity(name=f"stage {stage}", memory_bytes=1) for stage in range(config.most_stages)],
        block_size=config.block_size,
        layers=config.layers,
        max_kv_tokens=config.max_kv_tokens,
    )


def _max_sequence_tokens(config: CoordinatorConfig, model: ServedModel) -> int:
    limit, default = model.config.longest_sequence, model.config.max_position_embeddings
    given = config.max_sequence_tokens
    if given is not None and given > limit:
        reason = (
            "factor x original length of its rotary embedding"
            if limit > default
            else "max_position_embeddings"
        )
        raise PlanImpossible(
            f"--max-model-len is {given}, but the model's limit is {limit} ({reason}): lower --max-model-len"
            " or omit it"
        )
    return given or default


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
        model.config.with_stored(holds_stored=_holds_stored(model, workers)),
        model.dtype if config.dtype is not None else _run_dtype(model, workers),
        workers,
        limits=limits,
        block_size=config.block_size,
        layers=config.layers if len(workers) == config.most_stages else None,
        max_kv_tokens=config.max_kv_tokens,
        kv_dtype=model.kv_dtype,
        wire_dtype=model.wire_dtype,
        prefix_caching=config.prefix_cache,
        implementation=model.implementation,
        shares_memory=config.hidden_states is HopRoute.AUTO,
    )


def _holds_stored(model: ServedModel, workers: Sequence[WorkerCapacity]) -> bool:
    """Whether all workers multiply by the matrices of a quantised checkpoint as they are stored.

    All stages of a plan compute alike, as with the run dtype.
    """
    return (
        model.weight_format is None
        and model.implementation is Implementation.NATIVE
        and all(worker.device is DeviceKind.GPU_IN_PLACE for worker in workers)
        and has_held(model.config)
    )


def _run_dtype(model: ServedModel, workers: Sequence[WorkerCapacity]) -> DType:
    """The checkpoint's dtype; for bfloat16 without support by all workers, float16 or float32.

    Float16 has the speed and size of bfloat16, and no range for the hidden states of some families.
    """
    if model.dtype is not DType.BF16 or all(worker.supports_bf16 for worker in workers):
        return model.dtype
    has_f16 = all(worker.supports_f16 for worker in workers)
    return DType.F16 if has_f16 and model.config.model_type not in OVERFLOWS_F16 else DType.F32
