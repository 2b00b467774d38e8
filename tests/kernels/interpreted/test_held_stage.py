"""Stages with weights of 4 and 8 bits: logits of the CPU's products, few launches, nothing that waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, WeightFormat
from stage_worker.model import attention_work
from stage_worker.model.kernels import Kernels, ProductMethod, by_triton
from tests.families import make_family
from tests.kernels.interpreted.test_stage import launches_of_a_step, logits

pytestmark = pytest.mark.kernels

METHODS = {
    WeightFormat.INT8: (ProductMethod.TRITON_INT8, ProductMethod.INT8),
    WeightFormat.INT4: (ProductMethod.TRITON_INT4, ProductMethod.INT4),
}
FAMILIES = ("llama", "phi3", "gemma2")


def rounded(directory: Path, family: str, form: WeightFormat) -> tuple[Checkpoint, Kernels]:
    """A checkpoint for `--quantize`, and its kernels on a GPU."""
    checkpoint = Checkpoint.open(make_family(directory / "model", family, intermediate_size=96))
    checkpoint = checkpoint.with_weights(form)
    return checkpoint, replace(by_triton(checkpoint.config), quantized=METHODS[form][0])


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_rounded_weights_equal_those_of_the_cpu(
    family: str, form: WeightFormat, tmp_path: Path
) -> None:
    checkpoint, kernels = rounded(tmp_path, family, form)
    expected = logits(checkpoint, Kernels.of(checkpoint.config, torch.device("cpu"), torch.float32))
    found = logits(checkpoint, kernels)
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
    plain = logits(checkpoint.with_weights(None), None)
    assert float((found - plain).abs().max() / expected.std()) > 1e-3, "not rounded"


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_with_rounded_weights_launches_at_most_ten_kernels(
    family: str, form: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, kernels = rounded(tmp_path, family, form)
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 32)
    counts = launches_of_a_step(checkpoint, monkeypatch, [40, 3], kernels)
    product = "byte_kernel" if form is WeightFormat.INT8 else "nibble_kernel"
    num_layers = checkpoint.config.num_layers
    assert counts[product] == 4 * num_layers
    assert counts["merge_kernel"] == num_layers
    assert counts.total() <= 10 * num_layers, counts
