"""Quantised files and rounded weights: a GPU computes with the values that a CPU computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, WeightFormat
from stage_worker.backends.contract import KernelsUnavailable
from tests.checkpoints import make_checkpoint
from tests.gpt_oss import make_gpt_oss
from tests.quantized import CONFIG, EIGHT_EXPERTS, FORMATS, write_quantized
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_held_loading import HELD
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences

pytestmark = pytest.mark.gpu

MOST_OF_FILES = 1e-4
"""In float32, of the standard deviation of the logits: both unpack the same weights."""
MOST_ROUNDED = {DType.F32: 1e-3, DType.BF16: 0.03, DType.F16: 0.01}
"""Root mean square, of the standard deviation: products with rounded weights in each run dtype."""
STORED = {DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16"}


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_files_give_the_logits_of_a_cpu(form: str, prepared: torch.device, tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", FORMATS[form])
    checkpoint = Checkpoint.open(tmp_path / "model")
    found, expected = logits(checkpoint, prepared), logits(checkpoint, torch.device("cpu"))
    assert float(expected.std()) > 0
    assert float((found - expected).abs().max() / expected.std()) < MOST_OF_FILES


@pytest.mark.parametrize("config", [CONFIG, EIGHT_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("form", sorted(HELD))
def test_weights_as_they_are_stored_give_the_logits_of_a_cpu(
    form: str, config: dict[str, Any], prepared: torch.device, tmp_path: Path
) -> None:
    """Skipped with the reason of a worker without Triton kernels."""
    write_quantized(tmp_path / "model", FORMATS[form], config=config)
    assert_stored(Checkpoint.open(tmp_path / "model"), prepared)


def test_mxfp4_experts_of_gpt_oss_give_the_logits_of_a_cpu(prepared: torch.device, tmp_path: Path) -> None:
    assert_stored(Checkpoint.open(make_gpt_oss(tmp_path)[1]), prepared)


def assert_stored(checkpoint: Checkpoint, prepared: torch.device) -> None:
    try:
        found = logits(checkpoint.with_stored(holds_stored=True), prepared)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    expected = logits(checkpoint, torch.device("cpu"))
    assert float((found - expected).abs().max() / expected.std()) < MOST_OF_FILES


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("weights", list(WeightFormat), ids=lambda weights: weights.value)
def test_rounded_weights_give_the_logits_of_a_cpu(
    weights: WeightFormat, dtype: DType, prepared: torch.device, tmp_path: Path
) -> None:
    """Skipped with the reason of a worker that does not serve the format on this device."""
    directory = make_checkpoint(
        tmp_path / "model", "llama", num_layers=4, dtype=STORED[dtype], hidden_size=128, intermediate_size=256
    )
    checkpoint = Checkpoint.open(directory).with_weights(weights)
    try:
        found = logits(checkpoint, prepared)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    expected = logits(checkpoint, torch.device("cpu"))
    plain = logits(Checkpoint.open(directory), prepared)
    assert rms(found - expected, expected) < MOST_ROUNDED[dtype]
    assert rms(found - plain, expected) > 0, "nothing was rounded"


def logits(checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """Float32 on the CPU, of chunks and decodes through two stages."""
    pipeline = Pipeline(checkpoint, cuts=(1,), device=device)
    sequences = random_sequences([40, 9], checkpoint.config.vocab_size)
    return torch.cat(compute_in_chunks(pipeline, sequences, [7, 11])).float().cpu()


def rms(error: Tensor, expected: Tensor) -> float:
    return float((error / expected.std()).square().mean().sqrt())
