"""Published config.json files, names of fields and values as vendors give them, and tiny models of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import perturb

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published_configs.json").read_text()
)
"""By the names of the models; lists of longrope factors have numbers of our own."""

NUM_LAYERS = 4
_LONG_PATTERNS = {"gemma3_text": 6}
"""Layers of families with full attention in every sixth layer only."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "model_max_length": 512,
    "num_attention_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "attn_rotary_emb": 8,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "shared_intermediate_size": 80,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    "sliding_window": 9,
    "sliding_window_size": 9,
    "moe_layer_end_index": NUM_LAYERS - 1,
    "first_k_dense_replace": 1,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "hybrid_override_pattern": "M-*M",
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 20,
    "v_head_dim": 20,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,  # all: rounding decides between scores of few pairs
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "head_dim": 12,
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "torch_dtype": "float32",
    "dtype": "float32",
}
"""Zero, null and missing fields stay as they are."""


def shrunk(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a tiny model in float32 with the fields of `raw`, unquantised."""
    num_layers = _LONG_PATTERNS.get(raw["model_type"], NUM_LAYERS)
    small = {key: _small(key, value, num_layers) for key, value in raw.items()}
    small.pop("quantization_config", None)
    small["num_hidden_layers"] = num_layers
    small["num_key_value_heads"] = _kv_heads(raw)
    if "head_dim" in raw and "attention_head_dim" in raw:
        small["attention_head_dim"] = small["head_dim"]
    if raw["model_type"] == "granitemoehybrid":
        small["layer_types"] = ["mamba", "attention", "mamba", "mamba"]
    if raw.get("head_dim") == raw.get("qk_nope_head_dim"):
        small |= {key: _SIZES["qk_nope_head_dim"] for key in ("head_dim",) if key in raw}
    if isinstance(scaling := small.get("rope_scaling"), dict):
        small["rope_scaling"] = _small_rope(scaling, small)
    if "original_max_position_embeddings" in raw:
        small["original_max_position_embeddings"] = 256
    return small


def _small(key: str, value: Any, num_layers: int) -> Any:
    if key.endswith(("_id", "_ids")):
        return 1 if isinstance(value, int) and value > 127 else [1] if isinstance(value, list) else value
    if isinstance(value, list) and len(value) > num_layers and not key.endswith("multipliers"):
        return value[:num_layers]
    return _SIZES[key] if value and key in _SIZES else value


def _kv_heads(raw: Mapping[str, Any]) -> int:
    if raw["num_key_value_heads"] == raw["num_attention_heads"]:
        return int(_SIZES["num_attention_heads"])
    return min(int(raw["num_key_value_heads"]), 2)


def _small_rope(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """As long lists of factors as a head has pairs, and a length that a test can exceed."""
    pairs = int(16 * config.get("partial_rotary_factor", 1.0)) // 2
    small = {key: value[:pairs] if isinstance(value, list) else value for key, value in scaling.items()}
    length = {"original_max_position_embeddings": 32} if "original_max_position_embeddings" in small else {}
    return small | length


def make_published(directory: Path, raw: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write a checkpoint with random weights for `shrunk`, and that config as it is."""
    directory.mkdir(exist_ok=True)
    path, config = directory / "config.json", shrunk(raw)
    path.write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        read = AutoConfig.from_pretrained(directory)
        read.initializer_range = 0.2
        model: PreTrainedModel = AutoModelForCausalLM.from_config(read)  # type: ignore[no-untyped-call]
        perturb(model)
    model.save_pretrained(directory)
    path.write_text(json.dumps(config))
    return directory
