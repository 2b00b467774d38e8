"""Rows of the families with the delta rule, and words that they share with other mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import NormKind, NormSpan, Placement
from checkpoint.family_rules import Architecture, ExpertRule, LatentRule, NormRule, SparseLayers, Streams
from checkpoint.latent_architectures import GROUPED_EXPERTS, LATENT_KEYS, LATENT_SIZES
from checkpoint.names import LLAMA_NAMES, STACKED_EXPERTS, Pack, TensorRole, or_with, renamed
from checkpoint.recurrent import DeltaLayout
from checkpoint.rope_config import RopeRule


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


EXPERT_KEYS = "num_experts num_local_experts num_experts_per_tok"
STEP_KEYS = f"{EXPERT_KEYS} moe_intermediate_size decoder_sparse_step mlp_only_layers"
STEP_EXPERTS = ExpertRule(layers=SparseLayers.STEP, norm_key="norm_topk_prob", is_normalised=False)
SHARED_EXPERT = {
    TensorRole.SHARED_GATE: "mlp.shared_expert.gate_proj",
    TensorRole.SHARED_UP: "mlp.shared_expert.up_proj",
    TensorRole.SHARED_DOWN: "mlp.shared_expert.down_proj",
}
_DELTA_KEYS = (
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads"
    " linear_num_value_heads full_attention_interval attention_bias partial_rotary_factor attn_output_gate"
    " mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"
)
"""The last two describe draft layers, which are not read."""
_DELTA_FIXED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_GATED_FIXED = _DELTA_FIXED | {"output_gate_type": "swish"}
_DELTA_REASONS = {"mamba_ssm_dtype": ": states are summed in float32"}
_DRAFTS = ("mtp.",)
_GROUPED_DELTA = (
    Pack(module="linear_attn.in_proj_qkvz", roles=(TensorRole.DELTA_QKV, TensorRole.DELTA_Z)),
    Pack(module="linear_attn.in_proj_ba", roles=(TensorRole.DELTA_B, TensorRole.DELTA_A)),
)
_DELTA_NORMS = NormRule(kind=NormKind.RMS_OFFSET, qk_span=NormSpan.HEAD)
_STREAM_KEYS = "hc_count hc_lowrank"
_BLOCK_KEYS = "indexer_n_heads indexer_kv_heads indexer_head_dim indexer_budget indexer_compress_ratio"
_NGRAM_KEYS = (
    "ple_layer_ids ple_embed_dim ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base"
    " make_ngram_vocab_size_divisible_by split_ngram_parts seed number_of_conv_states"
)
"""The last two change no token: a seed of the hashes that files have, and states of transformers' cache."""
_STREAMS = {
    TensorRole.MIXER_STREAMS: "attn_hyper_connection",
    TensorRole.FFN_STREAMS: "mlp_hyper_connection",
    TensorRole.INDEX_K_NORM: "self_attn.indexer.k_layernorm",
}

_KIMI_MODULES = {
    TensorRole.STATE_DECAY: "self_attn",
    TensorRole.STATE_DT: "self_attn",
    TensorRole.STATE_NORM: "self_attn.o_norm",
    TensorRole.STATE_OUT: "self_attn.o_proj",
    TensorRole.ROUTER: "block_sparse_moe.gate",
    TensorRole.CHOICE_BIAS: "block_sparse_moe.gate",
    TensorRole.EXPERT_GATE: "block_sparse_moe.experts.{expert}.w1",
    TensorRole.EXPERT_UP: "block_sparse_moe.experts.{expert}.w3",
    TensorRole.EXPERT_DOWN: "block_sparse_moe.experts.{expert}.w2",
    TensorRole.SHARED_GATE: "block_sparse_moe.shared_experts.gate_proj",
    TensorRole.SHARED_UP: "block_sparse_moe.shared_experts.up_proj",
    TensorRole.SHARED_DOWN: "block_sparse_moe.shared_experts.down_proj",
}
_SAVED_MLP = tuple(
    Pack(module=f"block_sparse_moe.{role.value}_proj", roles=(role,))
    for role in (TensorRole.GATE, TensorRole.UP, TensorRole.DOWN)
)
"""transformers writes all feed-forwards so; published checkpoints have `mlp` in layers without experts."""
_KIMI_OTHER_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "linear_attn_config.head_dim": "linear_head_dim",
    "linear_attn_config.num_heads": "linear_num_heads",
    "linear_attn_config.short_conv_kernel_size": "linear_conv_kernel_dim",
    "linear_attn_config.kda_layers": "kda_layers",
    "linear_attn_config.full_attn_layers": "full_attn_layers",
}
_KIMI_KEYS = (
    f"{LATENT_KEYS} {EXPERT_KEYS} moe_intermediate_size n_shared_experts n_group topk_group norm_topk_prob"
    " routed_scaling_factor first_k_dense_replace mlp_layer_types num_nextn_predict_layers linear_head_dim"
    " linear_num_heads linear_conv_kernel_dim linear_attn_config model_max_length moe_renormalize"
    " num_expert_group num_experts_per_token num_shared_experts mla_use_nope moe_router_activation_func"
    " moe_layer_freq use_grouped_topk"
)

DELTA_ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        title="Qwen3-Next",
        keys=_keys(f"{_DELTA_KEYS} {STEP_KEYS} norm_topk_prob shared_expert_intermediate_size"),
        names=replace(renamed(SHARED_EXPERT, *_GROUPED_DELTA), ignored=_DRAFTS),
        rope=RopeRule(partial=0.25),
        head_dim=256,
        has_kv_heads_default=False,
        has_output_gate=True,
        delta=DeltaLayout(is_grouped=True, has_grouped_heads=True),
        norms=_DELTA_NORMS,
        experts=replace(
            STEP_EXPERTS,
            is_normalised=True,
            shared_width_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        fixed=_DELTA_FIXED,
        reasons=_DELTA_REASONS,
    ),
    Architecture(
        model_type="qwen3_5_text",
        class_name="Qwen3_5ForCausalLM",
        title="Qwen3.5, Qwen3.6 (dense)",
        keys=_keys(_DELTA_KEYS),
        names=replace(LLAMA_NAMES, ignored=_DRAFTS),
        rope=RopeRule(partial=0.25, has_sections=True),
        head_dim=256,
        has_kv_heads_default=False,
        has_output_gate=True,
        delta=DeltaLayout(),
        norms=_DELTA_NORMS,
        fixed=_GATED_FIXED,
        reasons=_DELTA_REASONS,
    ),
    Architecture(
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        title="Qwen3.5, Qwen3.6 MoE",
        keys=_keys(
            f"{_DELTA_KEYS} num_experts num_experts_per_tok moe_intermediate_size"
            " shared_expert_intermediate_size"
        ),
        names=or_with(replace(renamed(SHARED_EXPERT), ignored=_DRAFTS), *STACKED_EXPERTS),
        rope=RopeRule(partial=0.25, has_sections=True),
        head_dim=256,
        has_kv_heads_default=False,
        has_output_gate=True,
        delta=DeltaLayout(),
        norms=_DELTA_NORMS,
        experts=ExpertRule(
            count_keys=("num_experts",),
            shared_width_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        fixed=_GATED_FIXED,
        reasons=_DELTA_REASONS,
    ),
    Architecture(
        model_type="kimi_linear",
        class_name="KimiLinearForCausalLM",
        title="Kimi Linear",
        keys=_keys(_KIMI_KEYS),
        names=or_with(renamed(_KIMI_MODULES), *_SAVED_MLP),
        latent=LatentRule(is_rotated=False),
        has_kimi_delta=True,
        experts=replace(
            GROUPED_EXPERTS,
            layers=SparseLayers.LISTED_OR_AFTER_FIRST,
            count_keys=("num_experts", "num_local_experts"),
        ),
        defaults=LATENT_SIZES | {"q_lora_rank": None, "routed_scaling_factor": 2.446},
        fixed={
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "use_grouped_topk": True,
        },
        other_keys=_KIMI_OTHER_KEYS,
    ),
    Architecture(
        model_type="qwen4_exp_text",
        class_name="Qwen4ExpForCausalLM",
        title="Qwen3.8-Flash-Next (Qwen4-Exp)",
        keys=_keys(
            f"{_DELTA_KEYS} {_STREAM_KEYS} {_BLOCK_KEYS} {_NGRAM_KEYS} output_gate_type num_experts"
            " num_experts_per_tok moe_intermediate_size norm_topk_prob shared_expert_intermediate_size"
        ),
        names=or_with(
            replace(
                renamed(SHARED_EXPERT | _STREAMS),
                collapse="hyper_connection_mixer.{kind}",
                ignored=_DRAFTS,
            ),
            *STACKED_EXPERTS,
        ),
        rope=RopeRule(partial=1.0, has_sections=True),
        head_dim=256,
        has_kv_heads_default=False,
        has_output_gate=True,
        has_block_indexer=True,
        streams=Streams.GATED,
        has_ngrams=True,
        delta=DeltaLayout(),
        norms=replace(_DELTA_NORMS, placement=Placement.NONE),
        experts=ExpertRule(
            count_keys=("num_experts",),
            norm_key="norm_topk_prob",
            shared_width_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        fixed=_DELTA_FIXED,
        reasons=_DELTA_REASONS,
    ),
)
