"""Long sequences of "longrope": one list of factors for all keys, chosen by the longest sequence served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, DType
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from stage_worker.loading.reference import StreamedModel
from tests.checkpoints import load_reference
from tests.families import FAMILIES, make_family
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import spread_of
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)

ORIGINAL, LONGEST = 32, 512
ROPE = FAMILIES["phi3"]["rope_parameters"] | {
    "original_max_position_embeddings": ORIGINAL,
    "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(
        tmp_path_factory.mktemp("phi3") / "model",
        "phi3",
        num_layers=2,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=ROPE,
    )


def test_long_sequences_in_chunks_equal_transformers(directory: Path) -> None:
    """transformers computes all keys of a long prompt with the long factors."""
    checkpoint = Checkpoint.open(directory).for_length(None)
    assert checkpoint.config.has_long_rope and checkpoint.config.max_position_embeddings == LONGEST
    (sequence,) = random_sequences([70])
    expected = reference_logits(load_reference(directory), sequence.tokens)
    (found,) = compute_in_chunks(Pipeline(checkpoint, cuts=(1,)), [sequence], [7, 5, 1, 11])
    assert spread_of(found, expected) < 1e-4
    model = StreamedModel(checkpoint, DType.F32)
    with torch.inference_mode():
        *_, hidden = model.hidden_states([sequence.tokens])
        logits = torch.cat([block for _, block in model.logits(hidden)], dim=-1)[0]
    assert spread_of(logits, expected) < 1e-4


@pytest.mark.parametrize(
    ("max_model_len", "is_long"), [(None, True), (ORIGINAL + 1, True), (ORIGINAL, False)]
)
def test_the_longest_served_sequence_chooses_the_factors(
    max_model_len: int | None, is_long: bool, directory: Path
) -> None:
    config = CoordinatorConfig(num_stages=1, model=directory, max_sequence_tokens=max_model_len)
    assert open_model(config).config.has_long_rope is is_long


def test_other_models_have_no_long_factors(tmp_path: Path) -> None:
    config = Checkpoint.open(make_family(tmp_path / "m", "gpt_oss", num_layers=2)).config
    assert replace(config, max_position_embeddings=1 << 20).for_length(1 << 20).has_long_rope is False
