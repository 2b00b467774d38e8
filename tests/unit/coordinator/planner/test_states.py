"""Recurrent states in plans: their number, their memory, and devices that cannot compute them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import Blueprint, DType, GatedDelta, state_bytes
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import DeviceKind, PlanImpossible, StepLimits
from coordinator.planner.planner import MIN_STATES, make_plan
from tests.unit.coordinator.planner.small_models import GIB, llama, workers

DELTA = GatedDelta(num_heads=8, num_key_heads=4, key_dim=64, value_dim=64, kernel_size=4, norm_eps=1e-6)
LIMITS = StepLimits(max_step_tokens=32, max_step_sequences=4, max_sequence_tokens=512)


@pytest.fixture
def config() -> Blueprint:
    """Three recurrent layers, one with attention, twice."""
    base = llama(num_layers=8, max_position_embeddings=512)
    full = base.layers[0]
    recurrent = replace(full, mixer=DELTA)
    return replace(base, layers=(recurrent, recurrent, recurrent, full) * 2)


def test_a_state_has_its_convolution_in_the_run_dtype_and_its_sum_in_float32() -> None:
    assert state_bytes(DELTA, DType.BF16) == (2 * 256 + 512) * 3 * 2 + 8 * 64 * 64 * 4
    assert state_bytes(DELTA, DType.F32) == (2 * 256 + 512) * 3 * 4 + 8 * 64 * 64 * 4


def test_a_plan_has_states_for_all_sequences_in_flight_and_as_many_snapshots(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(GIB, GIB), limits=LIMITS, block_size=16)
    assert plan.num_states == 2 * 3 * 4
    for stage in plan.stages:
        layers = config.layers[stage.layer_begin : stage.layer_end]
        num_recurrent = sum(isinstance(layer.mixer, GatedDelta) for layer in layers)
        of_states = plan.num_states * num_recurrent * state_bytes(DELTA, DType.BF16)
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


def test_other_models_have_no_states() -> None:
    config = llama(num_layers=2, max_position_embeddings=512)
    assert make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16).num_states == 0


def test_workers_with_a_gpu_are_refused_by_name(config: Blueprint) -> None:
    host, gpu = workers(GIB, GIB)
    on_gpu = replace(gpu, device=DeviceKind.GPU)
    with pytest.raises(PlanImpossible, match=f"worker {gpu.name} has a GPU: start it with --device cpu"):
        make_plan(config, DType.BF16, [host, on_gpu], limits=LIMITS, block_size=16)


def test_recurrent_layers_are_a_kind_without_keys_and_values(config: Blueprint) -> None:
    plan = make_plan(config, DType.BF16, workers(GIB), limits=LIMITS, block_size=16)
    delta, attention = layer_kinds(config, plan).kinds
    assert (delta.name, delta.kv_bytes_per_token) == ("Gated DeltaNet + dense", 0)
    assert attention.name == "attention + dense" and attention.kv_bytes_per_token > 0
