"""Tiny checkpoints of every family, with settings that make each of its fields visible in the logits."""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from checkpoint import Blueprint, Experts, NoMixer, RopeConfig, RopeKind
from checkpoint.architectures import ARCHITECTURES
from checkpoint.blueprint import (
    Activation,
    Attention,
    GroupScore,
    LayerPlan,
    NormKind,
    Placement,
    RouterScore,
)
from checkpoint.multipliers import RowScale
from checkpoint.names import NameTable, Pack, TensorRole
from checkpoint.recurrent import GateNorm
from checkpoint.tensors import role_shapes
from tests.checkpoints import make_checkpoint, make_config

NUM_LAYERS = 5
"""Odd against the patterns of windows and rotations."""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 2.0,
    "beta_slow": 0.125,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.5,
}
_EPS = {"rms_norm_eps": 0.05}
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_WINDOW = {"sliding_window": 9}
_SHORT_YARN = _YARN | {"beta_fast": 0.5, "beta_slow": 0.03125}
"""For 4 pairs."""
_MSCALE = {name: value for name, value in _SHORT_YARN.items() if name != "llama_4_scaling_beta"}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 20,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
_DELTA = {
    "head_dim": 24,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "layer_types": [
        *("linear_attention", "full_attention", "linear_attention", "linear_attention", "linear_attention"),
    ],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
}
_DELTA_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
_MAMBA = {
    "head_dim": 24,
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "hidden_size": 48,
}
_INDEX = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}
"""A choice of a third of the longest sequence."""
_LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    }
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True} | _THETA,
    "mistral": _WINDOW | _THETA,
    "ministral3": _WINDOW | {"rope_parameters": _YARN},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2} | _WINDOW | _THETA,
    "qwen3": {"head_dim": 24} | _THETA,
    "qwen3_moe": {
        "head_dim": 24,
        "use_sliding_window": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "seed": 3,
    }
    | _EXPERTS
    | _WINDOW
    | _THETA,
    "qwen3_next": _DELTA | _DELTA_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_5_text": _DELTA | {"attention_bias": True},
    "qwen3_5_moe_text": _DELTA | _DELTA_EXPERTS,
    "kimi_linear": _LATENT
    | {
        "linear_head_dim": 12,
        "linear_num_heads": 6,
        "linear_conv_kernel_dim": 4,
        "layer_types": _DELTA["layer_types"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        "num_experts": 16,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen4_exp_text": _DELTA
    | _DELTA_EXPERTS
    | {
        "hc_count": 3,
        "hc_lowrank": 20,
        "ple_layer_ids": [1, 4],
        "ple_embed_dim": 32,
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 3,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 3,
        "output_gate_type": "sigmoid",
        "eos_token_id": 2,
        "seed": 8,
    },
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        "num_local_experts": 8,
        "shared_intermediate_size": 80,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [2], "attention_bias": True, "mlp_bias": True} | _THETA,
    "falcon_h1": {key: value for key, value in _MAMBA.items() if key not in ("mamba_expand", "head_dim")}
    | {
        "hidden_size": 96,
        "head_dim": 24,
        "mamba_d_ssm": 144,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.4,
        "ssm_out_multiplier": 0.3,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.3, 0.8],
        "mlp_multipliers": [0.9, 0.6],
    }
    | _THETA,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "mlp", "full_attention", "linear_attention"],
        "hidden_size": 48,
        "head_dim": 24,
        "mamba_num_heads": 6,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 20,
        "use_bias": True,
        "mlp_bias": False,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "layer_norm_epsilon": 0.05,
        "time_step_min": 1e-30,
    },
    "mixtral": {"num_local_experts": 8, "seed": 4} | _WINDOW | _THETA,
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 3, "seed": 4} | _THETA,
    "qwen2_moe": {
        "use_sliding_window": True,
        "max_window_layers": 4,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 80,
    }
    | _EXPERTS
    | _WINDOW
    | _THETA,
    "glm4_moe": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    },
    "deepseek_v2": _LATENT
    | {
        "q_lora_rank": None,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": _MSCALE,
    },
    "deepseek_v3": _LATENT
    | {
        "first_k_dense_replace": 2,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
        "seed": 8,
        "rope_parameters": _MSCALE,
    },
    "deepseek_v32": _LATENT
    | _INDEX
    | {
        "first_k_dense_replace": 2,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "rope_parameters": _MSCALE,
        "seed": 1,
    },
    "glm_moe_dsa": _LATENT
    | _INDEX
    | {
        "n_routed_experts": 16,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full", "full"],
        "seed": 1,
    }
    | _THETA,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "partial_rotary_factor": 1 / 3,
        "q_lora_rank": 40,
        "sliding_window": 9,
        "o_groups": 2,
        "o_lora_rank": 12,
        "layer_types": [
            "sliding_attention",
            *("heavily_compressed_attention", "compressed_sparse_attention") * 2,
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "rope_theta": 1e2,
        "compress_rope_theta": 1e3,
        "index_topk": 5,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "swiglu_limit": 1.5,
        "hc_mult": 3,
        "hc_eps": 0.05,
        "hc_sinkhorn_iters": 1,
        "seed": 15,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        | {"beta_fast": 0.5, "beta_slow": 0.03125},
    },
    "hy_v4": _LATENT
    | _INDEX
    | {
        "n_routed_experts": 16,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full", "full"],
        "attention_bias": True,
        "hc_mult": 3,
        "hc_eps": 0.05,
        "hc_magnitude": 1.5,
        "swiglu_limit": 1.5,
        "seed": 1,
    }
    | _THETA,
    "glm4_moe_lite": _LATENT
    | {
        "n_routed_experts": 16,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    }
    | _THETA,
    "mistral4": _LATENT
    | {
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": _SHORT_YARN | {"partial_rotary_factor": 0.4},
        "head_dim": 20,
    },
    "granitemoe": {
        "num_local_experts": 8,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    }
    | _THETA,
    "ernie4_5_moe": {
        "moe_num_experts": 16,
        "moe_k": 3,
        "moe_intermediate_size": 48,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 2,
        "seed": 6,
    }
    | _THETA,
    "minimax_m2": {
        "num_local_experts": 16,
        "num_experts_per_tok": 3,
        "seed": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_local_experts": 16,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "swiglu_limit": 1.5,
        "seed": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 2.0,
            "beta_slow": 0.125,
            "truncate": False,
        },
    }
    | _WINDOW,
    "smollm3": {"no_rope_layer_interval": 3} | _THETA,
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    }
    | _THETA,
    "seed_oss": {"attention_out_bias": True, "head_dim": 24} | _THETA,
    "arcee": _THETA,
    "nemotron": {"norm_eps": 0.05} | _THETA,
    "starcoder2": {"norm_epsilon": 0.05, "seed": 6} | _WINDOW | _THETA,
    "ernie4_5": {"use_bias": True} | _THETA,
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 3.0, "factor": 1.0, "rope_theta": 1e3}
    },
    "phi3": {
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e3,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 256,
        },
    },
    "glm4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    "olmo2": _THETA,
    "olmo3": _WINDOW | {"rope_parameters": _LOCAL["rope_parameters"]},
    "exaone4": _WINDOW | _THETA,
    "cohere": {"logit_scale": 0.5, "layer_norm_eps": 0.05, "use_qk_norm": True} | _THETA,
    "cohere2": {"logit_scale": 0.5, "layer_norm_eps": 0.05} | _WINDOW | _THETA,
    "gemma2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": False,
    }
    | _WINDOW
    | _THETA,
    "gemma3_text": {
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    }
    | _WINDOW
    | _LOCAL,
    "gemma4_text": {
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    }
    | _WINDOW,
}
FAMILIES["gemma4_text+experts"] = FAMILIES["gemma4_text"] | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "seed": 8,
    "moe_intermediate_size": 48,
}
FAMILIES["nemotron_h+latent"] = FAMILIES["nemotron_h"] | {"moe_latent_size": 40}
FAMILIES["falcon_h1+plain"] = FAMILIES["falcon_h1"] | {"mamba_rms_norm": False}
FAMILIES["granitemoehybrid+dense"] = FAMILIES["granitemoehybrid"] | {
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "mamba_conv_bias": True,
}
"""Settings of a family by its model type; after a plus, what other settings of the same family add."""
MODEL_TYPES = {name: name.partition("+")[0] for name in FAMILIES}
assert set(MODEL_TYPES.values()) == {row.model_type for row in ARCHITECTURES}, "a family without a test"

QUICK_FAMILIES = ("cohere2", "gemma4_text", "deepseek_v3")
"""Those of `make test`: different mixers, norms, placements, rotations, MLPs, factors and shapes of pages."""
BLOCK_KINDS = (
    *QUICK_FAMILIES,
    *(
        "nemotron",
        "olmo3",
        "gemma2",
        "gpt_oss",
        "glm4_moe",
        "gemma4_text+experts",
        "ministral3",
        "qwen2_moe",
        "ernie4_5_moe",
    ),
    *("hunyuan_v1_dense", "phi3", "cohere", "granite", "gemma3_text", "deepseek_v2", "qwen3_next"),
    *(
        "glm_moe_dsa",
        "deepseek_v4",
        "hy_v4",
        "kimi_linear",
        "granitemoehybrid",
        "nemotron_h+latent",
        "qwen3_5_moe_text",
        "qwen4_exp_text",
    ),
    *("falcon_h1", "falcon_h1+plain"),
)
"""Families that have every kind of block between them, see `block_kinds`: those of `make test-full`."""
FAMILIES_A_DAY = 2
"""Others that `make test-full` has, in rotation; `make test-models` has all."""


def block_kinds(blueprint: Blueprint) -> set[str]:
    """What distinguishes layers, ends and tensors of a family: types, choices, and fields that are set."""
    return _marks("", blueprint)


def _marks(path: str, value: Any) -> set[str]:
    if isinstance(value, Enum):
        return {f"{path}: {value.name}"}
    if isinstance(value, tuple | list):
        return set().union(*(_marks(path, item) for item in value if is_dataclass(item)))
    if not is_dataclass(value):
        return set()
    found = {f"{path}: {type(value).__name__}"}
    if isinstance(value, Pack) and len(value.roles) > 1:
        found.add(f"{path}: fused")
    for field in fields(value):
        below, name = getattr(value, field.name), f"{path}.{field.name}"
        is_scalar = isinstance(below, bool | int | float) and not isinstance(below, Enum)
        if is_scalar and field.default is not MISSING and below != field.default:
            found.add(name)
        found |= _marks(name, below)
    return found


def families_of(day: datetime.date) -> list[str]:
    """`BLOCK_KINDS` and `FAMILIES_A_DAY` others, or those that STAGELINE_TEST_FAMILIES names ("all")."""
    given = os.environ.get("STAGELINE_TEST_FAMILIES", "")
    if given:
        return list(FAMILIES) if given == "all" else given.split()
    others = [name for name in FAMILIES if name not in BLOCK_KINDS]
    first = day.toordinal() * FAMILIES_A_DAY
    return [*BLOCK_KINDS, *(others[(first + index) % len(others)] for index in range(FAMILIES_A_DAY))]


def make_family(directory: Path, family: str, **overrides: Any) -> Path:
    """Write a checkpoint with wide weights, perturbed norms and biases, and the family's settings."""
    settings = {"num_layers": NUM_LAYERS, "initializer_range": 0.3, "seed": 3, "pad_token_id": None}
    # A copy: transformers writes into the objects that it is given.
    given = copy.deepcopy(settings | _EPS | FAMILIES[family] | overrides)
    return make_checkpoint(directory, MODEL_TYPES[family], **given)


def config_of(family: str) -> dict[str, Any]:
    """The config.json of `make_family`."""
    settings = copy.deepcopy({"num_layers": NUM_LAYERS, "pad_token_id": None} | _EPS | FAMILIES[family])
    settings.pop("seed", None)
    return make_config(MODEL_TYPES[family], **settings).to_dict() | {"dtype": "float32"}


@dataclass(frozen=True)
class Mutation:
    """A blueprint with one field changed, which the same tensors fit."""

    field: str
    blueprint: Blueprint


_KINDS = {
    NormKind.RMS: NormKind.RMS_OFFSET,
    NormKind.RMS_WIDE: NormKind.RMS_OFFSET,
    NormKind.RMS_OFFSET: NormKind.RMS_WIDE,
    NormKind.LAYER: NormKind.LAYER_OFFSET,
    NormKind.LAYER_OFFSET: NormKind.RMS_OFFSET,
}
_SHAPES = {
    *(
        "hidden_size",
        "vocab_size",
        "tie_word_embeddings",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "qkv_bias",
    ),
    *("o_bias", "has_bias", "width", "is_gated", "placement", "span", "count", "has_choice_bias"),
    *("has_shared_gate", "has_expert_scale", "value_is_key", "has_scale", "has_sinks"),
    *("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "is_split"),
    *("rank", "num_key_heads", "key_dim", "kernel_size", "has_output_gate"),
    *("num_head_groups", "state_size", "has_conv_bias", "has_out_bias", "latent_width"),
    *("group_rank", "ratio", "has_overlap", "num_hashed_tokens"),
    *("size", "heads_per_size", "num_rows", "num_shards"),
}
"""Fields that change names or shapes of tensors: another value is refused when a checkpoint is opened."""
_NOT_COMPUTED = {
    *("model_type", "max_position_embeddings", "dtype", "legal_cuts", "names", "num_draft_layers", "is_wide"),
    *("holds_stored", "num_streams", "scaled_length"),
}
"""Limits and labels, names, what changes memory or rounding only (`holds_stored`, `is_wide`), and what layers
and end must share (`num_streams`).
"""
_ALIKE = (
    (TensorRole.MIXER_NORM, TensorRole.FFN_NORM),
    (TensorRole.MIXER_OUT_NORM, TensorRole.FFN_OUT_NORM),
    (TensorRole.Q_NORM, TensorRole.K_NORM),
    (TensorRole.GATE, TensorRole.UP),
    (TensorRole.DELTA_B, TensorRole.DELTA_A),
    (TensorRole.Q, TensorRole.V),
    (TensorRole.KDA_DECAY_DOWN, TensorRole.KDA_GATE_DOWN),
    (TensorRole.KDA_DECAY_UP, TensorRole.KDA_GATE_UP),
    (TensorRole.CONV_Q, TensorRole.CONV_K),
    (TensorRole.CONV_K, TensorRole.CONV_V),
    (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP),
    (TensorRole.SHARED_GATE, TensorRole.SHARED_UP),
    (TensorRole.SHARED_OUT_NORM, TensorRole.EXPERTS_OUT_NORM),
    (TensorRole.FFN_NORM, TensorRole.EXPERTS_NORM),
    (TensorRole.MIXER_STREAMS, TensorRole.FFN_STREAMS),
    (TensorRole.ENTRY_VALUE, TensorRole.ENTRY_GATE),
    (TensorRole.INDEX_VALUE, TensorRole.INDEX_GATE),
)
"""Roles whose tensors may have one shape."""
_ROPE_KINDS = {
    RopeKind.LINEAR: {"factor"},
    RopeKind.LLAMA3: {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    RopeKind.YARN: {
        *("factor", "original_max_position_embeddings", "beta_fast", "mscale", "mscale_all_dim", "truncate"),
    },
    RopeKind.LONGROPE: {"short_factors", "attention_factor", "is_long"},
    RopeKind.PROPORTIONAL: {"factor"},
}


def mutations(blueprint: Blueprint) -> Iterator[Mutation]:
    """Each field that enters the computation, changed wherever it occurs, and names exchanged."""
    experts = [kind.feed_forward for kind in blueprint.kinds if isinstance(kind.feed_forward, Experts)]
    for path, changed in _variants(blueprint):
        if path.endswith("router.scaling") and any(plan.branch_norm for plan in experts):
            continue  # the norm of the experts' output removes it
        if path.endswith("router.group_score") and all(plan.router.num_groups == 1 for plan in experts):
            continue  # there is one group
        yield Mutation(path, changed)
    shapes: dict[tuple[TensorRole, str], tuple[int, ...]] = {}
    for kind in blueprint.kinds:
        shapes |= role_shapes(blueprint.hidden_size, kind)
    mixer = blueprint.layers[0].mixer
    qk_norm = mixer.qk_norm if isinstance(mixer, Attention) else None
    for pair in _ALIKE:
        if pair[0] is TensorRole.Q_NORM and qk_norm is not None and qk_norm.is_after_rotation:
            continue  # only the product of both weights enters the scores
        packs = [blueprint.names.pack_of(role) for role in pair]
        is_alone = all((role, "weight") in shapes for role in pair) and packs[0].module != packs[1].module
        if is_alone and shapes[pair[0], "weight"] == shapes[pair[1], "weight"]:
            exchanged = (
                Pack(module=packs[1].module, roles=pair[:1]),
                Pack(module=packs[0].module, roles=pair[1:]),
            )
            names = replace(blueprint.names, packs=(*exchanged, *blueprint.names.packs))
            yield Mutation(f"names of {pair[0].value}", replace(blueprint, names=names))


def refused(blueprint: Blueprint) -> Iterator[Mutation]:
    """Each field that changes names or shapes of tensors, changed wherever it occurs."""
    has_parts = any(isinstance(kind.mixer, NoMixer) for kind in blueprint.kinds)
    for path, changed in _reshaped(blueprint):
        if path.startswith("layers.placement") and has_parts:
            continue  # layers of one part have one norm
        yield Mutation(path, changed)


def _reshaped(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        yield from _layers(value, _reshaped)
    elif is_dataclass(value) and not isinstance(value, RopeConfig | NameTable):
        for field in fields(value):
            if field.name in _fixed_fields(value):
                continue
            below = getattr(value, field.name)
            changes = _reshaped(below)
            if field.name in _SHAPES:
                changes = ((str(other), other) for other in _others(below))
            for path, changed in changes:
                yield f"{field.name}.{path}", replace(value, **{field.name: changed})  # type: ignore[type-var]


def _others(value: Any) -> list[Any]:
    if isinstance(value, Enum):
        return [other for other in type(value) if other is not value]
    if value is None:
        return [16]
    return [not value if isinstance(value, bool) else 2 * value]


def _variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Paths of fields below `value`, and `value` with that field changed."""
    if isinstance(value, RopeConfig):
        yield from _ropes(value)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name in (_SHAPES | _NOT_COMPUTED | _fixed_fields(value)):
                continue
            below = getattr(value, field.name)
            changes = _GROUPS.get(field.name, _variants)(below)
            for path, changed in changes:
                yield f"{field.name}.{path}".strip("."), replace(value, **{field.name: changed})  # type: ignore[type-var]
    elif isinstance(value, tuple):
        yield from _layers(value, _variants)
    elif value is not None:
        yield "", _other(value)


def _fixed_fields(value: Any) -> set[str]:
    """Fields that have no other value beside those of others: streams replace residuals, some with norms
    of their own, and a table of hashed tokens has the number of experts of each.
    """
    if isinstance(value, LayerPlan) and value.connection is not None:
        own_norms = {"norm"} if value.placement is Placement.NONE else set()
        return {"placement", "residual_scale", "has_scale"} | own_norms
    is_hashed = isinstance(value, Experts) and value.router.num_hashed_tokens is not None
    return {"per_token"} if is_hashed else set()


_OTHER_NORMS = {GateNorm.BEFORE: GateNorm.AFTER, GateNorm.AFTER: GateNorm.BEFORE}
_GROUPS: dict[str, Callable[[Any], Iterable[tuple[str, Any]]]] = {
    "eps": lambda eps: [("", 1e6 * eps)],
    "norm_eps": lambda eps: [("", 1e6 * eps)] if eps else [],
    "value_norm_eps": lambda eps: [("", 1e6 * eps), ("none", None)] if eps is not None else [],
    # All experts are one group: there are no others to keep.
    "num_groups": lambda groups: [("", groups // 2)] if groups > 1 else [],
    "top_k": lambda count: [("", count + 1), ("none", None)] if count is not None else [],
    "gate_norm": lambda norm: [("", _OTHER_NORMS[norm])] if norm in _OTHER_NORMS else [],
    "row_scales": lambda scales: _each_scale(scales),
    "num_kept_groups": lambda kept: [("", kept - 1)] if kept > 1 else [],
}
"""Changes of fields for which `_other` is no possible value."""


def _each_scale(scales: tuple[RowScale, ...]) -> Iterator[tuple[str, tuple[RowScale, ...]]]:
    for index, scale in enumerate(scales):
        for name in ("weight", "bias"):
            changed = replace(scale, **{name: 1.25 * getattr(scale, name)})
            path = f"{scale.role.name} from {scale.begin}: {name}"
            yield path, (*scales[:index], changed, *scales[index + 1 :])


def _layers(
    layers: tuple[Any, ...], changes: Callable[[Any], Iterator[tuple[str, Any]]]
) -> Iterator[tuple[str, Any]]:
    """A change of all layers: those that lack the field stay as they are."""
    by_path: dict[str, list[Any]] = {}
    for index, layer in enumerate(layers):
        for path, changed in changes(layer):
            by_path.setdefault(path, list(layers))[index] = changed
    for path, changed_layers in by_path.items():
        yield path, tuple(changed_layers)


def _ropes(rope: RopeConfig) -> Iterator[tuple[str, RopeConfig | None]]:
    yield "none", None
    yield "theta", replace(rope, theta=3 * rope.theta)
    yield "is_interleaved", replace(rope, is_interleaved=not rope.is_interleaved)
    if rope.width is not None:
        yield "width", replace(rope, width=rope.width - 2, short_factors=rope.short_factors[:-1])
    for name in _ROPE_KINDS.get(rope.kind, ()):
        if (value := getattr(rope, name)) is not None:
            yield name, replace(rope, **{name: _other_of_rope(value)})


def _other_of_rope(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return tuple(2 * x for x in value) if isinstance(value, tuple) else 2 * value


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case NormKind():
            return _KINDS[value]
        case GroupScore():
            return GroupScore.BEST if value is GroupScore.BEST_TWO else GroupScore.BEST_TWO
        case RouterScore():
            return RouterScore.SIGMOID if value is RouterScore.SOFTMAX else RouterScore.SOFTMAX
        case Activation():
            return Activation.RELU2 if value is not Activation.RELU2 else Activation.GELU
        case int():
            return value + 1
        case float():
            return (4 * value if value < 0.1 else 1.25 * value) or 0.25
        case Enum():
            raise AssertionError(f"no other {value}")
    raise AssertionError(f"no other {value!r}")
