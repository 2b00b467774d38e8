"""Rows of the families with Mamba2."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import NormKind
from checkpoint.family_rules import (
    Architecture,
    BiasKeys,
    EmbeddingScale,
    ExpertRule,
    MambaRule,
    NormRule,
    RecurrentLayers,
    Rotation,
    ScaleRule,
    SparseLayers,
)
from checkpoint.latent_architectures import GROUPED_EXPERTS
from checkpoint.names import Pack, TensorRole, renamed
from checkpoint.rope_config import RopeRule


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


_MAMBA_KEYS = (
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias"
    " mamba_proj_bias mamba_chunk_size time_step_limit time_step_min time_step_max time_step_floor"
    " time_step_rank"
)
"""The chunk size belongs to other kernels: it changes only the order of sums. The last four are for
initialisation.
"""
_STATE_MODULES = {
    TensorRole.STATE_CONV: "mamba.conv1d",
    TensorRole.STATE_DECAY: "mamba",
    TensorRole.STATE_DT: "mamba",
    TensorRole.STATE_NORM: "mamba.norm",
    TensorRole.STATE_OUT: "mamba.out_proj",
}
_GATE_UP = Pack(module="shared_mlp.input_linear", roles=(TensorRole.GATE, TensorRole.UP))
_GRANITE_NAMES = renamed(
    _STATE_MODULES
    | {
        TensorRole.ROUTER: "block_sparse_moe.router.layer",
        TensorRole.EXPERT_DOWN: "block_sparse_moe.output_linear",
        TensorRole.DOWN: "shared_mlp.output_linear",
        TensorRole.SHARED_DOWN: "shared_mlp.output_linear",
    },
    _GATE_UP,
    replace(_GATE_UP, roles=(TensorRole.SHARED_GATE, TensorRole.SHARED_UP)),
    Pack(module="block_sparse_moe.input_linear", roles=(TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP)),
)
"""The MLP of layers without experts is the shared one of layers with them."""

_FALCON_NAMES = replace(
    renamed(
        _STATE_MODULES
        | {
            TensorRole.FFN_NORM: "pre_ff_layernorm",
            TensorRole.GATE: "feed_forward.gate_proj",
            TensorRole.UP: "feed_forward.up_proj",
            TensorRole.DOWN: "feed_forward.down_proj",
        }
    ),
    final_norm_module="final_layernorm",
)
"""Of Bamba and of Falcon H1."""

_NEMOTRON_MODULES = {
    TensorRole.MIXER_NORM: "norm",
    TensorRole.FFN_NORM: "norm",
    TensorRole.Q: "mixer.q_proj",
    TensorRole.K: "mixer.k_proj",
    TensorRole.V: "mixer.v_proj",
    TensorRole.O: "mixer.o_proj",
    TensorRole.MAMBA_IN: "mixer.in_proj",
    TensorRole.MAMBA_SKIP: "mixer",
    TensorRole.STATE_CONV: "mixer.conv1d",
    TensorRole.STATE_DECAY: "mixer",
    TensorRole.STATE_DT: "mixer",
    TensorRole.STATE_NORM: "mixer.norm",
    TensorRole.STATE_OUT: "mixer.out_proj",
    TensorRole.UP: "mixer.up_proj",
    TensorRole.DOWN: "mixer.down_proj",
    TensorRole.ROUTER: "mixer.gate",
    TensorRole.CHOICE_BIAS: "mixer.gate",
    TensorRole.EXPERTS_IN: "mixer.fc1_latent_proj",
    TensorRole.EXPERTS_OUT: "mixer.fc2_latent_proj",
    TensorRole.EXPERT_UP: "mixer.experts.{expert}.up_proj",
    TensorRole.EXPERT_DOWN: "mixer.experts.{expert}.down_proj",
    TensorRole.SHARED_UP: "mixer.shared_experts.up_proj",
    TensorRole.SHARED_DOWN: "mixer.shared_experts.down_proj",
}
_NEMOTRON_UNREAD = (
    "chunk_size expand time_step_min time_step_max time_step_floor time_step_rank use_mamba_kernels"
    " moe_shared_expert_overlap partial_rotary_factor mtp_layers_block_type mtp_hybrid_override_pattern"
)
"""Fields of other kernels, of training, of draft layers, and of rotations, which no layer has. transformers
limits time steps by time_step_min in prompts and not in decodes; here neither has a limit, as in vLLM.
"""

MAMBA_ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="granitemoehybrid",
        class_name="GraniteMoeHybridForCausalLM",
        title="Granite 4.0",
        keys=_keys(
            f"{_MAMBA_KEYS} num_local_experts num_experts_per_tok shared_intermediate_size attention_bias"
            " position_embedding_type embedding_multiplier residual_multiplier attention_multiplier"
            " logits_scaling normalization_function"
        ),
        names=_GRANITE_NAMES,
        rotation=Rotation.NAMED,
        mamba=MambaRule(layers=RecurrentLayers.LISTED),
        width_key="shared_intermediate_size",
        scales=ScaleRule(embedding=EmbeddingScale.MULTIPLIER, has_multipliers=True),
        experts=ExpertRule(
            layers=SparseLayers.COUNTED,
            count_keys=("num_local_experts",),
            width_key="intermediate_size",
            shared_width_key="shared_intermediate_size",
        ),
        fixed={"normalization_function": "rmsnorm"},
    ),
    Architecture(
        model_type="bamba",
        class_name="BambaForCausalLM",
        title="Bamba",
        keys=_keys(
            f"{_MAMBA_KEYS} attn_layer_indices attention_bias mlp_bias attn_rotary_emb partial_rotary_factor"
        ),
        names=_FALCON_NAMES,
        rope=RopeRule(partial=0.5, rotary_dim_key="attn_rotary_emb"),
        mamba=MambaRule(layers=RecurrentLayers.INDICES),
        has_kv_heads_default=False,
        biases=BiasKeys(feed_forward="mlp_bias"),
    ),
    Architecture(
        model_type="falcon_h1",
        class_name="FalconH1ForCausalLM",
        title="Falcon H1",
        keys=_keys(
            f"{_MAMBA_KEYS} mamba_d_ssm mamba_rms_norm mamba_norm_before_gate projectors_bias attention_bias"
            " mlp_bias lm_head_multiplier embedding_multiplier mlp_multipliers key_multiplier"
            " attention_in_multiplier attention_out_multiplier ssm_multipliers ssm_in_multiplier"
            " ssm_out_multiplier layers_block_type mamba_use_mlp mlp_expansion_factor"
        ),
        names=_FALCON_NAMES,
        has_kv_heads_default=False,
        biases=BiasKeys(feed_forward="mlp_bias"),
        mamba=MambaRule(
            layers=RecurrentLayers.BESIDE,
            width_key="mamba_d_ssm",
            out_bias_key="projectors_bias",
            has_norm_keys=True,
        ),
        scales=ScaleRule(embedding=EmbeddingScale.MULTIPLIER, has_row_scales=True),
        defaults={"mamba_d_ssm": 1024},
        fixed={"mamba_use_mlp": True},
    ),
    Architecture(
        model_type="nemotron_h",
        class_name="NemotronHForCausalLM",
        title="Nemotron-H, Nemotron Nano 2, Nemotron 3",
        keys=_keys(
            "layers_block_type hybrid_override_pattern layer_norm_epsilon norm_eps attention_bias mlp_bias"
            " mlp_hidden_act ssm_state_size mamba_num_heads mamba_head_dim mamba_hidden_act n_groups"
            " conv_kernel use_conv_bias use_bias mamba_proj_bias time_step_limit mamba_ssm_cache_dtype"
            " n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size"
            " moe_latent_size num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob"
            " residual_in_fp32 num_nextn_predict_layers attention_head_dim mamba_num_groups mamba_state_dim"
            " num_query_groups"
            f" {_NEMOTRON_UNREAD}"
        ),
        names=replace(
            renamed(_NEMOTRON_MODULES),
            prefix="backbone.",
            embeddings_module="embeddings",
            final_norm_module="norm_f",
            ignored=("mtp.",),
        ),
        rotation=Rotation.NONE,
        head_dim=128,
        has_kv_heads_default=False,
        biases=BiasKeys(qkv=None, o=None, feed_forward="mlp_bias"),
        norms=NormRule(kind=NormKind.RMS_WIDE, eps_key="layer_norm_epsilon"),
        activation_key="mlp_hidden_act",
        activation="relu2",
        is_gated=False,
        mamba=MambaRule(
            layers=RecurrentLayers.BLOCKS,
            activation_key="mamba_hidden_act",
            heads_key="mamba_num_heads",
            head_dim_key="mamba_head_dim",
            groups_key="n_groups",
            state_key="ssm_state_size",
            kernel_key="conv_kernel",
            expand_key=None,
            conv_bias_key="use_conv_bias",
            bias_key="use_bias",
        ),
        experts=replace(
            GROUPED_EXPERTS,
            layers=SparseLayers.BLOCKS,
            shared_count_key=None,
            shared_count=0,
            shared_width_key="moe_shared_expert_intermediate_size",
            is_gated=False,
            latent_key="moe_latent_size",
        ),
        defaults={"layer_norm_epsilon": 1e-5, "n_groups": 8, "ssm_state_size": 128, "mamba_head_dim": 64},
        fixed={
            "attention_bias": False,
            "mamba_proj_bias": False,
            "mamba_ssm_cache_dtype": "float32",
            "n_shared_experts": 1,
            "residual_in_fp32": False,
        },
        reasons={"mamba_ssm_cache_dtype": ": states are summed in float32"},
        same={"norm_eps": ("layer_norm_epsilon",)},
        other_keys={
            "attention_head_dim": "head_dim",
            "mamba_num_groups": "n_groups",
            "mamba_state_dim": "ssm_state_size",
            "num_query_groups": "num_key_value_heads",
        },
    ),
)
