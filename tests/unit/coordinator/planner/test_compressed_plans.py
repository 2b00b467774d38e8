"""Plans of compressed attention: entries of all tokens, and keys of a window, in two block groups."""

from __future__ import annotations

import pytest

from checkpoint import (
    Blueprint,
    Compressed,
    DType,
    cached_bytes_per_token,
    entry_bytes_per_block,
    parse_config,
)
from coordinator.planner.choice_memory import group_elements
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import DeviceKind, PlanImpossible, StepLimits, format_ranges
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.checkpoint.test_compressed_config import PLAIN
from tests.unit.coordinator.planner.small_models import GIB, USUAL_STEPS, workers
from wire.ids import StageRole


@pytest.fixture(scope="module")
def config() -> Blueprint:
    return parse_config(PLAIN)


def test_entries_count_for_all_blocks_and_keys_for_those_of_windows(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(*[256 * GIB] * 4), limits=USUAL_STEPS, block_size=16)
    ((of_window, window),) = [(group.num_blocks, group.window) for group in plan.other_groups]
    assert window is not None and window.num_tokens == 128
    assert of_window < plan.num_blocks
    begin = 0
    for stage in plan.stages:
        mixers = [layer.mixer for layer in config.layers[begin : begin + stage.num_layers]]
        begin += stage.num_layers
        keys = sum(cached_bytes_per_token(mixer, DType.BF16, None) for mixer in mixers)
        entries = sum(entry_bytes_per_block(mixer, 16, DType.BF16) for mixer in mixers)
        assert stage.kv_bytes == of_window * 16 * keys + plan.num_blocks * entries
    assert sum(stage.weight_bytes for stage in plan.stages) / 2 == pytest.approx(284e9, rel=0.02)


def test_kinds_say_what_they_keep(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(*[256 * GIB] * 4), limits=USUAL_STEPS, block_size=16)
    kinds = layer_kinds(config, plan).kinds
    experts = "6 of 256 experts + shared expert"
    sparse = f"attention window 128 and entries of 4 tokens, 512 indexed + {experts}, entries 320 B per token"
    heavy = f"attention window 128 and entries of 128 tokens + {experts}, entries 64 B per token"
    assert {kind.group for kind in kinds} == {1}
    names = {kind.name: format_ranges(kind.layers) for kind in kinds}
    assert names[f"attention window 128 + {experts}"] == "0-1"
    assert {sparse, heavy} <= names.keys()
    assert {kind.kv_bytes_per_token for kind in kinds if kind.name == sparse} == {1024 + 5120}


@pytest.mark.parametrize(
    ("block_size", "message"), [(24, "has entries of 128"), (6, "has entries of 4"), (1, None), (256, None)]
)
def test_blocks_and_entries_begin_together(config: Blueprint, block_size: int, message: str | None) -> None:
    sizes = workers(*[256 * GIB] * 4)
    if message is None:
        assert make_plan(config, DType.BF16, sizes, limits=USUAL_STEPS, block_size=block_size).num_blocks
        return
    with pytest.raises(PlanImpossible, match=message):
        make_plan(config, DType.BF16, sizes, limits=USUAL_STEPS, block_size=block_size)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_kernels_of_gpus_take_less_memory_where_they_attend_in_place(config: Blueprint, dtype: DType) -> None:
    """They have no tiles for float32."""
    limits = StepLimits(max_step_tokens=2048, max_step_sequences=64, max_sequence_tokens=1 << 20)
    memory = StageMemory(config=config, dtype=dtype, limits=limits, block_size=16, num_stages=4)
    by_torch, by_kernels = (
        memory.activation_bytes(StageRole.MIDDLE, 1 << 16, device)
        for device in (DeviceKind.GPU, DeviceKind.GPU_IN_PLACE)
    )
    assert by_kernels < by_torch / 2 if dtype is DType.BF16 else by_kernels == by_torch


def test_kernels_of_gpus_count_results_of_parts_and_choices(config: Blueprint) -> None:
    """Of decodes of 1,048,576 tokens: two parts of a window and 512 chosen entries, or 17 of all of 8,192."""
    limits = StepLimits(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=1 << 20)
    memory = StageMemory(config=config, dtype=DType.BF16, limits=limits, block_size=16, num_stages=4)
    of_part = 64 * (512 + 2) * 4
    _, _, sparse, heavy, *_ = (layer.mixer for layer in config.layers)
    assert isinstance(sparse, Compressed) and isinstance(heavy, Compressed)
    longest = 1 << 20
    found = memory._in_place_bytes(heavy, longest, 4 * longest)
    slots, chunks = 8 * 2 * (0 + 4) * 128, min(64 * 3, 2 * 64 * (4 * (longest // 128 + 128) // 4096))
    assert found == slots + (4 * 17 + chunks) * of_part
    group = group_elements(limits, longest // 4, 512)
    choices = 4 * (2 * 64 * 512 + group)
    assert memory._in_place_bytes(sparse, longest, 4 * longest) == 8 * 2 * 20 * 8 + choices + 8 * of_part
