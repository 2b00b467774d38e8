"""Rows of the families with Gated DeltaNet, and words that they share with other mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import NormKind, NormSpan
from checkpoint.family_rules import Architecture, ExpertRule, NormRule, SparseLayers
from checkpoint.names import LLAMA_NAMES, STACKED_EXPERTS, Pack, TensorRole, renamed
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
_DELTA_REASONS = {"mamba_ssm_dtype": ": states are summed in float32"}
_DRAFTS = ("mtp.",)
_GROUPED_DELTA = (
    Pack(module="linear_attn.in_proj_qkvz", roles=(TensorRole.DELTA_QKV, TensorRole.DELTA_Z)),
    Pack(module="linear_attn.in_proj_ba", roles=(TensorRole.DELTA_B, TensorRole.DELTA_A)),
)
_DELTA_NORMS = NormRule(kind=NormKind.RMS_OFFSET, qk_span=NormSpan.HEAD)

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
        fixed=_DELTA_FIXED,
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
        names=replace(renamed(SHARED_EXPERT), other_packs=STACKED_EXPERTS, ignored=_DRAFTS),
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
        fixed=_DELTA_FIXED,
        reasons=_DELTA_REASONS,
    ),
)
