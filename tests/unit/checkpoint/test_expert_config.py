"""Mixtures of experts in config.json: which layers have one, and what is refused, with the numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from checkpoint import BadConfig, Experts, UnsupportedModel, parse_config

COMMON: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "dtype": "float32",
}
QWEN = COMMON | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GLM = COMMON | {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}
ERNIE = COMMON | {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 16,
}
OLMOE = COMMON | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}


def sparse_layers(config: dict[str, Any]) -> list[int]:
    layers = parse_config(config).layers
    return [index for index, layer in enumerate(layers) if isinstance(layer.feed_forward, Experts)]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (OLMOE, [0, 1, 2, 3, 4, 5]),
        (QWEN, [0, 1, 2, 3, 4, 5]),
        (QWEN | {"decoder_sparse_step": 2}, [1, 3, 5]),
        (QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}, [1, 5]),
        (QWEN | {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, []),
        (GLM, [1, 2, 3, 4, 5]),
        (GLM | {"first_k_dense_replace": 0}, [0, 1, 2, 3, 4, 5]),
        (GLM | {"first_k_dense_replace": 4}, [4, 5]),
        (ERNIE, [1, 2, 3, 4, 5]),
        (ERNIE | {"moe_layer_interval": 2, "moe_layer_start_index": 2}, [3, 5]),
        (ERNIE | {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, [0, 1, 2]),
    ],
)
def test_layers_with_experts(config: dict[str, Any], layers: list[int]) -> None:
    assert sparse_layers(config) == layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN | {"mlp_only_layers": [6]}, "'mlp_only_layers' must list layers from 0 to 5, is [6]"),
        (QWEN | {"mlp_only_layers": [True]}, "'mlp_only_layers' must list layers from 0 to 5, is [True]"),
        (QWEN | {"mlp_only_layers": "all"}, "'mlp_only_layers' must list layers from 0 to 5, is 'all'"),
        (QWEN | {"num_experts": None}, "'num_experts' must give one number of experts, got None"),
        (
            QWEN | {"num_local_experts": 4},
            "must give one number of experts, got {'num_local_experts': 4, 'num_experts': 8}",
        ),
        (
            QWEN | {"num_experts": 4096, "num_hidden_layers": 33},
            "33 layers of 4096 experts are more than 131072 experts",
        ),
        (QWEN | {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, the limit is 8 experts"),
        (QWEN | {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        (QWEN | {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (QWEN | {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            GLM | {"n_routed_experts": 10},
            "10 experts in 4 groups (n_group), of which 2 are kept (topk_group)",
        ),
        (GLM | {"topk_group": 5}, "8 experts in 4 groups (n_group), of which 5 are kept (topk_group)"),
        (GLM | {"num_experts_per_tok": 5}, "'num_experts_per_tok' is 5, the limit is 4 experts"),
        (GLM | {"n_group": 8}, "'n_group' is 8: groups have 1 of 8 experts, the minimum is 2"),
        (GLM | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (GLM | {"n_shared_experts": -1}, "n_shared_experts"),
        (GLM | {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (ERNIE | {"moe_layer_interval": 0}, "moe_layer_interval"),
        (ERNIE | {"moe_layer_end_index": -2}, "moe_layer_end_index"),
        (ERNIE | {"moe_k": None}, "moe_k"),
    ],
)
def test_impossible_experts_are_refused_with_the_numbers(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(message)):
        parse_config(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ERNIE | {"use_bias": True}, "'use_bias' = True"),
        (ERNIE | {"moe_norm_min": 0.1}, "'moe_norm_min' = 0.1"),
        (OLMOE | {"clip_qkv": 8.0}, "'clip_qkv' = 8.0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(f"config field {field} is not supported")):
        parse_config(config)


@pytest.mark.parametrize("config", [ERNIE | {"use_bias": False}, OLMOE | {"clip_qkv": None}])
def test_published_values_of_these_fields_are_served(config: dict[str, Any]) -> None:
    key = next(reversed(config))
    assert parse_config(config) == parse_config({name: config[name] for name in config if name != key})
