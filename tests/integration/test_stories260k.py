"""A trained checkpoint, compared with the tokens of an independent C implementation."""

import json

import pytest

from tests.local_pipeline import LocalPipeline
from tests.repository import STORIES260K


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "layers",
    [(5,), (2, 3), (2, 2, 1), (1, 2, 1, 1), (1, 1, 1, 1, 1)],
    ids=lambda layers: f"{len(layers)}-stages",
)
def test_stories260k_generates_the_expected_tokens(layers: tuple[int, ...]) -> None:
    expected = json.loads((STORIES260K / "expected.json").read_text())
    pipeline = LocalPipeline(STORIES260K, layers, num_blocks=40)
    tokens = pipeline.generate([expected["prompt_token_ids"]], max_tokens=256)
    assert tokens == [expected["generated_token_ids"]]
