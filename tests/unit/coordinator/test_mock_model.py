"""A model without weights."""

from __future__ import annotations

import pytest

from checkpoint import DType
from checkpoint.compressed import PageShape
from coordinator.mock_model import mock_fingerprint, parse_mock_model


def test_only_the_number_of_layers_has_to_be_given() -> None:
    config = parse_mock_model("layers=64")
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (64, 1024, 32_000)
    assert config.dtype is DType.BF16
    assert len(config.layer_windows) == 64


def test_every_size_can_be_given_and_is_part_of_the_identity() -> None:
    text = "layers=3,hidden=32,ffn=64,heads=4,kv_heads=2,head_dim=8,vocab=99,max_len=512"
    config = parse_mock_model(text)
    assert (config.page_shape(None), config.max_position_embeddings) == (PageShape(2, 2, 8), 512)
    others = [parse_mock_model(text.replace("=3,", "=4,")), parse_mock_model(text.replace("=99", "=98"))]
    assert len({mock_fingerprint(other_config) for other_config in (config, *others)}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "hidden=3", "layers", "layers=0", "layers=-1", "layers=x", "layers=2,layers=2", "layers=2,depth=3"],
)
def test_invalid_models_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="mock model"):
        parse_mock_model(text)
