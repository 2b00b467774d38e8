"""Plans of Qwen3.8-Flash-Next: a table of 102 GB in one layer, of which a step reads a few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import Blueprint, DType, parse_config, stage_weight_bytes
from checkpoint.held import table_bytes
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import DeviceKind, PlanImpossible, StepLimits, WorkerCapacity
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.checkpoint.test_ngrams import PUBLISHED
from tests.unit.coordinator.planner.small_models import GIB, workers
from wire.ids import StageRole

LIMITS = StepLimits(max_step_tokens=512, max_step_sequences=8, max_sequence_tokens=16384)
TABLE_BYTES = 320_001_536 * 160 * 2


@pytest.fixture(scope="module")
def config() -> Blueprint:
    return parse_config(PUBLISHED)


def memory_of(config: Blueprint, limits: StepLimits = LIMITS) -> StageMemory:
    return StageMemory(config=config, dtype=DType.BF16, limits=limits, block_size=16, num_stages=4)


def test_the_weights_are_those_of_the_published_files(config: Blueprint) -> None:
    """125.74 and 51.2 thousand million elements."""
    found = stage_weight_bytes(config, DType.BF16, 0, 48, has_embeddings=True, has_head=True)
    assert found == pytest.approx(2 * (125.74e9 + 51.2e9), rel=1e-4)


def test_a_table_takes_memory_and_no_time(config: Blueprint) -> None:
    memory, with_ngrams, without = memory_of(config), 1, 0
    assert table_bytes(config.layers[with_ngrams], DType.BF16) == TABLE_BYTES
    of_projections = (10240 * 2560 + 2560 * 2560 + 10240 * (4 + 3) + 3 + 2 * 16) * 2
    sizes, costs = memory.layer_bytes, memory.layer_costs()
    assert sizes[with_ngrams] - sizes[without] == TABLE_BYTES + of_projections
    assert costs[with_ngrams] - costs[without] == of_projections


def test_a_plan_puts_the_table_where_it_fits_and_balances_the_rest(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(192 * GIB, 96 * GIB, 96 * GIB), limits=LIMITS, block_size=16)
    assert plan.stages[0].layer_end > 1 and plan.stages[0].weight_bytes > TABLE_BYTES
    assert all(stage.total_bytes <= stage.memory_bytes for stage in plan.stages)
    costs = [sum(memory_of(config).layer_costs()[s.layer_begin : s.layer_end]) for s in plan.stages]
    assert max(costs) < 1.5 * min(costs)


def test_a_table_that_no_worker_holds_is_refused_with_its_size(config: Blueprint) -> None:
    message = (
        r"layer 1 needs 100\.3 GiB weights \(95\.4 GiB in a table of n-grams, which no cut divides\) .* but"
        r" gpu-b has 96\.0 GiB .* needs .* in total on 8 stages, the workers have 768\.0 GiB"
    )
    with pytest.raises(PlanImpossible, match=message):
        make_plan(config, DType.BF16, workers(*[96 * GIB] * 8), limits=LIMITS, block_size=16)
    (small,) = workers(GIB)
    one = replace(config, layers=config.layers[:1], legal_cuts=frozenset())
    with pytest.raises(PlanImpossible, match=r"layer 0 needs") as refusal:
        make_plan(one, DType.BF16, [small], limits=LIMITS, block_size=16)
    assert "n-grams" not in str(refusal.value)


def test_gpus_without_kernels_take_more_memory(config: Blueprint) -> None:
    """For gathered keys, masks and copies of states."""
    memory, role = memory_of(config), StageRole.MIDDLE
    by_torch, by_kernels = (
        memory.activation_bytes(role, 4096, device) for device in (DeviceKind.GPU, DeviceKind.GPU_IN_PLACE)
    )
    assert by_torch > max(by_kernels, memory.activation_bytes(role, 4096))


def gpus(*sizes: tuple[int, int | None]) -> list[WorkerCapacity]:
    """Workers with (memory of the GPU, memory of its host)."""
    found = workers(*(size for size, _ in sizes))
    rooms = [room for _, room in sizes]
    return [
        replace(worker, device=DeviceKind.GPU_IN_PLACE, host_memory_bytes=room)
        for worker, room in zip(found, rooms, strict=True)
    ]


@pytest.mark.parametrize("room", [TABLE_BYTES, None])
def test_the_table_of_a_gpu_is_in_memory_of_its_host(config: Blueprint, room: int | None) -> None:
    """Every GPU is smaller than the table; only one host has memory for it."""
    given = gpus((80 * GIB, 64 * GIB), (80 * GIB, room), (80 * GIB, 0), (80 * GIB, 64 * GIB))
    plan = make_plan(config, DType.BF16, given, limits=LIMITS, block_size=16)
    (stage,) = [stage for stage in plan.stages if stage.layer_begin <= 1 < stage.layer_end]
    assert (stage.worker, stage.table_bytes) == ("gpu-b", TABLE_BYTES)
    assert stage.pinned_bytes == stage.buffer_bytes + TABLE_BYTES
    assert stage.total_bytes <= stage.memory_bytes < TABLE_BYTES
    assert sum(stage.table_bytes for stage in plan.stages) == TABLE_BYTES
    weights = sum(stage.weight_bytes for stage in plan.stages)
    whole = stage_weight_bytes(config, DType.BF16, 0, 48, has_embeddings=True, has_head=True)
    assert weights == whole - TABLE_BYTES


def test_cpus_and_gpus_have_the_table_each_in_its_own_memory(config: Blueprint) -> None:
    """A host of a GPU has memory for the table; a CPU would need a larger budget."""
    cpu, *_ = workers(90 * GIB)
    (gpu,) = gpus((96 * GIB, 100 * GIB))
    both = [replace(cpu, name="cpu"), replace(gpu, name="gpu"), replace(gpu, name="other")]
    plan = make_plan(config, DType.BF16, both, limits=LIMITS, block_size=16)
    assert plan.stages[0].worker != "cpu" and plan.stages[0].table_bytes == TABLE_BYTES
    large = [replace(cpu, name="cpu", memory_bytes=192 * GIB), *both[1:]]
    plan = make_plan(config, DType.BF16, large, limits=LIMITS, block_size=16)
    assert plan.stages[0].worker == "cpu" and plan.stages[0].weight_bytes > TABLE_BYTES
    assert not any(stage.table_bytes for stage in plan.stages)


def test_a_table_that_no_host_of_a_gpu_holds_is_refused_with_its_size(config: Blueprint) -> None:
    """By the worker whose host has the most, or by that of a given split."""
    given = gpus((96 * GIB, 0), (96 * GIB, 64 * GIB), (96 * GIB, 32 * GIB), (96 * GIB, 1))
    message = (
        r"gpu-b with the most host memory: layer 1 needs 95\.4 GiB of host memory for tables of n-grams,"
        r" which a GPU reads there, but the host of gpu-b has 64\.0 GiB \(31\.4 GiB too little\):"
        r" add a worker whose host has more memory"
    )
    with pytest.raises(PlanImpossible, match=message):
        make_plan(config, DType.BF16, given, limits=LIMITS, block_size=16)
    with pytest.raises(PlanImpossible, match=r"stage 0 on gpu-a: layer 1 needs 95\.4 GiB .* has 0 B"):
        make_plan(config, DType.BF16, given, limits=LIMITS, block_size=16, layers=(12, 12, 12, 12))


def test_tables_of_one_host_are_counted_together(config: Blueprint) -> None:
    """Of a model with a second table, in layer 46: another host would have room for it."""
    plans = list(config.layers)
    assert plans[46].ngrams is None
    plans[46] = replace(plans[46], ngrams=plans[1].ngrams)
    two = replace(config, layers=tuple(plans))
    given = gpus(*[(96 * GIB, 150 * GIB)] * 4)
    one_host = [replace(worker, memory_domain="host") for worker in given]
    message = r"gpu-a, gpu-d on one host need 190\.7 GiB of its memory .* it has 150\.0 GiB \(40\.7 GiB"
    with pytest.raises(PlanImpossible, match=message):
        make_plan(two, DType.BF16, one_host, limits=LIMITS, block_size=16)
    for apart in (given, [replace(worker, host_memory_bytes=200 * GIB) for worker in one_host]):
        plan = make_plan(two, DType.BF16, apart, limits=LIMITS, block_size=16)
        assert [bool(stage.table_bytes) for stage in plan.stages] == [True, False, False, True]


@pytest.mark.parametrize("device", [DeviceKind.HOST, DeviceKind.GPU_IN_PLACE])
def test_a_worker_without_room_serves_beside_the_table_of_another_one(
    config: Blueprint, device: DeviceKind
) -> None:
    """A CPU offers no host memory, and a GPU that starts after the load of the table what that left."""
    first, *others = gpus(*[(96 * GIB, 120 * GIB)] * 4)
    beside = replace(others[0], device=device, host_memory_bytes=0 if device is DeviceKind.HOST else 20 * GIB)
    given = [replace(worker, memory_domain="host") for worker in (first, beside, *others[1:])]
    plan = make_plan(config, DType.BF16, given, limits=LIMITS, block_size=16)
    assert [bool(stage.table_bytes) for stage in plan.stages] == [True, False, False, False]


def test_layers_are_named_by_what_they_do(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(*[128 * GIB] * 4), limits=LIMITS, block_size=16)
    kinds = {kind.name.partition(" + 10 of")[0]: kind for kind in layer_kinds(config, plan).kinds}
    assert list(kinds) == [
        "Gated DeltaNet",
        "Gated DeltaNet + n-grams",
        "attention to 512 indexed blocks of 4 tokens",
    ]
    attention = kinds["attention to 512 indexed blocks of 4 tokens"]
    assert attention.kv_bytes_per_token == (2 * 2 * 256 + 128) * 2
    assert kinds["Gated DeltaNet"].kv_bytes_per_token == 0


def test_a_state_has_the_inputs_of_the_convolution_and_token_ids(config: Blueprint) -> None:
    of_layers = memory_of(config).state_bytes
    assert of_layers[1] - of_layers[0] == 10240 * 9 * 2 + 2 * 4
    assert of_layers[3] == 0


def test_memory_of_a_choice_begins_beyond_the_budget(config: Blueprint) -> None:
    """Up to 2,048 tokens nothing is scored."""
    role_bytes = []
    for longest in (2048, 2051, 2052):
        limits = StepLimits(max_step_tokens=64, max_step_sequences=1, max_sequence_tokens=longest)
        memory = memory_of(config, limits)
        role_bytes.append(memory._index_bytes(config.layers[3].mixer, longest, longest))
    assert role_bytes[0] == role_bytes[1] == 0 < role_bytes[2]


def test_kernels_of_gpus_hold_keys_of_all_blocks_and_choices_of_a_group(config: Blueprint) -> None:
    """64 bytes of each token in the cache; torch's operators gather keys and values, of 2,048 bytes."""
    layer = replace(config.layers[3], connection=None)
    attention = replace(config, layers=(layer,) * 2, legal_cuts=frozenset(), collapse=None)
    found = {}
    for device in (DeviceKind.GPU, DeviceKind.GPU_IN_PLACE):
        limits = StepLimits(max_step_tokens=512, max_step_sequences=8, max_sequence_tokens=262_144)
        memory = memory_of(attention, limits)
        blocks = (128, 129, 16_384, 65_536)
        found[device] = [memory.activation_bytes(StageRole.MIDDLE, count, device) for count in blocks]
    short, longer, longest, many = found[DeviceKind.GPU_IN_PLACE]
    parts = 8 * 5 * 24 * (256 + 2) * 4
    choices = 128 * (516 + 16 + 2 * 512 + 513) * 4
    copies, keys = 2 * 128 * 24 * 256 * 2, (516 + 8) * 128 * 2
    tables = 2 * 2 * (32 * (256 + 128 + 128) + 4 * 128)
    assert longer - short == parts + choices + copies + keys + tables
    scores = 4 * 128 * (65_536 - 516)
    assert scores < longest - longer < scores + 100 * 1024**2
    assert many - longest == (65_536 - 16_384) * 16 // 4 * 128 * 2
    of_torch = found[DeviceKind.GPU]
    assert of_torch[3] - of_torch[2] > 50 * (many - longest)
