"""Layers for speculation that a checkpoint has after its last layer are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import Checkpoint, UnexpectedTensor
from checkpoint.tensors import stage_tensor_names
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from tests.checkpoints import edit_config, make_checkpoint
from tests.families import make_family
from tests.local_pipeline import LocalPipeline

NUM_LAYERS = 3
PROMPTS = [[5, 17, 60, 2, 90], list(range(3, 60, 2))]


@pytest.fixture(params=["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    shape |= {"n_group": 1, "topk_group": 1}
    if request.param == "glm4_moe":
        return make_checkpoint(tmp_path / "model", request.param, num_layers=NUM_LAYERS, **shape)
    return make_family(
        tmp_path / "model", request.param, num_layers=NUM_LAYERS, mlp_layer_types=None, **shape
    )


def add_draft_layer(directory: Path) -> None:
    """A copy of the last layer with NaN everywhere, and two tensors that only draft layers have."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    last, draft = (f"model.layers.{layer}." for layer in (NUM_LAYERS - 1, NUM_LAYERS))
    copies = {name.replace(last, draft): tensor for name, tensor in tensors.items() if last in name}
    copies |= {f"{draft}eh_proj.weight": torch.zeros(64, 128), f"{draft}enorm.weight": torch.zeros(64)}
    drafts = {name: torch.full_like(tensor, torch.nan) for name, tensor in copies.items()}
    save_file(tensors | drafts, file, metadata={"format": "pt"})


def test_draft_layers_of_a_checkpoint_are_not_read(directory: Path) -> None:
    expected = LocalPipeline(directory, (NUM_LAYERS,)).generate(PROMPTS, max_tokens=12)
    plain = Checkpoint.open(directory)
    add_draft_layer(directory)
    edit_config(directory, num_nextn_predict_layers=0)
    with pytest.raises(UnexpectedTensor, match=rf"model\.layers\.{NUM_LAYERS}\."):
        Checkpoint.open(directory)
    edit_config(directory, num_nextn_predict_layers=1)
    config = Checkpoint.open(directory).config
    assert (config.num_layers, config.num_draft_layers) == (NUM_LAYERS, 1)
    read = stage_tensor_names(config, 0, NUM_LAYERS, has_embeddings=True, has_head=True)
    assert set(read) == set(plain.tensors)
    for layers in ((NUM_LAYERS,), (1, 2)):
        assert LocalPipeline(directory, layers).generate(PROMPTS, max_tokens=12) == expected


def test_draft_layers_are_counted_in_the_log(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_before = len(Checkpoint.open(directory).tensors)
    add_draft_layer(directory)
    edit_config(directory, num_nextn_predict_layers=1)
    checkpoint = Checkpoint.open(directory)
    drafts = checkpoint.drafts
    assert drafts.num_tensors == len(checkpoint.tensors) - num_before > 5
    with caplog.at_level("INFO"):
        open_model(CoordinatorConfig(model=directory, num_stages=1))
    assert f"ignored {drafts.num_tensors} tensors of draft layers" in caplog.text
