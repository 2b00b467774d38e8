"""The families with latent or compressed attention: one row each, as in `checkpoint.architectures`."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import GroupScore, NormKind, RouterScore
from checkpoint.family_rules import (
    Architecture,
    Clamp,
    ExpertRule,
    IndexRule,
    LatentRule,
    NormRule,
    SparseLayers,
    Streams,
)
from checkpoint.names import STACKED_EXPERTS, NameTable, Pack, TensorRole, or_with, renamed
from checkpoint.rope_config import RopeRule

_HY_4_NAMES = or_with(
    replace(
        renamed(
            {TensorRole.OUTPUT_GATE: "self_attn.linear_gate"},
            Pack(module="self_attn", roles=(TensorRole.SINKS,), kind="learnable_sink_param"),
            Pack(module="hc_attn_layer.hc_pre.hc", roles=(TensorRole.MIXER_STREAMS,), has_kind=False),
            Pack(module="hc_mlp_layer.hc_pre.hc", roles=(TensorRole.FFN_STREAMS,), has_kind=False),
            *STACKED_EXPERTS,
        ),
        collapse="hc_head.hc_head_{kind}",
        drafts_module="mtp_layers",
    ),
    Pack(module="mlp.linear_gate", roles=(TensorRole.GATE,)),
    Pack(module="mlp.shared_experts.linear_gate", roles=(TensorRole.SHARED_GATE,)),
    Pack(module="hc_pre.hc_attn_layer.hc", roles=(TensorRole.MIXER_STREAMS,), has_kind=False),
    Pack(module="hc_pre.hc_mlp_layer.hc", roles=(TensorRole.FFN_STREAMS,), has_kind=False),
    collapse="hc_pre.hc_head.hc_head_{kind}",
)
"""Published names; transformers' save_pretrained writes the others, which should restore the first."""
_HY_4_SWITCHES: dict[str, object] = {
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "use_dsa": True,
    "use_mla": True,
}
"""What published configs name, and transformers always computes."""
_HY_4_KEYS = "enable_lm_head_fp32 bitwise_backward_align mtp_loss_factor learnable_sink_init"
"""Of published configs, which change no token but by rounding: training, and the dtype of the head."""
_MISTRAL_4_YARN = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Default of transformers' config class."""
LATENT_KEYS = (
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim attention_bias"
)
ROUTED_KEYS = (
    "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace"
    " n_group topk_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers"
)
_DEEPSEEK_KEYS = "topk_method scoring_func moe_layer_freq"
"""Of published configs beside transformers'."""
_INDEX_KEYS = "index_topk index_n_heads index_head_dim"
LATENT_SIZES: dict[str, object] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3_SIZES = LATENT_SIZES | {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_DEEPSEEK_V32_SIZES = _DEEPSEEK_V3_SIZES | {
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_SPARSE_FIXED: dict[str, object] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
"""transformers rotates pairs that lie side by side, in latent attention of both families with indexers."""
GROUPED_EXPERTS = ExpertRule(
    layers=SparseLayers.AFTER_FIRST,
    count_keys=("n_routed_experts",),
    score=RouterScore.SIGMOID,
    norm_key="norm_topk_prob",
    has_choice_bias=True,
    has_groups=True,
    has_scaling=True,
    is_wide=True,
    shared_count_key="n_shared_experts",
    shared_count=1,
)

_V4_MODULES = {
    TensorRole.Q_DOWN: "attn.wq_a",
    TensorRole.Q_LATENT_NORM: "attn.q_norm",
    TensorRole.Q_UP: "attn.wq_b",
    TensorRole.K: "attn.wkv",
    TensorRole.K_NORM: "attn.kv_norm",
    TensorRole.ENTRY_VALUE: "attn.compressor.wkv",
    TensorRole.ENTRY_GATE: "attn.compressor.wgate",
    TensorRole.ENTRY_BIAS: "attn.compressor",
    TensorRole.ENTRY_NORM: "attn.compressor.norm",
    TensorRole.INDEX_Q: "attn.indexer.wq_b",
    TensorRole.INDEX_WEIGHT: "attn.indexer.weights_proj",
    TensorRole.INDEX_VALUE: "attn.indexer.compressor.wkv",
    TensorRole.INDEX_GATE: "attn.indexer.compressor.wgate",
    TensorRole.INDEX_BIAS: "attn.indexer.compressor",
    TensorRole.INDEX_NORM: "attn.indexer.compressor.norm",
    TensorRole.O_GROUPS: "attn.wo_a",
    TensorRole.O: "attn.wo_b",
    TensorRole.MIXER_NORM: "attn_norm",
    TensorRole.FFN_NORM: "ffn_norm",
    TensorRole.ROUTER: "ffn.gate",
    TensorRole.HASH_TABLE: "ffn.gate",
    TensorRole.EXPERT_GATE: "ffn.experts.{expert}.w1",
    TensorRole.EXPERT_DOWN: "ffn.experts.{expert}.w2",
    TensorRole.EXPERT_UP: "ffn.experts.{expert}.w3",
    TensorRole.SHARED_GATE: "ffn.shared_experts.w1",
    TensorRole.SHARED_DOWN: "ffn.shared_experts.w2",
    TensorRole.SHARED_UP: "ffn.shared_experts.w3",
}
_V4_PACKS = (
    *(Pack(module=module, roles=(role,)) for role, module in _V4_MODULES.items()),
    Pack(module="attn", roles=(TensorRole.SINKS,), kind="attn_sink"),
    Pack(module="hc_attn", roles=(TensorRole.MIXER_STREAMS,), has_kind=False),
    Pack(module="hc_ffn", roles=(TensorRole.FFN_STREAMS,), has_kind=False),
    Pack(module="ffn.gate", roles=(TensorRole.CHOICE_BIAS,), kind="bias"),
)
_V4_PUBLISHED = NameTable(
    prefix="",
    head="head.weight",
    embeddings_module="embed",
    collapse="hc_head_{kind}",
    packs=_V4_PACKS,
    ignored=("mtp.",),
)
_V4_BY_TRANSFORMERS = replace(
    _V4_PUBLISHED,
    prefix="model.",
    embeddings_module="embed_tokens",
    collapse="hc_head.hc_{kind}",
    packs=(Pack(module="attn.norm", roles=(TensorRole.K_NORM,)), *_V4_PACKS),
)
"""As transformers writes them."""
_V4_KEYS = """
    q_lora_rank qk_rope_head_dim partial_rotary_factor sliding_window o_groups o_lora_rank compress_ratios
    compress_rates compress_rate_csa compress_rate_hca compress_rope_theta index_n_heads index_head_dim
    index_topk n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    routed_scaling_factor scoring_func topk_method swiglu_limit mlp_layer_types num_hash_layers
    num_nextn_predict_layers expert_dtype attention_bias mlp_bias hc_mult hc_sinkhorn_iters hc_eps
"""
_V4_DRAFTER_KEYS = """
    dspark_block_size dspark_markov_rank dspark_noise_token_id dspark_target_layer_ids
"""
"""Fields of the drafter beside later weights (V4 Flash 0731, DSpark), whose tensors are ignored, too."""


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


LATENT_ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        title="DeepSeek V2, V2.5",
        keys=_keys(f"{LATENT_KEYS} {ROUTED_KEYS} {_DEEPSEEK_KEYS}"),
        rope=RopeRule(is_interleaved=True),
        latent=LatentRule(),
        experts=replace(
            GROUPED_EXPERTS,
            score=RouterScore.SOFTMAX,
            norm_key=None,
            is_normalised=False,
            has_choice_bias=False,
            has_group_method=True,
            group_score=GroupScore.BEST,
            shared_count=2,
        ),
        defaults=LATENT_SIZES
        | {"n_routed_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0},
        fixed={"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False},
        reasons={"norm_topk_prob": ", as in transformers"},
    ),
    Architecture(
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        title="DeepSeek V3, V3.1, R1; Kimi K2",
        aliases=frozenset({"kimi_k2"}),
        keys=_keys(f"{LATENT_KEYS} {ROUTED_KEYS} {_DEEPSEEK_KEYS} rope_interleave"),
        rope=RopeRule(is_interleaved=True),
        latent=LatentRule(),
        experts=GROUPED_EXPERTS,
        defaults=_DEEPSEEK_V3_SIZES | {"num_nextn_predict_layers": 1},
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    Architecture(
        model_type="deepseek_v32",
        class_name="DeepseekV32ForCausalLM",
        title="DeepSeek V3.2",
        keys=_keys(
            f"{LATENT_KEYS} {ROUTED_KEYS} {_DEEPSEEK_KEYS} {_INDEX_KEYS} rope_interleave mlp_layer_types"
        ),
        rope=RopeRule(is_interleaved=True),
        latent=LatentRule(indexer=IndexRule()),
        experts=replace(GROUPED_EXPERTS, layers=SparseLayers.LISTED_OR_AFTER_FIRST),
        defaults=_DEEPSEEK_V32_SIZES,
        fixed=_SPARSE_FIXED,
    ),
    Architecture(
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        title="GLM-4.7-Flash",
        keys=_keys(f"{LATENT_KEYS} {ROUTED_KEYS} topk_method rope_interleave mlp_layer_types"),
        rope=RopeRule(is_interleaved=True),
        latent=LatentRule(),
        experts=replace(GROUPED_EXPERTS, layers=SparseLayers.LISTED),
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "num_nextn_predict_layers": 1,
        },
        fixed={"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    ),
    Architecture(
        model_type="glm_moe_dsa",
        class_name="GlmMoeDsaForCausalLM",
        title="GLM-5, GLM-5.2",
        keys=_keys(
            f"{LATENT_KEYS} {ROUTED_KEYS} {_DEEPSEEK_KEYS} {_INDEX_KEYS} rope_interleave mlp_layer_types"
            " indexer_types index_topk_freq index_skip_topk_offset index_topk_pattern indexer_rope_interleave"
            " index_share_for_mtp_iteration num_experts"
        ),
        rope=RopeRule(is_interleaved=True),
        latent=LatentRule(indexer=IndexRule(is_interleaved=True, can_share=True)),
        experts=replace(GROUPED_EXPERTS, layers=SparseLayers.LISTED_OR_AFTER_FIRST),
        defaults=_DEEPSEEK_V32_SIZES
        | {
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
        },
        fixed=_SPARSE_FIXED | {"indexer_rope_interleave": True},
        other_keys={"num_experts": "n_routed_experts"},
    ),
    Architecture(
        model_type="hy_v4",
        class_name="HYV4ForCausalLM",
        title="Hy4",
        keys=_keys(
            f"{LATENT_KEYS} {ROUTED_KEYS} {_INDEX_KEYS} {_HY_4_KEYS} {' '.join(_HY_4_SWITCHES)}"
            " mlp_layer_types indexer_types hc_mult hc_eps hc_magnitude swiglu_limit"
        )
        - {"first_k_dense_replace"},
        names=_HY_4_NAMES,
        latent=LatentRule(
            indexer=IndexRule(rotates_end=True, can_share=True, has_eps=True),
            has_sinks=True,
            has_output_gate=True,
            reads_kv_heads=False,
        ),
        streams=Streams.INDEPENDENT,
        experts=replace(GROUPED_EXPERTS, layers=SparseLayers.LISTED, clamp=Clamp.PLAIN),
        defaults=LATENT_SIZES
        | {
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.827,
            "index_topk": 2048,
            "index_n_heads": 16,
            "index_head_dim": 128,
            "index_topk_freq": 4,
            "hc_mult": 4,
            "hc_eps": 1e-6,
            "hc_magnitude": 2.0,
            "swiglu_limit": 10.0,
        },
        fixed=_HY_4_SWITCHES | {"hidden_act": "silu"},
    ),
    Architecture(
        model_type="mistral4",
        class_name="Mistral4ForCausalLM",
        title="Mistral Small 4, Mistral Large 3",
        keys=_keys(f"{LATENT_KEYS} {ROUTED_KEYS} rope_interleave"),
        names=renamed({}, *STACKED_EXPERTS),
        rope=RopeRule(is_interleaved=True, has_query_growth=True, default=_MISTRAL_4_YARN),
        latent=LatentRule(is_head_whole=True),
        experts=replace(GROUPED_EXPERTS, score=RouterScore.SOFTMAX, has_choice_bias=False, is_wide=False),
        defaults={
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 0,
        },
    ),
    Architecture(
        model_type="deepseek_v4",
        class_name="DeepseekV4ForCausalLM",
        title="DeepSeek V4 Flash, V4 Pro",
        keys=frozenset((_V4_KEYS + _V4_DRAFTER_KEYS).split()),
        names=replace(_V4_PUBLISHED, others=(_V4_BY_TRANSFORMERS,)),
        rope=RopeRule(is_interleaved=True, partial=64 / 512),
        norms=NormRule(kind=NormKind.RMS_WIDE),
        is_compressed=True,
        streams=Streams.BALANCED,
        experts=ExpertRule(
            count_keys=("n_routed_experts",),
            score=RouterScore.SQRT_SOFTPLUS,
            has_choice_bias=True,
            has_scaling=True,
            is_wide=True,
            shared_count_key="n_shared_experts",
            shared_count=1,
            clamp=Clamp.PLAIN,
            clamps_shared=True,
            has_hashes=True,
        ),
        defaults={
            "head_dim": 512,
            "num_key_value_heads": 1,
            "q_lora_rank": 1024,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "num_nextn_predict_layers": 1,
        },
        fixed={
            "num_key_value_heads": 1,
            "hidden_act": "silu",
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
)
