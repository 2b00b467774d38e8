"""Families without a row are described by config.json and headers, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint import (
    Checkpoint,
    CheckpointError,
    DType,
    MissingTensor,
    UnexpectedTensor,
    WeightFormat,
    kv_bytes_per_token,
    layer_weight_bytes,
    stage_tensor_names,
    stage_weight_bytes,
)
from checkpoint.description import read_config
from checkpoint.headers import TensorEntry, read_headers
from checkpoint.implementation import Implementation
from checkpoint.other_families import has_row, parse_other, refuse_other
from tests.checkpoints import edit_config, make_checkpoint

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("helium") / "model", "helium", num_layers=NUM_LAYERS)


def described(directory: Path, **changes: Any) -> Any:
    """The blueprint of `directory` with other fields."""
    raw = read_config(directory) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    return parse_other(raw, read_headers(directory).tensors)


def test_every_tensor_belongs_to_the_stages_that_need_it(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    assert not config.has_row
    first, middle, last = (
        stage_tensor_names(config, layer, layer + 1, has_embeddings=layer == 0, has_head=layer == 2)
        for layer in range(NUM_LAYERS)
    )
    assert sorted([*first, *middle, *last]) == sorted(checkpoint.tensors)
    assert "model.embed_tokens.weight" in first
    assert {name.split(".")[2] for name in middle} == {"1"}
    assert {"model.norm.weight", "lm_head.weight"} < set(last)


def test_sizes_are_those_of_the_files(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    whole = stage_weight_bytes(config, DType.F32, 0, NUM_LAYERS, has_embeddings=True, has_head=True)
    assert whole == sum(entry.num_bytes for entry in checkpoint.tensors.values())
    layers = sum(layer_weight_bytes(config.hidden_size, layer, DType.BF16) for layer in config.layers)
    in_files = (entry for name, entry in checkpoint.tensors.items() if ".layers." in name)
    assert layers == sum(entry.num_bytes for entry in in_files) // 2
    assert {kv_bytes_per_token(layer.mixer, DType.F32) for layer in config.layers} == {2 * 2 * 16 * 4}


def test_a_tied_matrix_is_read_with_the_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "helium", num_layers=2, tie_word_embeddings=True)
    config = Checkpoint.open(tmp_path).config
    last = stage_tensor_names(config, 1, 2, has_embeddings=False, has_head=True)
    assert config.tie_word_embeddings
    assert "model.embed_tokens.weight" in last


def test_windows_come_from_the_common_fields(directory: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert described(directory, sliding_window=9, layer_types=kinds).layer_windows == (9, None, 9)
    assert described(directory, sliding_window=9).layer_windows == (9, 9, 9)
    off = described(directory, sliding_window=9, use_sliding_window=False)
    assert off.layer_windows == (None, None, None)


def test_missing_sizes_of_heads_come_from_the_headers(directory: Path) -> None:
    found = described(directory, head_dim=..., num_key_value_heads=...).layers[0].mixer
    assert (found.head_dim, found.num_kv_heads) == (16, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' is not supported: it is an encoder-decoder"),
        ({"num_kv_shared_layers": 2}, "'num_kv_shared_layers' is not supported: layers reuse keys"),
        ({"hidden_size_per_layer_input": 8}, "'hidden_size_per_layer_input'"),
        ({"hc_mult": 4}, "'hc_mult' is not supported: several residual streams"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its quantised weights"),
        ({"text_config": {}}, "several modalities"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types\[0\] = 'linear_attention'"),
        ({"architectures": ["HeliumForSequenceClassification"]}, "'HeliumForSequenceClassification'"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "helium", num_layers=NUM_LAYERS)
    edit_config(tmp_path, **change)
    with pytest.raises(CheckpointError, match=named):
        Checkpoint.open(tmp_path)


def entry(*shape: int) -> TensorEntry:
    size = 4
    for length in shape:
        size *= length
    return TensorEntry("model.safetensors", DType.F32, shape, 0, size)


def test_layers_that_are_missing_or_too_many_are_named(directory: Path) -> None:
    raw, tensors = read_config(directory), dict(read_headers(directory).tensors)
    without = {name: place for name, place in tensors.items() if ".layers.1." not in name}
    with pytest.raises(MissingTensor, match="lacks layer 1 of 3"):
        parse_other(raw, without)
    with pytest.raises(UnexpectedTensor, match="has layer 3, the config has 3 layers"):
        parse_other(raw, tensors | {"model.layers.3.mlp.weight": entry(2, 2)})
    with pytest.raises(UnexpectedTensor, match=r"layers model\.layers\.\* and visual\.blocks\.\*"):
        parse_other(raw, tensors | {"visual.blocks.0.weight": entry(2, 2)})


def test_families_with_a_row_keep_their_errors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=2)
    edit_config(tmp_path, some_future_field=1)
    with pytest.raises(CheckpointError, match="'some_future_field' = 1 is not supported for 'llama'"):
        Checkpoint.open(tmp_path)


def test_a_row_decides_what_auto_chooses(directory: Path) -> None:
    other = Checkpoint.open(directory).config
    assert not has_row({"model_type": "helium"})
    assert has_row({"model_type": "llama"})
    assert Implementation.choose("auto", other) is Implementation.TRANSFORMERS
    with pytest.raises(CheckpointError, match="'helium' has no native layers"):
        Implementation.choose("native", other)
    with pytest.raises(ValueError, match="'fast' is not one of auto, native, transformers"):
        Implementation.choose("fast", other)
    refuse_other({"model_type": "helium", "is_encoder_decoder": False, "hc_mult": 0})


def test_weights_are_not_held_in_fewer_bits(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="'helium' has no native layers, which --quantize needs"):
        Checkpoint.open(directory).with_weights(WeightFormat.INT8)
