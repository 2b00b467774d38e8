"""Impossible plans are rejected with the deciding numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import DType
from coordinator.planner.plan import PlanImpossible, StepLimits, WorkerCapacity
from coordinator.planner.planner import MIN_KV_TOKENS, make_plan
from tests.unit.coordinator.planner.small_models import (
    GIB,
    SMALL_STEPS,
    USUAL_STEPS,
    llama,
    llama_8b,
    workers,
)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((4, 4, 4), "layers 4,4,4 sum to 12, the model has 8"),
        ((4, 4), "layers 4,4 are for 2 stages, got 3 workers"),
        ((4, 0, 4), "layers 4,0,4: stage 1 needs at least one layer"),
        ((5, -1, 4), "layers 5,-1,4: stage 1 needs at least one layer"),
        ((), "layers (none) are for 0 stages, got 3 workers"),
    ],
)
def test_given_layers_that_contradict_the_model_are_rejected(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanImpossible) as refused:
        make_plan(
            llama(),
            DType.F32,
            workers(GIB, GIB, GIB),
            limits=SMALL_STEPS,
            block_size=4,
            layers=layers,
        )
    assert str(refused.value) == message


def test_a_stage_that_does_not_fit_is_rejected_with_its_numbers() -> None:
    with pytest.raises(PlanImpossible) as refused:
        make_plan(
            llama_8b(),
            DType.BF16,
            workers(24 * GIB, 24 * GIB, 8 * GIB),
            limits=USUAL_STEPS,
            block_size=16,
            layers=(8, 6, 18),
        )
    assert str(refused.value).startswith("stage 2 on gpu-c: layers 14-31 need 8.3 GiB weights + ")
    assert f"KV for {MIN_KV_TOKENS} tokens, but gpu-c has 8.0 GiB (" in str(refused.value)
    assert "The model needs 15.8 GiB in total on 3 stages, the workers have 56.0 GiB" in str(refused.value)


def test_a_model_that_is_too_large_is_rejected_with_its_numbers() -> None:
    with pytest.raises(PlanImpossible) as refused:
        make_plan(
            llama_8b(),
            DType.BF16,
            workers(4 * GIB, 4 * GIB, 4 * GIB),
            limits=USUAL_STEPS,
            block_size=16,
        )
    assert "stage 2 on gpu-c: layers 1" in str(refused.value)
    assert "but gpu-c has 4.0 GiB" in str(refused.value)
    assert "the workers have 12.0 GiB" in str(refused.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "no workers to plan for"),
        (("a", "b", "a"), "worker name a is used twice"),
        (tuple("abcdefghi"), "9 stages for a model of 8 layers: the minimum is one per stage"),
    ],
)
def test_unusable_workers_are_rejected(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanImpossible) as refused:
        make_plan(
            llama(),
            DType.F32,
            [WorkerCapacity(name=name, memory_bytes=GIB) for name in names],
            limits=SMALL_STEPS,
            block_size=4,
        )
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("layers", "num_workers", "message"),
    [
        ((4, 4), 2, "layers 4,4: no stage can begin with layer 4"),
        ((2, 5, 1), 3, "layers 2,5,1: no stage can begin with layer 7"),
        (
            None,
            4,
            "4 stages for a model that can be cut into 3: a stage can begin with layers 0, 2, 6 only",
        ),
    ],
)
def test_cuts_that_the_model_forbids_are_rejected(
    layers: tuple[int, ...] | None, num_workers: int, message: str
) -> None:
    with pytest.raises(PlanImpossible) as refused:
        make_plan(
            replace(llama(), legal_cuts=frozenset({2, 6})),
            DType.F32,
            workers(*[GIB] * num_workers),
            limits=SMALL_STEPS,
            block_size=4,
            layers=layers,
        )
    assert str(refused.value) == message


def test_less_kv_than_a_block_is_rejected() -> None:
    with pytest.raises(PlanImpossible, match="max_kv_tokens is 3, the minimum is one block of 4 tokens"):
        make_plan(llama(), DType.F32, workers(GIB), limits=SMALL_STEPS, block_size=4, max_kv_tokens=3)


def test_invalid_values_are_rejected() -> None:
    with pytest.raises(ValueError, match="block size is 0 tokens"):
        make_plan(llama(), DType.F32, workers(GIB), limits=SMALL_STEPS, block_size=0)
    with pytest.raises(ValueError, match="max_step_tokens is 0"):
        StepLimits(max_step_tokens=0, max_step_sequences=1, max_sequence_tokens=1)
    with pytest.raises(ValueError, match="memory of worker a is -1 bytes"):
        WorkerCapacity(name="a", memory_bytes=-1)
