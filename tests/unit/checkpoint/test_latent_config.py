"""Latent attention in config.json: published configs, and what is refused with its name."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from checkpoint import (
    BadConfig,
    Blueprint,
    Dense,
    DType,
    Experts,
    Latent,
    Norm,
    TensorEntry,
    UnsupportedModel,
    parse_config,
    stage_tensor_shapes,
)
from checkpoint.blueprint import (
    ClampedSwiGlu,
    GroupScore,
    Indexer,
    NormKind,
    RouterScore,
)
from checkpoint.compressed import PageShape
from checkpoint.description import as_stored
from checkpoint.rope_config import QueryGrowth, RopeKind
from checkpoint.streams import HyperConnection, WeightedCollapse
from checkpoint.tensors import stored_tensors
from checkpoint.verification import draft_prefixes

_REMOTE_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": _REMOTE_CODE,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE: dict[str, Any] = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
del V2_LITE["num_nextn_predict_layers"]
KIMI_K2: dict[str, Any] = V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
V32: dict[str, Any] = {key: value for key, value in V3.items() if key not in ("auto_map", "seq_aux")} | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
    "quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"},
}
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
HY_4: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"],
    "attention_bias": False,
    "bitwise_backward_align": False,
    "dtype": "bfloat16",
    "enable_ihc": True,
    "enable_lm_head_fp32": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "hc_eps": 1e-06,
    "hc_magnitude": 2.0,
    "hc_mult": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_types": ["full", "full", *(["shared"] * 3 + ["full"]) * 19],
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "learnable_sink": True,
    "learnable_sink_init": 0.0,
    "max_position_embeddings": 262144,
    "mlp_layer_types": ["dense"] + ["sparse"] * 77,
    "model_type": "hy_v4",
    "moe_intermediate_size": 2048,
    "mtp_loss_factor": 0.1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "routed_scaling_factor": 2.827,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_dsa": True,
    "use_mla": True,
    "v_head_dim": 256,
    "vocab_size": 120832,
}
MISTRAL_4: dict[str, Any] = {
    "model_type": "mistral4",
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 1048576,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "vocab_size": 131072,
}


def mixer_of(config: Blueprint) -> Latent:
    (mixer,) = {layer.mixer for layer in config.layers}
    assert isinstance(mixer, Latent)
    return mixer


def experts_of(config: Blueprint) -> Experts:
    experts = config.layers[-1].feed_forward
    assert isinstance(experts, Experts)
    return experts


def num_dense(config: Blueprint) -> int:
    return sum(isinstance(layer.feed_forward, Dense) for layer in config.layers)


def test_deepseek_v3() -> None:
    config = parse_config(V3)
    mixer, experts = mixer_of(config), experts_of(config)
    assert (mixer.num_heads, mixer.query_rank, mixer.kv_rank) == (128, 1536, 512)
    assert (mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (128, 64, 128)
    assert config.page_shape(None) == PageShape(1, 1, 576)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert mixer.rope is not None and mixer.rope.kind is RopeKind.YARN and mixer.rope.is_interleaved
    assert (experts.count, experts.per_token, experts.shared) == (256, 8, Dense(width=2048))
    router = experts.router
    assert (router.score, router.num_groups, router.num_kept_groups) == (RouterScore.SIGMOID, 8, 4)
    assert (router.group_score, router.scaling, router.is_normalised) == (GroupScore.BEST_TWO, 2.5, True)
    assert router.has_choice_bias and router.is_wide
    assert (num_dense(config), config.num_draft_layers) == (3, 1)
    assert config.quantization is not None and config.quantization.label == "fp8"


def test_deepseek_v2_lite_projects_queries_at_once_and_chooses_of_all_experts() -> None:
    config = parse_config(V2_LITE)
    mixer, router = mixer_of(config), experts_of(config).router
    assert (mixer.query_rank, mixer.num_heads) == (None, 16)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert experts_of(config).shared == Dense(width=2816)
    assert (router.score, router.num_groups, router.has_choice_bias) == (RouterScore.SOFTMAX, 1, False)
    assert not router.is_normalised


def test_deepseek_v2_keeps_the_groups_with_the_best_expert() -> None:
    whole = {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    router = experts_of(parse_config(V2_LITE | whole | {"topk_method": "group_limited_greedy"})).router
    assert (router.num_groups, router.num_kept_groups, router.scaling) == (8, 3, 16.0)
    assert router.group_score is GroupScore.BEST


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    config = parse_config(KIMI_K2)
    assert config.model_type == "deepseek_v3"
    assert (mixer_of(config).num_heads, experts_of(config).count) == (64, 384)
    assert (num_dense(config), config.num_draft_layers) == (1, 0)


def test_kimi_k25_wraps_it() -> None:
    wrapped = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "text_config": KIMI_K2,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"model_type": "kimi_k25"},
    }
    assert parse_config(wrapped) == parse_config(KIMI_K2)
    as_in_transformers = wrapped | {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "text_config": KIMI_K2 | {"model_type": "deepseek_v3"},
    }
    assert parse_config(as_in_transformers) == parse_config(KIMI_K2)


def test_glm_4_7_flash() -> None:
    config = parse_config(GLM_FLASH)
    mixer = mixer_of(config)
    assert (mixer.num_heads, mixer.query_rank, mixer.value_dim) == (20, 768, 256)
    assert mixer.scale == 256**-0.5
    assert (num_dense(config), config.num_draft_layers) == (1, 1)
    listed = GLM_FLASH | {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}
    assert isinstance(parse_config(listed).layers[0].feed_forward, Experts)
    assert isinstance(parse_config(listed).layers[46].feed_forward, Dense)


def test_deepseek_v32_is_v3_with_an_indexer_in_every_layer() -> None:
    config, v3 = parse_config(V32), parse_config(V3)
    mixer = mixer_of(config)
    assert mixer.indexer == Indexer(
        num_heads=64, head_dim=128, norm=Norm(kind=NormKind.LAYER, eps=1e-6, has_bias=True)
    )
    assert (mixer.top_k, mixer.index_width, mixer.needs_choice) == (2048, 128, False)
    assert replace(mixer, indexer=None, top_k=None) == mixer_of(v3)
    assert experts_of(config) == experts_of(v3)
    assert (num_dense(config), config.num_draft_layers) == (3, 1)
    assert config.page_shape(None) == PageShape(1, 1, 576)
    assert config.legal_cuts == set(range(1, 61))
    listed = V32 | {"layer_types": ["deepseek_sparse_attention"] * 61}
    assert parse_config(listed) == config


def test_weights_of_the_indexers_heads_may_be_plain_in_fp8_checkpoints() -> None:
    prefix = "model.layers.0.self_attn.indexer."
    name = f"{prefix}weights_proj.weight"
    entry = TensorEntry("model.safetensors", DType.BF16, (64, 7168), 0, 64 * 7168 * 2)
    scales = TensorEntry("model.safetensors", DType.F32, (1, 1), 0, 4)
    config = as_stored(parse_config(V32), {name: entry, f"{prefix}wk.weight_scale_inv": scales})
    shapes = stage_tensor_shapes(config, 0, 1, has_embeddings=False, has_head=False)
    assert {name.removeprefix(prefix) for name in stored_tensors(config, shapes) if prefix in name} == {
        *("wq_b.weight", "wq_b.weight_scale_inv", "wk.weight", "wk.weight_scale_inv"),
        *("k_norm.weight", "k_norm.bias", "weights_proj.weight"),
    }


@pytest.mark.parametrize(
    "given",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": [*["full"] * 3, *["shared", "shared", "shared", "full"] * 18, *["shared"] * 3]},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
    ],
)
def test_glm_52_cannot_be_cut_before_a_layer_without_an_indexer(given: dict[str, Any]) -> None:
    config = parse_config(GLM_5 | given)
    own = {0, 1, 2, *range(6, 78, 4)}
    mixers = [layer.mixer for layer in config.layers]
    assert {number for number, mixer in enumerate(mixers) if mixer.index_width} == own
    assert config.legal_cuts == own - {0}
    assert all(isinstance(mixer, Latent) and mixer.top_k == 2048 for mixer in mixers)
    assert config.page_shape(None) == PageShape(1, 1, 576)


def test_glm_5_has_an_indexer_in_every_layer_that_rotates_pairs_side_by_side() -> None:
    config = parse_config(GLM_5)
    mixer = mixer_of(config)
    assert mixer.indexer is not None and mixer.indexer.is_interleaved
    assert (mixer.indexer.num_heads, mixer.value_dim, num_dense(config)) == (32, 256, 3)
    assert config.legal_cuts == set(range(1, 78))


def test_hy_4_has_four_residual_streams_and_choices_that_layers_share() -> None:
    config = parse_config(HY_4)
    connections = {layer.connection for layer in config.layers}
    assert connections == {
        HyperConnection(num_streams=4, norm_eps=1e-5, gate_eps=1e-6, magnitude=2.0, write_eps=1e-6)
    }
    assert config.collapse == WeightedCollapse(num_streams=4, norm_eps=1e-5, gate_eps=1e-6)
    assert config.boundary_width == 4 * 6144
    own = {0, 1, *range(5, 78, 4)}
    mixers = [layer.mixer for layer in config.layers]
    assert {number for number, mixer in enumerate(mixers) if mixer.index_width} == own
    assert config.legal_cuts == own - {0}
    mixer = mixers[0]
    assert isinstance(mixer, Latent) and mixer.has_sinks and mixer.has_output_gate
    assert mixer.rope is not None and not mixer.rope.is_interleaved
    assert mixer.indexer is not None and mixer.indexer.norm.eps == 1e-5
    assert mixer.indexer.rotated(64) == slice(64, None)
    assert experts_of(config).activation == ClampedSwiGlu(alpha=1.0, limit=10.0, offset=0.0)
    assert experts_of(config).shared == Dense(width=2048)
    assert (num_dense(config), config.num_draft_layers) == (1, 1)
    assert draft_prefixes(config) == ("model.mtp_layers.",)


def test_hy_4_shares_choices_of_every_fourth_layer_by_default() -> None:
    lists = ("indexer_types", "mlp_layer_types", "layer_types")
    assert parse_config({key: value for key, value in HY_4.items() if key not in lists}) == parse_config(HY_4)


def test_published_names_of_hy_4_are_read() -> None:
    config = parse_config(HY_4)
    shapes = stage_tensor_shapes(config, 77, 78, has_embeddings=False, has_head=True)
    prefix = "model.layers.77."
    assert {name.removeprefix(prefix) for name in shapes if "_proj" not in name} == {
        *("hc_attn_layer.hc_pre.hc_fn", "hc_attn_layer.hc_pre.hc_base", "hc_attn_layer.hc_pre.hc_scale"),
        *("hc_mlp_layer.hc_pre.hc_fn", "hc_mlp_layer.hc_pre.hc_base", "hc_mlp_layer.hc_pre.hc_scale"),
        *("self_attn.linear_gate.weight", "self_attn.learnable_sink_param"),
        *("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        *("self_attn.indexer.wq_b.weight", "self_attn.indexer.wk.weight"),
        *("self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias"),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *("model.hc_head.hc_head_fn", "model.hc_head.hc_head_base", "model.hc_head.hc_head_scale"),
        *("model.norm.weight", "lm_head.weight"),
    }
    assert shapes[f"{prefix}hc_attn_layer.hc_pre.hc_fn"] == (8, 4 * 6144)
    assert shapes["model.hc_head.hc_head_fn"] == (4, 4 * 6144)
    assert shapes[f"{prefix}mlp.experts.gate_up_proj"] == (256, 4096, 6144)


def test_mistral_4_inside_its_wrapper() -> None:
    config = parse_config({"model_type": "mistral3", "text_config": MISTRAL_4, "vision_config": {}})
    mixer, router = mixer_of(config), experts_of(config).router
    assert (mixer.kv_rank, mixer.nope_dim, mixer.rope_dim, mixer.query_rank) == (256, 64, 64, 1024)
    assert mixer.query_growth == QueryGrowth(beta=0.1, original_length=8192)
    assert mixer.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert mixer.rope is not None and mixer.rope.width is None
    assert (router.score, router.has_choice_bias, router.is_wide) == (RouterScore.SOFTMAX, False, False)
    assert num_dense(config) == 0


def test_pairs_may_lie_half_a_head_apart() -> None:
    rope = mixer_of(parse_config(V3 | {"rope_interleave": False})).rope
    assert rope is not None and not rope.is_interleaved


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V3 | {"head_dim": 96}, "'head_dim' = 96 contradicts qk_nope_head_dim 128 and qk_rope_head_dim 64"),
        (V3 | {"qk_head_dim": 128}, "'qk_head_dim' = 128 contradicts"),
        (MISTRAL_4 | {"head_dim": 96}, "'head_dim' = 96 contradicts"),
        (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (V3 | {"kv_lora_rank": 0}, "kv_lora_rank"),
        (
            MISTRAL_4 | {"rope_parameters": MISTRAL_4["rope_parameters"] | {"partial_rotary_factor": 0.25}},
            "'partial_rotary_factor' rotates 32 elements of a head, expected qk_rope_head_dim 64",
        ),
        (GLM_FLASH | {"mlp_layer_types": ["sparse"] * 46}, "'mlp_layer_types' must list"),
        (GLM_FLASH | {"mlp_layer_types": ["moe"] * 47}, "'mlp_layer_types' must list"),
        (V32 | {"q_lora_rank": None}, "'q_lora_rank' is null, but the indexer projects latents"),
        (V32 | {"index_head_dim": 32}, "'index_head_dim' is 32, the minimum is qk_rope_head_dim 64"),
        (V32 | {"index_topk": 0}, "'index_topk' must be a positive integer"),
        (GLM_5 | {"indexer_types": ["full"] * 77}, "'indexer_types' must say 'full' or 'shared' for 78"),
        (GLM_5 | {"indexer_types": ["shared"] * 78}, "'full' for the first one"),
        (GLM_5 | {"index_topk_pattern": "F" * 77 + "X"}, "'index_topk_pattern' must say"),
        (HY_4 | {"hc_mult": 0}, "'hc_mult' must be a positive integer"),
        (HY_4 | {"hc_mult": 65}, "'hc_mult' is 65, the limit is 64"),
        (HY_4 | {"hc_eps": 0}, "'hc_eps' must be a positive number"),
        (HY_4 | {"hc_magnitude": -1.0}, "'hc_magnitude' must be a positive number"),
        (HY_4 | {"swiglu_limit": 0.0}, "'swiglu_limit' must be a positive number"),
        (HY_4 | {"mlp_layer_types": ["sparse"] * 77}, "'mlp_layer_types' must list"),
    ],
)
def test_contradictory_sizes_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(message)):
        parse_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V3 | {"num_key_value_heads": 64}, "'num_key_value_heads' = 64 is not supported with latent"),
        (V3 | {"scoring_func": "softmax"}, "'scoring_func' = 'softmax'"),
        (V3 | {"topk_method": "greedy"}, "'topk_method' = 'greedy'"),
        (V3 | {"moe_layer_freq": 2}, "'moe_layer_freq' = 2"),
        (V3 | {"index_topk": 2048}, "'index_topk' = 2048"),
        (V2_LITE | {"topk_method": "noaux_tc"}, "'topk_method' = 'noaux_tc'"),
        (V2_LITE | {"norm_topk_prob": True}, "'norm_topk_prob' = True"),
        (V2_LITE | {"rope_interleave": True}, "'rope_interleave' = True"),
        (GLM_FLASH | {"first_k_dense_replace": 2}, "'first_k_dense_replace' = 2"),
        (V32 | {"layer_types": ["full_attention"] * 61}, "'layer_types' = ['full_attention'"),
        (V32 | {"layer_types": ["indexed_attention"] * 60}, "only 61 times 'indexed_attention' is"),
        (V32 | {"indexer_types": ["full"] * 61}, "'indexer_types' = ['full'"),
        (GLM_5 | {"indexer_rope_interleave": False}, "'indexer_rope_interleave' = False"),
        (GLM_5 | {"rope_interleave": False}, "'rope_interleave' = False"),
        (GLM_5 | {"hc_mult": 4}, "'hc_mult' = 4"),
        (HY_4 | {"enable_ihc": False}, "'enable_ihc' = False"),
        (HY_4 | {"gated_mla": False}, "'gated_mla' = False"),
        (HY_4 | {"gating_type": "headwise"}, "'gating_type' = 'headwise'"),
        (HY_4 | {"learnable_sink": False}, "'learnable_sink' = False"),
        (HY_4 | {"hidden_act": "gelu"}, "'hidden_act' = 'gelu'"),
        (HY_4 | {"index_topk_freq": 4}, "'index_topk_freq' = 4"),
        (HY_4 | {"first_k_dense_replace": 1}, "'first_k_dense_replace' = 1"),
        (HY_4 | {"hc_sinkhorn_iters": 20}, "'hc_sinkhorn_iters' = 20"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        parse_config(config)


def test_quantised_stacks_of_experts_are_refused_by_name() -> None:
    """Mistral 4 has the experts of a layer in one tensor."""
    config = parse_config(MISTRAL_4 | {"quantization_config": V3["quantization_config"]})
    shapes = stage_tensor_shapes(config, 0, 1, has_embeddings=False, has_head=False)
    with pytest.raises(
        UnsupportedModel, match=r"mlp\.experts\.gate_up_proj has the matrices of all 128 ex.* fp8"
    ):
        stored_tensors(config, shapes)
