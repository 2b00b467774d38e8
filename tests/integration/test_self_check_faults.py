"""A self-check finds and locates serving faults, with every kind of kernels."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from checkpoint import Checkpoint, DType
from coordinator.recovery.self_check_verdict import CheckOutcome
from stage_worker.model.kernels import unavailable_because
from stage_worker.sampling import sampler
from tests.checked_pipeline import CheckedPipeline
from tests.checkpoints import make_checkpoint
from tests.integration.planted_faults import FAULTS, Plant, positions_are_off_by_one_in_decodes

LAYERS = (2, 2, 2)
KERNELS = {
    "float32": (DType.F32, 16),
    "bfloat16 in torch": (DType.BF16, 16),
    "bfloat16 compiled": (DType.BF16, 32),
}
FAR = {DType.F32: 100, DType.BF16: 2.0}
"""Minimum ratio of a fault's deviation to the allowed one, the largest of all stages and phases."""


@pytest.fixture(scope="module", params=KERNELS)
def make_checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    dtype, head_dim = KERNELS[request.param]
    directory = tmp_path_factory.mktemp("checked") / "model"
    make_checkpoint(directory, "llama", num_layers=sum(LAYERS), head_dim=head_dim)
    reason = unavailable_because(Checkpoint.open(directory).config)
    if head_dim == 32 and reason is not None:
        pytest.skip(reason)
    return lambda **changes: CheckedPipeline(directory, LAYERS, dtype, **changes)


@pytest.mark.matrix(1)
def test_a_good_pipeline_passes(make_checked: Any) -> None:
    for block_size in (1, 2, 3, 5, 8, 16):
        verdict = make_checked(block_size=block_size).run()
        assert verdict.outcome is CheckOutcome.PASSED, verdict.text


@pytest.mark.matrix(4, full=24)
@pytest.mark.parametrize("stage", range(len(LAYERS)))
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_any_stage_is_found_there(make_checked: Any, plant: Plant, stage: int) -> None:
    checked = make_checked()
    plant(checked.model(stage))
    verdict = checked.run()
    assert verdict.outcome is CheckOutcome.FAILED
    assert verdict.stage == stage, verdict.text
    assert verdict.share is not None
    # In bfloat16 wrong positions are near rounding: attention depends on differences of positions only.
    is_near = plant is positions_are_off_by_one_in_decodes and checked.plan.dtype is DType.BF16
    assert is_near or verdict.share > FAR[checked.plan.dtype]


def test_wrong_positions_in_all_stages_exceed_the_tolerance(make_checked: Any) -> None:
    checked = make_checked()
    for stage in range(len(LAYERS)):
        positions_are_off_by_one_in_decodes(checked.model(stage))
    verdict = checked.run()
    assert verdict.stage == 0
    assert verdict.share is not None
    assert verdict.share > FAR[checked.plan.dtype]


def test_a_wrong_token_after_right_logits_is_found(
    make_checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = make_checked()
    choose = sampler.choose_rows

    def second_best(logits: Tensor, *rest: Any) -> list[int | None]:
        return [int(row.topk(2).indices[1]) for row in logits] if choose(logits, *rest) else []

    monkeypatch.setattr(sampler, "choose_rows", second_best)
    verdict = checked.run()
    assert verdict.outcome is CheckOutcome.FAILED
    assert "was sampled where" in verdict.detail
