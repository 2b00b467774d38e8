"""A self-check passes with correct models of every family, and finds wrong tensors, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint import Checkpoint, DType
from coordinator.recovery.self_check_verdict import CheckOutcome
from tests.checked_pipeline import CheckedPipeline, plan_of, reference_of, three_stages
from tests.checkpoints import make_checkpoint
from tests.families import FAMILIES, make_family
from tests.wrong_tensors import (
    CHANGES,
    Change,
    expert_of_zeros,
    query_projection,
    router_in_reverse,
    with_change,
)

LAYERS = (2, 2, 1)
ORDER_OF_LAYERS = (2, 3, 1, 0, 4)
DEEP: dict[str, Any] = {"num_layers": 12, "num_experts": 32, "num_experts_per_tok": 4, "max_window_layers": 6}
"""Nearly every token has a route that rounding decides."""
DEEP_LAYERS = (4, 4, 4)
SENSITIVE: dict[str, Any] = {
    "initializer_range": 0.3,
    "num_layers": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Wide weights that amplify the order of sums in float32."""


@pytest.mark.parametrize("seed", [3, 4])
def test_a_correct_model_with_wide_weights_passes_in_float32(tmp_path: Path, seed: int) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3_5_moe_text", seed=seed, **SENSITIVE)
    verdict = CheckedPipeline(directory, (2, 2, 2), DType.F32, block_size=16).run()
    assert verdict.outcome is CheckOutcome.PASSED, verdict.text


@pytest.mark.matrix(1, full=6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DType)
def test_a_correct_model_of_any_family_passes(tmp_path: Path, family: str, dtype: DType) -> None:
    directory = make_family(tmp_path / "model", family)
    layers = three_stages(Checkpoint.open(directory).config)
    verdict = CheckedPipeline(directory, layers, dtype, block_size=16).run()
    assert verdict.outcome is CheckOutcome.PASSED, verdict.text


@pytest.mark.parametrize(
    ("family", "seed", "change"), [("kimi_linear", 2, router_in_reverse), ("qwen3_moe", 3, query_projection)]
)
def test_a_wrong_tensor_of_a_mixture_is_found_in_bf16(
    tmp_path: Path, family: str, seed: int, change: Change
) -> None:
    """Rounding gives some tokens other experts, whose effect is as large as the fault's."""
    source = make_family(tmp_path / "model", family, seed=seed)
    wrong = with_change(source, tmp_path / "wrong", change, ORDER_OF_LAYERS)
    assert wrong is not None
    reference = reference_of(source, plan_of(LAYERS, DType.BF16, 16))
    for directory, outcome in ((source, CheckOutcome.PASSED), (wrong, CheckOutcome.FAILED)):
        checked = CheckedPipeline(directory, LAYERS, DType.BF16, block_size=16, reference=reference)
        verdict = checked.run()
        assert verdict.outcome is outcome, verdict.text
    assert verdict.stage == 1, verdict.text


@pytest.mark.matrix(1, full=8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("change", [router_in_reverse, query_projection], ids=lambda change: change.__name__)
def test_a_wrong_tensor_of_a_deep_mixture_is_found_in_bf16(tmp_path: Path, change: Change, seed: int) -> None:
    source = make_family(tmp_path / "model", "qwen3_moe", seed=seed, **DEEP)
    wrong = with_change(source, tmp_path / "wrong", change, (4,))
    assert wrong is not None
    reference = reference_of(source, plan_of(DEEP_LAYERS, DType.BF16, 16))
    for directory, outcome in ((source, CheckOutcome.PASSED), (wrong, CheckOutcome.FAILED)):
        checked = CheckedPipeline(directory, DEEP_LAYERS, DType.BF16, block_size=16, reference=reference)
        verdict = checked.run()
        assert verdict.outcome is outcome, verdict.text
    assert verdict.stage == 1, verdict.text


@pytest.mark.matrix(1, full=8)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "qwen3_5_moe_text"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_wrong_tensor_is_found_in_float32(tmp_path: Path, family: str, change: Change) -> None:
    source = make_family(tmp_path / "model", family)
    wrong = with_change(source, tmp_path / "wrong", change, ORDER_OF_LAYERS)
    reference = reference_of(source, plan_of(LAYERS, DType.F32, 16))
    if wrong is None:
        pytest.skip("no layer has the tensor")
    correct = CheckedPipeline(source, LAYERS, DType.F32, block_size=16, reference=reference)
    correct.run()
    checked = CheckedPipeline(wrong, LAYERS, DType.F32, block_size=16, reference=reference)
    verdict = checked.run()
    # No token of the texts may have the first expert.
    is_seen = change is not expert_of_zeros or checked.answers != correct.answers
    assert verdict.is_good is not is_seen, verdict.text
