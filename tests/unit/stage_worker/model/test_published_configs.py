"""Tiny models with the fields of published configs compute what transformers computes from the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import Checkpoint
from tests.checkpoints import load_reference
from tests.published import PUBLISHED, make_published
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import spread_of, tolerance
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences, reference_logits

_QUICK = {
    "MiniMaxAI/MiniMax-M2",
    "baidu/ERNIE-4.5-0.3B-PT",
    "bigcode/starcoder2-15b",
    "microsoft/Phi-4-mini-instruct",
    "tencent/Hunyuan-7B-Instruct",
    "CohereLabs/c4ai-command-r7b-12-2024",
}
"""Of families whose published fields transformers does not write."""


TEXTS = [name for name, config in PUBLISHED.items() if "text_config" not in config]
"""Models without other modalities, which tests/unit/checkpoint/test_wrappers.py has."""


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # published fields
@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.full) for name in TEXTS]
)
def test_a_model_with_published_fields_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_published(tmp_path, PUBLISHED[name])).for_length(256)
    reference = load_reference(tmp_path)
    sequences = random_sequences([49, 17])
    found = compute_in_chunks(Pipeline(checkpoint, cuts=(2,)), sequences, [13, 7])
    for sequence, logits in zip(sequences, found, strict=True):
        expected = reference_logits(reference, sequence.tokens)
        assert expected.std() > 0.01
        assert spread_of(logits, expected) < tolerance(checkpoint)
