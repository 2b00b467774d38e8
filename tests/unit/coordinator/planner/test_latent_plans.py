"""Plans of latent attention: one latent per token and layer, whatever the number of heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import INDEX_ELEMENTS, Blueprint, DType, Latent, ScaledDType, parse_config
from checkpoint.step_sizes import CHOICE_SCORES, EXPANDED_ELEMENTS
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import DeviceKind, format_ranges
from coordinator.planner.planner import make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.checkpoint.test_latent_config import GLM_5, HY_4, V3, V32
from tests.unit.coordinator.planner.small_models import GIB, USUAL_STEPS, workers
from wire.ids import StageRole
from wire.staging import NUM_HOP_SLOTS, NUM_SLOTS


@pytest.fixture(scope="module")
def config() -> Blueprint:
    return parse_config(V3)


def test_deepseek_v3_has_two_kinds_of_layers_with_576_numbers_a_token(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(*[256 * GIB] * 8), limits=USUAL_STEPS, block_size=16)
    found = layer_kinds(config, plan)
    assert [(kind.name, format_ranges(kind.layers)) for kind in found.kinds] == [
        ("latent attention + dense", "0-2"),
        ("latent attention + 8 of 256 experts + shared expert", "3-60"),
    ]
    assert [kind.kv_bytes_per_token for kind in found.kinds] == [576 * 2] * 2
    dense, sparse = found.kinds
    assert sparse.weight_bytes / dense.weight_bytes == pytest.approx(20, abs=1)
    assert sum(stage.weight_bytes for stage in plan.stages) / 2 == pytest.approx(671e9, rel=1e-3)
    num_tokens = plan.num_blocks * 16
    assert [stage.kv_bytes for stage in plan.stages] == [
        stage.num_layers * num_tokens * 576 * 2 for stage in plan.stages
    ]


@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_a_row_of_8_bits_has_one_scale(config: Blueprint, kv_dtype: ScaledDType) -> None:
    plan = make_plan(
        config,
        DType.BF16,
        workers(*[256 * GIB] * 8),
        limits=USUAL_STEPS,
        block_size=16,
        kv_dtype=kv_dtype,
    )
    assert plan.stages[1].kv_bytes == plan.stages[1].num_layers * plan.num_blocks * 16 * (576 + 4)
    assert {kind.kv_bytes_per_token for kind in layer_kinds(config, plan).kinds} == {576 + 4}


def test_keys_and_values_that_are_expanded_at_once_are_counted(config: Blueprint) -> None:
    """A prompt of 64 k tokens expands one head at a time, which a wider value makes larger."""
    num_keys, more = 65_536, 128
    assert num_keys * (192 + 128) > EXPANDED_ELEMENTS
    memory = StageMemory(
        config=config,
        dtype=DType.BF16,
        limits=replace(USUAL_STEPS, max_sequence_tokens=num_keys),
        block_size=16,
        num_stages=8,
    )
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Latent)
    wider = replace(mixer, value_dim=mixer.value_dim + more)
    layers = tuple(replace(layer, mixer=wider) for layer in config.layers)
    sizes = [
        one.activation_bytes(StageRole.MIDDLE, num_keys // 16)
        for one in (memory, replace(memory, config=replace(config, layers=layers)))
    ]
    of_tokens = USUAL_STEPS.max_step_tokens * 2 * mixer.num_heads * more * 2
    assert sizes[1] - sizes[0] == of_tokens + num_keys * more * (3 * 2 + 4)


def test_keys_of_indexers_are_counted_in_the_run_dtype_of_the_layers_that_have_one() -> None:
    """GLM-5.2: every fourth layer chooses for those after it, and no stage begins between them."""
    config = parse_config(GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    for kv_dtype, row in ((None, 576 * 2), (ScaledDType.F8_E4M3, 576 + 4)):
        plan = make_plan(
            config,
            DType.BF16,
            workers(*[256 * GIB] * 8),
            limits=USUAL_STEPS,
            block_size=16,
            kv_dtype=kv_dtype,
        )
        found = layer_kinds(config, plan)
        names = "latent attention to 2048 indexed tokens", "latent attention to 2048 earlier tokens"
        experts = " + 8 of 256 experts + shared expert"
        assert [(kind.name, kind.kv_bytes_per_token) for kind in found.kinds] == [
            (f"{names[0]} + dense", row + 256),
            (f"{names[1]}{experts}", row),
            (f"{names[0]}{experts}", row + 256),
        ]
        assert {stage.layer_begin for stage in plan.stages} <= {0, *config.legal_cuts}
        assert len(plan.stages) == 8
        own = [layer for layer in range(78) if config.layers[layer].mixer.index_width]
        for stage in plan.stages:
            of_indexers = sum(stage.layer_begin <= layer < stage.layer_end for layer in own) * 256
            per_token = stage.num_layers * row + of_indexers
            assert stage.kv_bytes == plan.num_blocks * 16 * per_token


def test_the_choice_is_counted_where_sequences_may_be_longer_than_it() -> None:
    config = parse_config(V32)
    sizes = []
    for num_tokens in (2048, 2064):
        memory = StageMemory(
            config=config,
            dtype=DType.BF16,
            limits=replace(USUAL_STEPS, max_sequence_tokens=num_tokens),
            block_size=16,
            num_stages=8,
        )
        sizes.append(memory.activation_bytes(StageRole.MIDDLE, 1000))
    scores = INDEX_ELEMENTS * 4
    choice = USUAL_STEPS.max_step_tokens * 2048 * 4
    assert sizes[1] - sizes[0] > scores + choice


def test_kernels_of_gpus_gather_no_more_than_a_choice() -> None:
    """Of 160 K tokens, a GPU holds scores of a group of queries; torch's operators gather all sequences."""
    config = parse_config(V32)
    found = {}
    for dtype in (DType.BF16, DType.F32):
        memory = StageMemory(
            config=config,
            dtype=dtype,
            limits=replace(USUAL_STEPS, max_sequence_tokens=163_840),
            block_size=16,
            num_stages=8,
        )
        found[dtype] = [
            memory.activation_bytes(StageRole.MIDDLE, num_blocks, DeviceKind.GPU_IN_PLACE)
            for num_blocks in (128, 129, 10_240, 40_960)
        ]
    short, longer, longest, many = found[DType.BF16]
    choice = USUAL_STEPS.max_step_tokens * 2048 * 4
    scores = CHOICE_SCORES + 128 * (20 + 5) * 2048
    assert longer - short > choice
    assert choice + scores * 4 < longest - short < choice + scores * 4 + 16 * 1024**2
    assert many == longest
    of_latents = (40_960 - 10_240) * 16 * 576 * 4
    assert found[DType.F32][3] - found[DType.F32][2] > of_latents


def test_hy_4_begins_stages_where_layers_choose_and_hands_on_four_streams() -> None:
    config = parse_config(HY_4)
    plan = make_plan(config, DType.BF16, workers(*[256 * GIB] * 8), limits=USUAL_STEPS, block_size=16)
    assert len(plan.stages) == 8
    assert {stage.layer_begin for stage in plan.stages} <= {0, *config.legal_cuts}
    memory = StageMemory(
        config=config, dtype=DType.BF16, limits=USUAL_STEPS, block_size=16, num_stages=len(plan.stages)
    )
    of_one_stream = replace(
        config, layers=tuple(replace(layer, connection=None) for layer in config.layers), collapse=None
    )
    narrow = replace(memory, config=of_one_stream)
    tokens, width = USUAL_STEPS.max_step_tokens, config.hidden_size
    role, gpu = StageRole.MIDDLE, DeviceKind.GPU
    activations = [one.activation_bytes(role, 1000) for one in (narrow, memory)]
    frames = 2 * 3 * width * 2  # received and sent, three streams more
    assert activations[1] - activations[0] == tokens * (4 * width * (2 * 2 + 3 * 4) + frames)
    buffers = [one.buffer_bytes(role, 1000, gpu) for one in (narrow, memory)]
    assert buffers[1] - buffers[0] == NUM_SLOTS * 2 * tokens * 3 * width * 2
    segments = [one.segment_bytes(role) for one in (narrow, memory)]
    assert segments[1] - segments[0] == NUM_HOP_SLOTS * tokens * 3 * width * 2
    of_layer = 2 * (8 * 4 * width + 8 + 2) * 4  # float32
    assert memory.layer_bytes[5] - narrow.layer_bytes[5] == of_layer
    of_head = (4 * 4 * width + 4 + 1) * 4
    assert memory.outside_bytes(StageRole.LAST) - narrow.outside_bytes(StageRole.LAST) == of_head
    assert memory.outside_bytes(StageRole.FIRST) == narrow.outside_bytes(StageRole.FIRST)


def test_kernels_of_gpus_have_no_copies_of_streams_in_float32() -> None:
    """But two of each in the run dtype, and for each 256 elements 16 sums; 8 weights of a sub-layer."""
    config = parse_config(HY_4)
    of_one_stream = replace(
        config, layers=tuple(replace(layer, connection=None) for layer in config.layers), collapse=None
    )
    tokens, width = USUAL_STEPS.max_step_tokens, config.hidden_size
    found = {}
    for dtype in (DType.BF16, DType.F32):
        sizes = [
            StageMemory(
                config=one, dtype=dtype, limits=USUAL_STEPS, block_size=16, num_stages=8
            ).activation_bytes(StageRole.MIDDLE, 1000, DeviceKind.GPU_IN_PLACE)
            for one in (of_one_stream, config)
        ]
        found[dtype] = sizes[1] - sizes[0]
    frames = 2 * 3 * width  # received and sent, three streams more
    partial = 4 * (4 * width // 256 * 16 + 8)
    assert found[DType.BF16] == tokens * (2 * 4 * width * 2 + partial + frames * 2)
    assert found[DType.F32] == tokens * (4 * width * (2 * 4 + 3 * 4) + frames * 4)  # by torch's operators
