"""A small trained mixture of experts generates its recorded text, however its layers are cut.

`python -m tools.train_builtin_model.mixture --output tests/models/mixture` trains it again.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.local_pipeline import LocalPipeline

DIRECTORY = Path(__file__).parents[1] / "models" / "mixture"
RECORDED = json.loads((DIRECTORY / "recorded.json").read_text())["recorded"]
NUM_LAYERS = 5


def all_cuts() -> list[tuple[int, ...]]:
    """Every split of the layers into one to five stages."""
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *marks, NUM_LAYERS)))
        for num_stages in range(1, NUM_LAYERS + 1)
        for marks in itertools.combinations(range(1, NUM_LAYERS), num_stages - 1)
    ]


@pytest.mark.matrix(1, full=5)
@pytest.mark.parametrize("layers", all_cuts(), ids=lambda layers: "-".join(map(str, layers)))
def test_the_recorded_text_is_served_at_every_cut(layers: tuple[int, ...]) -> None:
    pipeline = LocalPipeline(DIRECTORY, layers, block_size=8, max_step_tokens=16)
    prompts = [item["prompt_tokens"] for item in RECORDED]
    num_tokens = len(RECORDED[0]["tokens"])
    assert pipeline.generate(prompts, max_tokens=num_tokens) == [item["tokens"] for item in RECORDED]


def test_the_recorded_text_is_a_story() -> None:
    assert all(len(set(item["tokens"])) > 8 for item in RECORDED)
    assert "." in RECORDED[0]["text"] and " the " in RECORDED[0]["text"]
