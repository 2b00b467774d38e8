"""The family with compressed attention: one row, as in `checkpoint.architectures`."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import NormKind, RouterScore
from checkpoint.family_rules import Architecture, Clamp, ExpertRule, NormRule, Streams
from checkpoint.names import NameTable, Pack, TensorRole
from checkpoint.rope_config import RopeRule

_MODULES = {
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
_PACKS = (
    *(Pack(module=module, roles=(role,)) for role, module in _MODULES.items()),
    Pack(module="attn", roles=(TensorRole.SINKS,), kind="attn_sink"),
    Pack(module="hc_attn", roles=(TensorRole.MIXER_STREAMS,), has_kind=False),
    Pack(module="hc_ffn", roles=(TensorRole.FFN_STREAMS,), has_kind=False),
    Pack(module="ffn.gate", roles=(TensorRole.CHOICE_BIAS,), kind="bias"),
)
_PUBLISHED = NameTable(
    prefix="",
    head="head.weight",
    embeddings_module="embed",
    collapse="hc_head_{kind}",
    packs=_PACKS,
    ignored=("mtp.",),
)
_BY_TRANSFORMERS = replace(
    _PUBLISHED,
    prefix="model.",
    embeddings_module="embed_tokens",
    collapse="hc_head.hc_{kind}",
    packs=(Pack(module="attn.norm", roles=(TensorRole.K_NORM,)), *_PACKS),
)
"""As transformers writes them."""
_KEYS = """
    q_lora_rank qk_rope_head_dim partial_rotary_factor sliding_window o_groups o_lora_rank compress_ratios
    compress_rates compress_rate_csa compress_rate_hca compress_rope_theta index_n_heads index_head_dim
    index_topk n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    routed_scaling_factor scoring_func topk_method swiglu_limit mlp_layer_types num_hash_layers
    num_nextn_predict_layers expert_dtype attention_bias mlp_bias hc_mult hc_sinkhorn_iters hc_eps
"""
_DRAFTER_KEYS = """
    dspark_block_size dspark_markov_rank dspark_noise_token_id dspark_target_layer_ids
"""
"""Fields of the drafter beside later weights (V4 Flash 0731, DSpark), whose tensors are ignored, too."""

COMPRESSED_ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="deepseek_v4",
        class_name="DeepseekV4ForCausalLM",
        title="DeepSeek V4 Flash, V4 Pro",
        keys=frozenset((_KEYS + _DRAFTER_KEYS).split()),
        names=replace(_PUBLISHED, others=(_BY_TRANSFORMERS,)),
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
