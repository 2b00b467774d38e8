"""Embeddings of n-grams, blocks of an indexer and gated streams in config.json, as in Qwen3.8-Flash-Next."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import Attention, BadConfig, GatedDelta, UnsupportedModel, parse_config
from checkpoint.ngrams import table_rows
from checkpoint.streams import GatedCollapse, GatedConnection
from checkpoint.tensors import layer_tensors
from tests.families import config_of

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "head_dim": 256,
    "heads_per_ngram": 8,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 128,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "make_ngram_vocab_size_divisible_by": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 640,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "ngram_size": 3,
    "ngram_vocab_size_base": 20_000_000,
    "num_attention_heads": 24,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "partial_rotary_factor": 0.25,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 2560,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 640,
    "split_ngram_parts": 128,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}


def test_a_published_config_is_read_completely() -> None:
    config = parse_config(PUBLISHED)
    with_ngrams = [layer for layer, plan in enumerate(config.layers) if plan.ngrams is not None]
    assert with_ngrams == [1]
    ngrams = config.layers[1].ngrams
    assert ngrams is not None
    assert (ngrams.size, ngrams.num_heads, ngrams.head_dim, ngrams.width) == (3, 16, 160, 2560)
    assert (ngrams.num_rows, len(ngrams.shards), len(ngrams.shards[0])) == (320_001_536, 128, 2_500_012)
    assert (ngrams.reach, ngrams.separator, ngrams.channels) == (9, 248044, 10240)
    attention, delta = config.layers[3].mixer, config.layers[0].mixer
    assert isinstance(attention, Attention) and isinstance(delta, GatedDelta)
    assert attention.indexer is not None and delta.has_sigmoid_gate
    indexer = attention.indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.block_size, indexer.top_blocks) == (4, 128, 4, 512)
    assert config.collapse == GatedCollapse(num_streams=4, rank=320, norm_eps=1e-6)
    assert config.layers[0].connection == GatedConnection(num_streams=4, rank=320, norm_eps=1e-6)
    assert config.final_norm is None
    assert len(config.legal_cuts) == 47


def test_names_and_shapes_of_a_layer_are_those_of_the_published_files() -> None:
    shapes = {tensor.name: tensor.shape for tensor in layer_tensors(parse_config(PUBLISHED), 1)}
    embedding, connection = "model.layers.1.ple.ple_embedding.", "model.layers.1.mlp_hyper_connection."
    assert shapes[f"{embedding}ngram_embedding.shard_127.weight"] == (2_500_012, 160)
    assert shapes[f"{embedding}layer_multipliers"] == (3,)
    assert shapes[f"{embedding}ngram_heads_offsets"] == (16,)
    assert shapes["model.layers.1.ple.conv1d.weight"] == (10240, 1, 4)
    assert shapes[f"{connection}block_inject_weight.weight"] == (4, 10240)
    assert shapes[f"{connection}input_mix_weight_up.weight"] == (10240, 320)
    assert not any("layernorm" in name for name in shapes)


def test_the_last_part_of_a_table_is_shorter() -> None:
    ngrams = parse_config(config_of("qwen4_exp_text") | {"split_ngram_parts": 5}).layers[0].ngrams
    assert ngrams is not None
    rows = [len(part) for part in ngrams.shards]
    assert sum(rows) == ngrams.num_rows and rows[:-1] == [rows[0]] * (len(rows) - 1)
    assert ngrams.shards[1].start == rows[0] >= rows[-1] > 0


def test_each_head_of_all_layers_has_another_prime_number_of_rows() -> None:
    """50 and what is prime after it: 53, 59, 61, 67; then 71, 73, 79, 83."""
    assert table_rows(base=50, first_head=0, num_heads=4, multiple=1) == 53 + 59 + 61 + 67
    assert table_rows(base=50, first_head=4, num_heads=4, multiple=1) == 71 + 73 + 79 + 83
    assert table_rows(base=53, first_head=0, num_heads=1, multiple=8) == 56
    assert table_rows(base=1, first_head=0, num_heads=3, multiple=1) == 2 + 3 + 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [2]}, "names layer 2 .*, which has attention"),
        ({"ple_layer_ids": [0]}, "must list layers from 1 to 5"),
        ({"ple_layer_ids": [6]}, "must list layers from 1 to 5"),
        ({"ple_embed_dim": 33}, "'ple_embed_dim' is 33, not a multiple of 8 heads"),
        ({"ngram_size": 1}, "their number must be from 1 to 1024"),
        ({"ngram_size": 32, "heads_per_ngram": 64}, "their number must be from 1 to 1024"),
        ({"ple_conv_kernel_size": 1}, "the minimum is 2"),
        ({"eos_token_id": None}, "'eos_token_id' = None gives no token"),
        ({"eos_token_id": [128]}, r"'eos_token_id' = \[128\] gives no token below vocab_size 128"),
        ({"indexer_n_heads": None}, "'indexer_n_heads' is missing"),
        ({"indexer_kv_heads": 2}, "'indexer_kv_heads' = 2 is not supported"),
        ({"indexer_budget": 25}, "25 tokens, not a multiple of the blocks of 3"),
        ({"indexer_head_dim": 4}, "at least the 6 elements that attention rotates"),
        ({"hc_count": 1}, "'hc_count' = 1 is not supported"),
        ({"output_gate_type": "tanh"}, "'output_gate_type' = 'tanh' is not supported"),
        ({"layer_types": ["sliding_attention"] * 5}, "'sliding_attention' is not supported"),
        ({"ple_embedding_dtype": "float8_e4m3fn"}, "'ple_embedding_dtype' = 'float8_e4m3fn'"),
    ],
)
def test_impossible_and_unknown_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModel, BadConfig), match=message):
        parse_config(config_of("qwen4_exp_text") | changes)


def test_both_names_of_attention_mean_the_same() -> None:
    raw = config_of("qwen4_exp_text")
    assert "indexed_attention" in raw["layer_types"]
    others = ["full_attention" if name == "indexed_attention" else name for name in raw["layer_types"]]
    assert parse_config(raw | {"layer_types": others}) == parse_config(raw)
