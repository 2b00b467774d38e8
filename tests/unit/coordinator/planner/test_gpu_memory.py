"""The memory of a stage on a GPU: buffers for copies, workspaces, and attention in place."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import Blueprint, DType, Pageless, ScaledDType, parse_config
from checkpoint.implementation import Implementation
from checkpoint.step_graphs import graph_bytes
from coordinator.planner.mixer_sizes import rotary_tables
from coordinator.planner.plan import DeviceKind, Plan, PlanImpossible, StepLimits
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import GPU_OVERHEAD_BYTES, StageMemory
from stage_worker.assignment import Assignment
from stage_worker.model.attention_work import HostWork
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.rope import Rotary
from stage_worker.validation import SliceLayout
from tests.families import FAMILIES, config_of
from tests.properties import examples
from tests.unit.checkpoint.test_latent_config import V3
from tests.unit.checkpoint.test_ngrams import PUBLISHED
from tests.unit.coordinator.planner.small_models import GIB, llama, llama_8b, workers
from wire.ids import StageRole
from wire.tensors import WireDType

BLOCK_SIZE = 16
LONG_STEPS = StepLimits(max_step_tokens=2048, max_step_sequences=128, max_sequence_tokens=131_072)
SHORT_STEPS = StepLimits(max_step_tokens=512, max_step_sequences=64, max_sequence_tokens=512)


def memory_of(
    config: Blueprint, limits: StepLimits = LONG_STEPS, wire_dtype: WireDType | None = None
) -> StageMemory:
    return StageMemory(
        config=config,
        dtype=DType.BF16,
        limits=limits,
        block_size=BLOCK_SIZE,
        num_stages=2,
        wire_dtype=wire_dtype,
    )


def gpu_plan(memory_bytes: int, device: DeviceKind, limits: StepLimits = LONG_STEPS) -> Plan:
    capacities = [replace(worker, device=device) for worker in workers(memory_bytes, memory_bytes)]
    return make_plan(llama_8b(), DType.BF16, capacities, limits=limits, block_size=BLOCK_SIZE)


def test_attention_in_place_needs_no_masks_and_no_copies_of_keys_and_values() -> None:
    memory, num_blocks = memory_of(llama_8b(), SHORT_STEPS), 2048
    host = memory.activation_bytes(StageRole.MIDDLE, num_blocks)
    masks = 512 * 512 * (2 + 2 * 2)
    gathered = num_blocks * BLOCK_SIZE * 2 * 8 * 128 * 2
    tables = (2 * 512 + 512) * 2 * 128 * 2
    in_place = memory.activation_bytes(StageRole.MIDDLE, num_blocks, DeviceKind.GPU_IN_PLACE)
    assert in_place == host - masks - gathered + tables
    plain = memory.activation_bytes(StageRole.MIDDLE, num_blocks, DeviceKind.GPU)
    assert plain == host + gathered + tables


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_of_rotary_angles_are_those_of_the_stage(family: str) -> None:
    config = parse_config(config_of(family))
    mixers = [kind.mixer for kind in config.kinds if not isinstance(kind.mixer, Pageless)]
    counted = {table for mixer in mixers for table in rotary_tables(mixer)}
    looked_up = {rotary for mixer in mixers for rotary in Rotary.all_of(mixer)}
    assert {Rotary(table.rope, table.width, table.growth, table.stride) for table in counted} == looked_up


def test_a_table_of_blocks_is_as_long_as_the_longest_sequence() -> None:
    config = parse_config(PUBLISHED)
    limits = replace(LONG_STEPS, max_step_tokens=64, max_step_sequences=1, max_sequence_tokens=1 << 20)
    memory = memory_of(config, limits)
    least = (1 << 20) // 4 * 22 * 128
    assert memory._with_rotary_bytes(0, 1 << 20) > least


def test_tables_of_rotary_angles_take_the_most_while_they_are_computed() -> None:
    limits = replace(LONG_STEPS, max_step_tokens=16, max_step_sequences=1)
    memory = memory_of(llama_8b(), limits)
    found = memory.activation_bytes(StageRole.MIDDLE, 8192, DeviceKind.GPU_IN_PLACE)
    assert found == (16_384 + 16) * 2 * 128 * 2 + 16_384 * (22 * 128 + 8)


def test_latent_attention_and_layers_of_transformers_gather_on_every_gpu() -> None:
    memory = memory_of(parse_config(V3), SHORT_STEPS)
    sizes = [
        memory.activation_bytes(StageRole.MIDDLE, 2048, device)
        for device in (DeviceKind.GPU_IN_PLACE, DeviceKind.GPU)
    ]
    assert sizes[0] == sizes[1] > memory.activation_bytes(StageRole.MIDDLE, 2048)
    native = memory_of(llama_8b(), SHORT_STEPS)
    others = replace(native, implementation=Implementation.TRANSFORMERS)
    plans = [
        one.activation_bytes(StageRole.MIDDLE, 2048, DeviceKind.GPU_IN_PLACE) for one in (native, others)
    ]
    assert plans[0] < plans[1] == native.activation_bytes(StageRole.MIDDLE, 2048, DeviceKind.GPU)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """First position and tokens of each slice of a step within LONG_STEPS; decodes first."""
    size = st.integers(1, 200) | st.sampled_from([63, 64, 65])
    ends = st.integers(1, 131_072) | st.sampled_from([512, 513, 4096, 4097, 131_072])
    drawn = draw(st.lists(st.tuples(st.just(1) | size, ends), min_size=1, max_size=128))
    within = [count for count, _ in drawn if count]
    totals = accumulate(within)
    kept = [pair for pair, total in zip(drawn, totals, strict=True) if total <= LONG_STEPS.max_step_tokens]
    return [(max(0, end - count), count) for count, end in sorted(kept, key=lambda pair: pair[0] > 1)]


@pytest.mark.full
@settings(max_examples=examples(12))
@given(steps())
def test_partial_results_of_any_work_list_fit(step: list[tuple[int, int]]) -> None:
    layouts = [
        SliceLayout(
            first_position=first, num_tokens=count, pages=tuple(range(-(-(first + count) // BLOCK_SIZE)))
        )
        for first, count in step
    ]
    num_decodes = sum(count == 1 for _, count in step)
    firsts = [0, *accumulate(count for _, count in step)]
    work = HostWork.of(
        DecodeRows.of(layouts[:num_decodes]),
        np.arange(num_decodes),
        layouts[num_decodes:],
        firsts[num_decodes:-1],
        window=None,
        block_size=BLOCK_SIZE,
        queries_per_item=16,
    )
    memory = memory_of(llama_8b())
    num_blocks = sum(len(layout.pages) for layout in layouts)
    mixer = memory.config.layers[0].mixer
    longest = min(131_072, num_blocks * BLOCK_SIZE)
    room = memory._partial_bytes(mixer, longest, min(128 * longest, num_blocks * BLOCK_SIZE))
    assert work.num_partial * 32 * (128 + 2) * 4 <= room


@pytest.mark.parametrize("role", [StageRole.FIRST, StageRole.LAST])
@pytest.mark.parametrize("wire_dtype", [None, ScaledDType.I8])
def test_buffers_are_those_that_the_worker_allocates(wire_dtype: WireDType | None, role: StageRole) -> None:
    memory = memory_of(llama_8b(), wire_dtype=wire_dtype)
    num_blocks = 4096
    assignment = Assignment(
        plan_id=1,
        stage=int(role is StageRole.LAST),
        num_stages=2,
        role=role,
        layer_begin=0,
        layer_end=16,
        model_directory="",
        fingerprint="",
        dtype=DType.BF16,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_step_tokens=2048,
        max_step_sequences=128,
        max_sequence_tokens=num_blocks * BLOCK_SIZE,
        wire_dtype=wire_dtype,
    )
    sizes = assignment.staging_sizes(memory.config.boundary)
    for device in (DeviceKind.GPU, DeviceKind.GPU_IN_PLACE):
        assert memory.buffer_bytes(role, num_blocks, device) == sizes.total_bytes > 4 * 2048 * 4096 * 2
    assert memory.buffer_bytes(role, num_blocks, DeviceKind.HOST) == 0


@pytest.mark.parametrize("device", [DeviceKind.GPU, DeviceKind.GPU_IN_PLACE])
def test_a_plan_for_gpus_fills_the_budget_with_all_that_exists(device: DeviceKind) -> None:
    plan = gpu_plan(24 * GIB, device)
    for stage in plan.stages:
        parts = (stage.weight_bytes, stage.kv_bytes, stage.activation_bytes, stage.buffer_bytes)
        assert stage.total_bytes == sum(parts) + stage.overhead_bytes <= 24 * GIB
        assert stage.pinned_bytes == stage.buffer_bytes > 0
    block_bytes = BLOCK_SIZE * 16 * 2 * 8 * 128 * 2
    assert min(stage.free_bytes for stage in plan.stages) < 2 * block_bytes


def test_graphs_are_counted_for_kernels_that_attend_in_place() -> None:
    """As the worker counts them, on LAST with sampling; layers with experts have none."""
    memory, limits, in_place = memory_of(llama_8b(), SHORT_STEPS), SHORT_STEPS, DeviceKind.GPU_IN_PLACE
    counted = []
    for role, sampled_tokens in ((StageRole.MIDDLE, 0), (StageRole.LAST, memory.config.vocab_size)):
        expected = graph_bytes(
            memory.config.layers,
            memory.config.hidden_size,
            DType.BF16,
            max_step_tokens=limits.max_step_tokens,
            max_step_sequences=limits.max_step_sequences,
            sampled_tokens=sampled_tokens,
        )
        found = [memory.overhead_bytes(role, device) for device in (in_place, DeviceKind.GPU)]
        assert found == [GPU_OVERHEAD_BYTES + expected, GPU_OVERHEAD_BYTES]
        assert 128 << 20 < expected < 1 << 30
        counted.append(expected)
    rows = min(limits.max_step_sequences, limits.max_step_tokens)
    assert counted[1] - counted[0] >= rows * memory.config.vocab_size * 6
    assert memory_of(parse_config(V3), SHORT_STEPS).graph_bytes(StageRole.LAST, in_place) == 0


def test_attention_in_place_leaves_room_for_more_tokens() -> None:
    in_place, plain = (
        gpu_plan(24 * GIB, device).num_kv_tokens for device in (DeviceKind.GPU_IN_PLACE, DeviceKind.GPU)
    )
    assert in_place > 1.2 * plain


def test_a_gpu_that_is_too_small_is_explained_with_its_buffers() -> None:
    with pytest.raises(PlanImpossible, match=r" activations \+ \S+ MiB buffers and workspaces \+ .* KV"):
        gpu_plan(8 * GIB, DeviceKind.GPU_IN_PLACE)


def test_a_host_has_neither_buffers_nor_workspaces() -> None:
    plan = make_plan(
        llama(), DType.F32, workers(GIB), limits=replace(SHORT_STEPS, max_sequence_tokens=64), block_size=4
    )
    (stage,) = plan.stages
    assert stage.buffer_bytes == stage.overhead_bytes == stage.pinned_bytes == 0
