"""Recurrent states in plans: their number, and their memory by device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from checkpoint import Blueprint, DType, GatedDelta, KimiDelta, Mamba2, NoFeedForward, NoMixer, state_bytes
from checkpoint.blueprint import Latent
from checkpoint.step_graphs import graph_bytes
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import DeviceKind, Plan, PlanImpossible, StepLimits
from coordinator.planner.planner import MIN_STATES, make_plan
from coordinator.planner.stage_memory import StageMemory
from tests.unit.coordinator.planner.small_models import GIB, llama, workers
from wire.ids import StageRole

DELTA = GatedDelta(num_heads=8, num_key_heads=4, key_dim=64, value_dim=64, kernel_size=4, norm_eps=1e-6)
MAMBA = Mamba2(num_heads=8, head_dim=64, num_head_groups=2, state_size=128, kernel_size=4, norm_eps=1e-6)
KIMI = KimiDelta(num_heads=8, head_dim=64, rank=64, kernel_size=4, norm_eps=1e-6)
LIMITS = StepLimits(max_step_tokens=32, max_step_sequences=4, max_sequence_tokens=512)


@pytest.fixture
def config() -> Blueprint:
    """Three recurrent layers, one with attention, twice."""
    base = llama(num_layers=8, max_position_embeddings=512)
    full = base.layers[0]
    recurrent = replace(full, mixer=DELTA)
    return replace(base, layers=(recurrent, recurrent, recurrent, full) * 2)


def test_a_state_has_its_convolution_in_the_run_dtype_and_its_sum_in_float32() -> None:
    assert state_bytes(DELTA.state_parts, DType.BF16) == (2 * 256 + 512) * 3 * 2 + 8 * 64 * 64 * 4
    assert state_bytes(DELTA.state_parts, DType.F32) == (2 * 256 + 512) * 3 * 4 + 8 * 64 * 64 * 4


def test_a_state_space_model_keeps_a_matrix_of_each_head() -> None:
    assert state_bytes(MAMBA.state_parts, DType.BF16) == (512 + 2 * 256) * 3 * 2 + 8 * 64 * 128 * 4


def test_kimi_delta_attention_keeps_three_convolutions_and_a_matrix_of_each_head() -> None:
    assert state_bytes(KIMI.state_parts, DType.BF16) == 3 * 512 * 3 * 2 + 8 * 64 * 64 * 4


def test_a_plan_has_states_for_all_sequences_in_flight_and_as_many_snapshots(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16)
    assert plan.num_states == 2 * 3 * 4
    for stage in plan.stages:
        layers = config.layers[stage.layer_begin : stage.layer_end]
        num_recurrent = sum(isinstance(layer.mixer, GatedDelta) for layer in layers)
        of_states = plan.num_states * num_recurrent * state_bytes(DELTA.state_parts, DType.BF16)
        of_pages = (
            plan.num_blocks
            * 16
            * sum(2 * layer.mixer.kv_size * 2 for layer in layers if not isinstance(layer.mixer, GatedDelta))
        )
        assert stage.kv_bytes == of_states + of_pages
        assert stage.total_bytes <= stage.memory_bytes


def test_states_are_halved_until_the_longest_sequence_fits(config: Blueprint) -> None:
    (needed,) = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16).stages
    roomy = needed.total_bytes
    found = [
        make_plan(config, DType.BF16, workers(roomy - less), limits=LIMITS, block_size=16)
        for less in (0, needed.kv_bytes // 2, needed.kv_bytes * 3 // 4)
    ]
    counts = [plan.num_states for plan in found]
    assert counts == sorted(counts, reverse=True) and counts[0] == 16 > counts[-1] >= MIN_STATES
    assert all(plan.num_kv_tokens >= 512 for plan in found)
    with pytest.raises(PlanImpossible, match=f"and {MIN_STATES} recurrent states"):
        make_plan(config, DType.BF16, workers(roomy - needed.kv_bytes), limits=LIMITS, block_size=16)


MIB = 1 << 20
LONG = replace(LIMITS, max_sequence_tokens=1 << 20)


def shares_of(plan: Plan) -> tuple[int, int]:
    """Bytes of recurrent states and of pages."""
    states = plan.num_states * 6 * state_bytes(DELTA.state_parts, DType.BF16)
    return states, sum(stage.kv_bytes for stage in plan.stages) - states


def test_states_leave_half_of_the_memory_to_blocks_that_cannot_hold_the_longest_sequence(
    config: Blueprint,
) -> None:
    long = replace(config, max_position_embeddings=1 << 20)
    plans = [
        make_plan(long, DType.BF16, workers(size * MIB), limits=LONG, block_size=16)
        for size in (12, 20, 24, 32, 48, 64, 80, 128)
    ]
    counts = [plan.num_states for plan in plans]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 16
    for plan in plans:
        assert plan.num_kv_tokens < LONG.max_sequence_tokens
        states, pages = shares_of(plan)
        assert states <= pages or plan.num_states == MIN_STATES, "states get half of the memory at most"
        if plan.num_states < 16:
            assert 2 * states > pages - states, "with twice as many it would be more"


def test_too_few_states_are_explained_with_numbers(config: Blueprint) -> None:
    long = replace(config, max_position_embeddings=1 << 20)
    roomy = make_plan(long, DType.BF16, workers(128 * MIB), limits=LONG, block_size=16)
    assert (roomy.num_in_flight, roomy.num_states, roomy.states_problem) == (8, 16, "")
    small = make_plan(long, DType.BF16, workers(20 * MIB), limits=LONG, block_size=16)
    assert small.states_problem == (
        f"memory for {small.num_states} recurrent states, 8 sequences are in flight at most: others wait;"
        f" the KV cache holds {small.num_kv_tokens} tokens. Lower --max-step-sequences or --max-model-len, or"
        " give the workers more memory"
    )


def test_a_plan_without_prefix_caching_has_no_states_for_snapshots(config: Blueprint) -> None:
    plan = make_plan(
        config, DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16, prefix_caching=False
    )
    assert plan.num_states == plan.num_in_flight == 3 * 4
    assert plan.states_problem == ""


def test_other_models_have_no_states() -> None:
    config = llama(num_layers=2, max_position_embeddings=512)
    plan = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16)
    assert (plan.num_states, plan.states_problem) == (0, "")


def test_gpus_with_kernels_need_no_copies_of_states(config: Blueprint) -> None:
    """Other devices gather, change and write those of a step, with three products of all pairs in a chunk."""
    memory = StageMemory(config=config, dtype=DType.BF16, limits=LIMITS, block_size=16, num_stages=1)
    gathered, in_place = (
        memory.activation_bytes(StageRole.MIDDLE, 32, device)
        for device in (DeviceKind.GPU, DeviceKind.GPU_IN_PLACE)
    )
    assert gathered - in_place >= 4 * 3 * state_bytes(DELTA.state_parts, DType.BF16) + 3 * 4 * 8 * 32**2
    assert in_place < 4 * state_bytes(DELTA.state_parts, DType.BF16) + (1 << 20)


@pytest.mark.parametrize("device", [DeviceKind.GPU, DeviceKind.GPU_IN_PLACE])
def test_a_plan_for_gpus_has_states_within_their_memory(config: Blueprint, device: DeviceKind) -> None:
    on_gpus = [replace(worker, device=device) for worker in workers(4 * GIB, 4 * GIB)]
    plan = make_plan(config, DType.BF16, on_gpus, limits=LIMITS, block_size=16)
    assert plan.num_states == 2 * 3 * 4
    assert all(stage.total_bytes <= 4 * GIB for stage in plan.stages)


def test_recurrent_layers_are_a_kind_without_keys_and_values(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16)
    delta, attention = layer_kinds(config, plan).kinds
    assert (delta.name, delta.kv_bytes_per_token) == ("Gated DeltaNet + dense", 0)
    assert attention.name == "attention + dense" and attention.kv_bytes_per_token > 0


def test_layers_of_a_mixer_or_a_feed_forward_alone_are_kinds_without_the_other(config: Blueprint) -> None:
    full = config.layers[-1]
    mixing = [replace(layer, feed_forward=NoFeedForward()) for layer in config.layers[2:4]]
    config = replace(config, layers=(*mixing, replace(full, mixer=NoMixer())) * 2, legal_cuts=frozenset((3,)))
    plan = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16)
    names = [(kind.name, kind.kv_bytes_per_token > 0) for kind in layer_kinds(config, plan).kinds]
    assert names == [("Gated DeltaNet", False), ("attention", True), ("dense", False)]
    of_states = plan.num_states * 2 * state_bytes(DELTA.state_parts, DType.BF16)
    of_pages = plan.num_blocks * 16 * 2 * 2 * getattr(full.mixer, "kv_size", 0) * 2
    assert plan.stages[0].kv_bytes == of_states + of_pages


def with_mixer(config: Blueprint, mixer: KimiDelta | Mamba2) -> Blueprint:
    """`config` with other recurrent layers."""
    layers = tuple(
        replace(layer, mixer=mixer) if isinstance(layer.mixer, GatedDelta) else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)


def test_kimi_delta_attention_is_planned_beside_latent_attention(config: Blueprint) -> None:
    """Two kinds of caches: states, and pages of latents."""
    latent = Latent(
        num_heads=4,
        query_rank=None,
        kv_rank=96,
        nope_dim=16,
        rope_dim=32,
        value_dim=16,
        rope=None,
        scale=0.1,
        norm=config.final_norm,
    )
    config = with_mixer(config, KIMI)
    layers = [replace(layer, mixer=latent) if layer.mixer != KIMI else layer for layer in config.layers]
    config = replace(config, layers=tuple(layers))
    plan = make_plan(config, DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16)
    kimi, mla = layer_kinds(config, plan).kinds
    assert (kimi.name, kimi.kv_bytes_per_token) == ("Kimi Delta Attention + dense", 0)
    assert (mla.name, mla.kv_bytes_per_token) == ("latent attention without rotation + dense", 2 * 128)
    for stage in plan.stages:
        kinds = [layer.mixer for layer in config.layers[stage.layer_begin : stage.layer_end]]
        of_states = plan.num_states * kinds.count(KIMI) * state_bytes(KIMI.state_parts, DType.BF16)
        assert stage.kv_bytes == of_states + plan.num_blocks * 16 * kinds.count(latent) * 2 * 128


def test_a_mixer_beside_attention_has_pages_and_states_of_one_layer(config: Blueprint) -> None:
    full = config.layers[-1]
    config = replace(config, layers=(replace(full, beside=MAMBA),) * 8)
    plan = make_plan(config, DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16)
    (kind,) = layer_kinds(config, plan).kinds
    of_pages = 2 * 2 * getattr(full.mixer, "kv_size", 0)
    assert (kind.name, kind.kv_bytes_per_token) == ("attention beside Mamba2 + dense", of_pages)
    assert plan.num_states == 2 * 3 * 4
    for stage in plan.stages:
        of_states = plan.num_states * state_bytes(MAMBA.state_parts, DType.BF16)
        each = of_states + plan.num_blocks * 16 * of_pages
        assert stage.kv_bytes == each * (stage.layer_end - stage.layer_begin)
    alone = make_plan(
        replace(config, layers=(full,) * 8), DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16
    )
    more = plan.stages[0].activation_bytes - alone.stages[0].activation_bytes
    of_chunk, num_tokens = 3 * 4 * 8 * 32 * 32, 32
    of_tokens = more - LIMITS.max_step_sequences * 3 * state_bytes(MAMBA.state_parts, DType.BF16) - of_chunk
    assert of_tokens > num_tokens * 2 * MAMBA.conv_size * DType.BF16.size_bytes


def test_kimi_delta_attention_and_mamba2_beside_attention_are_planned_on_gpus(config: Blueprint) -> None:
    full = config.layers[-1]
    host, gpu = workers(GIB, 4 * GIB)
    on_gpu = replace(gpu, device=DeviceKind.GPU)
    for mixed in (with_mixer(config, KIMI), replace(config, layers=(replace(full, beside=MAMBA),) * 8)):
        plan = make_plan(mixed, DType.BF16, [host, on_gpu], limits=LIMITS, block_size=16)
        assert plan.num_states == 2 * 3 * 4


def test_graphs_count_latents_of_gates_and_what_is_beside_attention(config: Blueprint) -> None:
    full, recurrent = config.layers[-1], with_mixer(config, KIMI).layers[0]
    size = partial(graph_bytes, hidden_size=256, dtype=DType.BF16, max_step_tokens=512, max_step_sequences=4)
    of_mamba = 2 * MAMBA.conv_size + 4 * MAMBA.o_size + 2 * MAMBA.num_heads
    more = size([replace(full, beside=MAMBA)]) - size([full])
    assert more == 512 * 2 * (256 + of_mamba)
    of_delta = 2 * DELTA.conv_size + 4 * DELTA.o_size + 2 * DELTA.num_heads
    of_kimi = 2 * KIMI.conv_size + 4 * KIMI.o_size + 2 * KIMI.num_heads + 2 * 64 + KIMI.q_size
    more = size([recurrent]) - size([config.layers[0]])
    assert more == 512 * 2 * (of_kimi - of_delta)


def test_mamba2_is_a_kind_of_its_own(config: Blueprint) -> None:
    config = with_mixer(config, MAMBA)
    plan = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16)
    mamba, _ = layer_kinds(config, plan).kinds
    assert (mamba.name, mamba.kv_bytes_per_token) == ("Mamba2 + dense", 0)
    assert plan.num_states * 6 * state_bytes(MAMBA.state_parts, DType.BF16) < plan.stages[0].kv_bytes
