"""Rows of the Gemma families, as in `checkpoint.architectures`."""

from __future__ import annotations

from checkpoint.blueprint import NormKind, NormSpan, Placement
from checkpoint.family_rules import (
    Architecture,
    EmbeddingScale,
    ExpertRule,
    NormRule,
    ScaleRule,
    SparseLayers,
    Windows,
)
from checkpoint.names import Pack, TensorRole, renamed
from checkpoint.rope_config import RopeRule


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


_AROUND = {
    TensorRole.MIXER_OUT_NORM: "post_attention_layernorm",
    TensorRole.FFN_NORM: "pre_feedforward_layernorm",
    TensorRole.FFN_OUT_NORM: "post_feedforward_layernorm",
}
_GATE_UP_ROLES = (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP)
_GEMMA_KEYS = "query_pre_attn_scalar sliding_window sliding_window_pattern hidden_activation" \
    " attention_bias final_logit_softcapping attn_logit_softcapping"  # fmt: skip

GEMMA_ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        title="Gemma 2",
        keys=_keys(_GEMMA_KEYS),
        names=renamed(_AROUND),
        windows=Windows.PATTERN,
        window_pattern=2,
        head_dim=256,
        has_kv_heads_default=False,
        norms=NormRule(kind=NormKind.RMS_OFFSET, placement=Placement.AROUND),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scales=ScaleRule(
            embedding=EmbeddingScale.ROOT, query_scalar=256.0, has_caps=True, score_cap=50.0, logit_cap=30.0
        ),
        is_tied=True,
        defaults={"sliding_window": 4096},
        same={"sliding_window_size": ("sliding_window",)},
    ),
    Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        title="Gemma 3",
        keys=_keys(f"{_GEMMA_KEYS} rope_local_base_freq _sliding_window_pattern"),
        names=renamed(_AROUND),
        windows=Windows.PATTERN,
        window_pattern=6,
        rope=RopeRule(theta=1_000_000.0, local_theta=10_000.0, is_per_type=True),
        head_dim=256,
        has_kv_heads_default=False,
        norms=NormRule(kind=NormKind.RMS_OFFSET, placement=Placement.AROUND, qk_span=NormSpan.HEAD),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scales=ScaleRule(embedding=EmbeddingScale.ROOT, query_scalar=256.0, has_caps=True),
        is_tied=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
    ),
    Architecture(
        model_type="gemma4_text",
        class_name="Gemma4ForCausalLM",
        title="Gemma 4",
        keys=_keys(
            "sliding_window hidden_activation attention_bias final_logit_softcapping attention_k_eq_v"
            " global_head_dim num_global_key_value_heads per_layer_config use_bidirectional_attention"
            " hidden_size_per_layer_input vocab_size_per_layer_input num_kv_shared_layers use_double_wide_mlp"
            " enable_moe_block num_experts top_k_experts moe_intermediate_size"
        ),
        names=renamed(
            _AROUND
            | {
                TensorRole.ROUTER: "router.proj",
                TensorRole.SHARED_GATE: "mlp.gate_proj",
                TensorRole.SHARED_UP: "mlp.up_proj",
                TensorRole.SHARED_DOWN: "mlp.down_proj",
            },
            Pack(
                module="experts.gate_up_proj",
                roles=_GATE_UP_ROLES,
                has_kind=False,
            ),
            Pack(module="experts.down_proj", roles=(TensorRole.EXPERT_DOWN,), has_kind=False),
        ),
        windows=Windows.PATTERN_THEN_FULL,
        window_pattern=6,
        rope=RopeRule(theta=1_000_000.0, local_theta=10_000.0, is_per_type=True, has_proportional=True),
        head_dim=256,
        global_head_dim=512,
        has_layer_scale=True,
        has_kv_heads_default=False,
        norms=NormRule(
            kind=NormKind.RMS_WIDE,
            placement=Placement.AROUND,
            qk_span=NormSpan.HEAD,
            has_value_norm=True,
        ),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scales=ScaleRule(embedding=EmbeddingScale.ROOT, attention=1.0, has_caps=True),
        is_tied=True,
        experts=ExpertRule(
            layers=SparseLayers.SWITCHED,
            count_keys=("num_experts",),
            per_token_key="top_k_experts",
            shared_width_key="intermediate_size",
            has_branches=True,
        ),
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
        },
        fixed={
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "use_bidirectional_attention": "vision",
        },
        reasons={
            "hidden_size_per_layer_input": " (per-layer embeddings, as in E2B and E4B)",
            "num_kv_shared_layers": " (keys and values of other layers, as in E2B and E4B)",
            "use_bidirectional_attention": ", which changes no text",
        },
    ),
)
