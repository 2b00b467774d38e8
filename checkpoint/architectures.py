"""The families of decoders that are served: one row each."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import NormKind, NormSpan, Placement, RouterScore
from checkpoint.config_fields import RawConfig, text
from checkpoint.delta_architectures import (
    DELTA_ARCHITECTURES,
    EXPERT_KEYS,
    SHARED_EXPERT,
    STEP_EXPERTS,
    STEP_KEYS,
)
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import (
    Architecture,
    BiasKeys,
    Clamp,
    EmbeddingScale,
    ExpertRule,
    NormRule,
    Rotation,
    ScaleRule,
    SparseLayers,
    Windows,
)
from checkpoint.gemma_architectures import GEMMA_ARCHITECTURES
from checkpoint.latent_architectures import GROUPED_EXPERTS, LATENT_ARCHITECTURES, ROUTED_KEYS
from checkpoint.mamba_architectures import MAMBA_ARCHITECTURES
from checkpoint.names import Pack, TensorRole, renamed
from checkpoint.rope_config import RopeRule


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SELECTED_WINDOW_KEYS = "sliding_window use_sliding_window max_window_layers"
_STATICS = Pack(module="mlp.moe_statics", roles=(TensorRole.CHOICE_BIAS,), has_unit_axis=True)
_MULTIPLIERS = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
_MIXTRAL_MODULES = {
    TensorRole.ROUTER: "block_sparse_moe.gate",
    TensorRole.CHOICE_BIAS: "block_sparse_moe",
    TensorRole.EXPERT_GATE: "block_sparse_moe.experts.{expert}.w1",
    TensorRole.EXPERT_UP: "block_sparse_moe.experts.{expert}.w3",
    TensorRole.EXPERT_DOWN: "block_sparse_moe.experts.{expert}.w2",
}
_GATE_UP_ROLES = (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP)
_PARAMETER = Pack(module="", roles=(), has_kind=False, is_transposed=True)
_GPT_OSS_EXPERTS = (
    replace(_PARAMETER, module="mlp.experts.gate_up_proj", roles=_GATE_UP_ROLES, is_alternating=True),
    replace(_PARAMETER, module="mlp.experts.down_proj", roles=(TensorRole.EXPERT_DOWN,)),
)
_ORIGINAL_LENGTH = tuple(f"rope_{key}.original_max_position_embeddings" for key in ("scaling", "parameters"))
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""Default of transformers' config class."""
_WINDOW_DEFAULT = {"sliding_window": 4096}
_ERNIE_TRAINING = (
    "moe_capacity moe_gate moe_group moe_use_aux_free moe_aux_loss_lambda moe_orthogonal_loss_lambda"
    " moe_z_loss_lambda moe_fuse_experts moe_layer_feed_fake_token moe_multimodal_dispatch_use_allgather"
    " multi_token_pred_lambda enable_mtp_magic_send"
)
"""Losses, capacities and kernels of the training."""
_MINIMAX_SCALES = (
    "layernorm_full_attention_alpha",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha",
    "layernorm_mlp_beta",
)
_HUNYUAN_UNREAD = (
    "cla_share_factor dense_list im_end_id im_newline_id im_start_id mask_init_id org_vocab_size pad_id"
    " pool_type text_end_id text_start_id"
)
"""Special tokens, heads of classifiers, and layers that share keys if `use_cla`, which must be false."""
_COHERE_FIXED: dict[str, object] = {
    "position_embedding_type": "rope_gptj",
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Of published configs; transformers computes nothing else. `use_parallel_embedding` is about devices."""
_COHERE_SAME = {"use_embedding_sharing": ("tie_word_embeddings",)}
_NO_BIASES = BiasKeys(qkv=None, o=None)
_ALL_EXPERTS = ExpertRule(width_key="intermediate_size")
_GATE_UP = Pack(module="mlp.gate_up_proj", roles=(TensorRole.GATE, TensorRole.UP))
_QKV = Pack(module="self_attn.qkv_proj", roles=(TensorRole.Q, TensorRole.K, TensorRole.V))
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        title="Llama 2, 3",
        class_aliases=frozenset({"LLaMAForCausalLM"}),
        keys=_keys("attention_bias mlp_bias"),
        biases=BiasKeys(feed_forward="mlp_bias"),
    ),
    Architecture(
        model_type="mistral",
        class_name="MistralForCausalLM",
        title="Mistral",
        keys=_keys("sliding_window"),
        windows=Windows.ALL,
        has_kv_heads_default=False,
        biases=_NO_BIASES,
        defaults=_WINDOW_DEFAULT,
    ),
    Architecture(
        model_type="ministral3",
        class_name="Ministral3ForCausalLM",
        title="Ministral 3, Mistral Medium 3.5",
        keys=_keys("sliding_window"),
        windows=Windows.ALL,
        rope=RopeRule(has_query_growth=True),
        head_dim=128,
        has_kv_heads_default=False,
        biases=_NO_BIASES,
    ),
    Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        title="Qwen2, Qwen2.5",
        keys=_keys(_SELECTED_WINDOW_KEYS),
        windows=Windows.SELECTED,
        has_kv_heads_default=False,
        biases=BiasKeys(qkv=None, o=None, qkv_default=True),
    ),
    Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        title="Qwen3",
        keys=_keys(f"{_SELECTED_WINDOW_KEYS} attention_bias"),
        windows=Windows.SELECTED,
        head_dim=128,
        has_kv_heads_default=False,
        norms=NormRule(qk_span=NormSpan.HEAD),
    ),
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        title="Qwen3 MoE",
        keys=_keys(f"{_SELECTED_WINDOW_KEYS} {STEP_KEYS} attention_bias norm_topk_prob"),
        windows=Windows.SWITCHED,
        has_kv_heads_default=False,
        norms=NormRule(qk_span=NormSpan.HEAD),
        experts=STEP_EXPERTS,
        fixed={"use_qk_norm": True},
    ),
    Architecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        title="Mixtral",
        keys=_keys(f"{EXPERT_KEYS} sliding_window"),
        names=renamed(_MIXTRAL_MODULES),
        windows=Windows.ALL,
        rope=RopeRule(theta=1_000_000.0),
        has_kv_heads_default=False,
        biases=_NO_BIASES,
        experts=_ALL_EXPERTS,
    ),
    Architecture(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        title="OLMoE",
        keys=_keys(f"{EXPERT_KEYS} attention_bias norm_topk_prob"),
        norms=NormRule(qk_span=NormSpan.WIDTH),
        experts=replace(_ALL_EXPERTS, norm_key="norm_topk_prob", is_normalised=False),
    ),
    Architecture(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        title="Qwen1.5-MoE, Qwen2-MoE",
        keys=_keys(
            f"{_SELECTED_WINDOW_KEYS} {STEP_KEYS} qkv_bias norm_topk_prob shared_expert_intermediate_size"
        ),
        names=renamed(SHARED_EXPERT),
        windows=Windows.LISTED,
        has_kv_heads_default=False,
        biases=BiasKeys(qkv="qkv_bias", o=None, qkv_default=True),
        experts=replace(
            STEP_EXPERTS, shared_width_key="shared_expert_intermediate_size", has_shared_gate=True
        ),
    ),
    Architecture(
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        title="GLM-4.5, 4.6, 4.7",
        keys=_keys(f"{ROUTED_KEYS} attention_bias partial_rotary_factor use_qk_norm"),
        rope=RopeRule(partial=0.5),
        has_kv_heads_default=False,
        biases=BiasKeys(o=None),
        norms=NormRule(qk_span=NormSpan.HEAD, qk_key="use_qk_norm"),
        experts=GROUPED_EXPERTS,
        defaults={"num_nextn_predict_layers": 1},
    ),
    *DELTA_ARCHITECTURES,
    *MAMBA_ARCHITECTURES,
    *LATENT_ARCHITECTURES,
    Architecture(
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        title="Granite 3 MoE",
        keys=_keys(f"{EXPERT_KEYS} attention_bias {_MULTIPLIERS}"),
        names=renamed(
            {
                TensorRole.ROUTER: "block_sparse_moe.router.layer",
                TensorRole.EXPERT_DOWN: "block_sparse_moe.output_linear",
            },
            Pack(module="block_sparse_moe.input_linear", roles=_GATE_UP_ROLES),
        ),
        scales=ScaleRule(embedding=EmbeddingScale.MULTIPLIER, has_multipliers=True),
        experts=_ALL_EXPERTS,
    ),
    Architecture(
        model_type="ernie4_5_moe",
        class_name="Ernie4_5_MoeForCausalLM",
        title="ERNIE 4.5 MoE",
        keys=_keys(
            "moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index"
            f" moe_layer_end_index moe_layer_interval moe_norm_min num_nextn_predict_layers {_ERNIE_TRAINING}"
        ),
        names=replace(renamed({}, _STATICS), ignored=("model.mtp_",)),
        rope=RopeRule(theta=500_000.0, is_interleaved=True),
        has_kv_heads_default=False,
        biases=_NO_BIASES,
        is_tied=True,
        experts=ExpertRule(
            layers=SparseLayers.INTERVAL,
            count_keys=("moe_num_experts",),
            per_token_key="moe_k",
            has_choice_bias=True,
            is_wide=True,
            shared_count_key="moe_num_shared_experts",
            shared_count=2,
        ),
        fixed={"moe_norm_min": 1e-12, "moe_gate_act": "softmax", "use_bias": False},
    ),
    Architecture(
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        title="MiniMax-M2",
        keys=_keys(
            f"{EXPERT_KEYS} partial_rotary_factor rotary_dim mlp_intermediate_size"
            " use_mtp num_mtp_modules mtp_transformer_layers"
        ),
        names=renamed(_MIXTRAL_MODULES),
        rope=RopeRule(theta=5_000_000.0, partial=1.0, rotary_dim_key="rotary_dim"),
        head_dim=128,
        has_kv_heads_default=False,
        biases=_NO_BIASES,
        norms=NormRule(qk_span=NormSpan.WIDTH),
        experts=replace(_ALL_EXPERTS, score=RouterScore.SIGMOID, has_choice_bias=True),
        fixed={"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
        | {"use_routing_bias": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
        | dict.fromkeys(_MINIMAX_SCALES, 1.0),
    ),
    Architecture(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        title="gpt-oss",
        keys=_keys(
            f"{EXPERT_KEYS} attention_bias sliding_window swiglu_alpha swiglu_limit experts_per_token"
            " initial_context_length"
        ),
        names=renamed({TensorRole.ROUTER: "mlp.router"}, *_GPT_OSS_EXPERTS),
        windows=Windows.PATTERN,
        window_pattern=2,
        rope=RopeRule(theta=150_000.0, default=_GPT_OSS_YARN),
        head_dim=64,
        has_kv_heads_default=False,
        has_sinks=True,
        biases=BiasKeys(qkv_default=True, default=True),
        norms=NormRule(kind=NormKind.RMS_WIDE),
        experts=ExpertRule(width_key="intermediate_size", has_bias=True, clamp=Clamp.SCALED),
        defaults={"sliding_window": 128},
        fixed={"hidden_act": "silu"},
        same={"experts_per_token": ("num_experts_per_tok",), "initial_context_length": _ORIGINAL_LENGTH},
    ),
    Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        title="SmolLM3",
        keys=_keys(f"attention_bias mlp_bias {_SELECTED_WINDOW_KEYS} no_rope_layers no_rope_layer_interval"),
        windows=Windows.LISTED,
        rotation=Rotation.LISTED,
        rope=RopeRule(theta=2_000_000.0),
        has_kv_heads_default=False,
        biases=BiasKeys(feed_forward="mlp_bias"),
        is_tied=True,
    ),
    Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        title="Granite",
        keys=_keys(f"attention_bias mlp_bias {_MULTIPLIERS}"),
        biases=BiasKeys(feed_forward="mlp_bias"),
        scales=ScaleRule(embedding=EmbeddingScale.MULTIPLIER, has_multipliers=True),
    ),
    Architecture(
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        title="Seed-OSS",
        keys=_keys("attention_bias attention_out_bias mlp_bias"),
        head_dim=128,
        has_kv_heads_default=False,
        biases=BiasKeys(o="attention_out_bias", feed_forward="mlp_bias", qkv_default=True),
    ),
    Architecture(
        model_type="arcee",
        class_name="ArceeForCausalLM",
        title="Arcee (AFM)",
        keys=_keys("attention_bias mlp_bias"),
        biases=BiasKeys(feed_forward="mlp_bias"),
        activation="relu2",
        is_gated=False,
    ),
    Architecture(
        model_type="nemotron",
        class_name="NemotronForCausalLM",
        title="Nemotron",
        keys=_keys("attention_bias mlp_bias norm_eps partial_rotary_factor"),
        rope=RopeRule(partial=0.5),
        biases=BiasKeys(feed_forward="mlp_bias"),
        norms=NormRule(kind=NormKind.LAYER_OFFSET, has_bias=True, eps_key="norm_eps"),
        activation="relu2",
        is_gated=False,
        fixed={"rope_percent": 0.5},
        same={"kv_channels": ("head_dim",)},
    ),
    Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        title="StarCoder2",
        keys=_keys("sliding_window use_bias norm_epsilon"),
        names=renamed({TensorRole.UP: "mlp.c_fc", TensorRole.DOWN: "mlp.c_proj"}),
        windows=Windows.ALL,
        has_kv_heads_default=False,
        biases=BiasKeys(
            qkv="use_bias", o="use_bias", feed_forward="use_bias", qkv_default=True, default=True
        ),
        norms=NormRule(kind=NormKind.LAYER, has_bias=True, eps_key="norm_epsilon"),
        activation="gelu_pytorch_tanh",
        is_gated=False,
        is_tied=True,
        fixed={"norm_type": "layer_norm", "mlp_type": "default"},
        same={"activation_function": ("hidden_act",), "layer_norm_epsilon": ("norm_epsilon",)},
    ),
    Architecture(
        model_type="ernie4_5",
        class_name="Ernie4_5ForCausalLM",
        class_aliases=frozenset({"Ernie4_5_ForCausalLM"}),
        title="ERNIE 4.5",
        keys=_keys("use_bias"),
        rope=RopeRule(theta=500_000.0, is_interleaved=True),
        head_dim=128,
        has_kv_heads_default=False,
        biases=BiasKeys(qkv="use_bias", o="use_bias", feed_forward="use_bias"),
        is_tied=True,
    ),
    Architecture(
        model_type="hunyuan_v1_dense",
        class_name="HunYuanDenseV1ForCausalLM",
        title="Hunyuan (dense)",
        keys=_keys(f"attention_bias {_HUNYUAN_UNREAD}"),
        names=renamed(
            {TensorRole.Q_NORM: "self_attn.query_layernorm", TensorRole.K_NORM: "self_attn.key_layernorm"}
        ),
        rope=RopeRule(has_fixed_alpha=True),
        norms=NormRule(qk_span=NormSpan.HEAD, is_qk_after_rotation=True),
        fixed={"norm_type": "rms", "use_qk_norm": True},
        same={"attention_head_dim": ("head_dim",)},
    ),
    Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        title="Phi-3, Phi-4",
        keys=_keys("sliding_window original_max_position_embeddings partial_rotary_factor"),
        names=renamed({}, _QKV, _GATE_UP),
        windows=Windows.ALL,
        rope=RopeRule(partial=1.0, has_length_factors=True),
        biases=_NO_BIASES,
    ),
    Architecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        title="GLM-4",
        keys=_keys("attention_bias partial_rotary_factor"),
        names=renamed(
            {
                TensorRole.MIXER_OUT_NORM: "post_self_attn_layernorm",
                TensorRole.FFN_OUT_NORM: "post_mlp_layernorm",
            },
            _GATE_UP,
        ),
        rope=RopeRule(partial=0.5, is_interleaved=True),
        head_dim=128,
        has_kv_heads_default=False,
        biases=BiasKeys(o=None, qkv_default=True),
        norms=NormRule(placement=Placement.AROUND),
    ),
    Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        title="OLMo 2",
        keys=_keys("attention_bias"),
        norms=NormRule(kind=NormKind.RMS_WIDE, placement=Placement.AFTER, qk_span=NormSpan.WIDTH),
    ),
    Architecture(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        title="OLMo 3",
        keys=_keys("attention_bias sliding_window"),
        windows=Windows.PATTERN,
        window_pattern=4,
        rope=RopeRule(theta=500_000.0, is_per_type=True),
        norms=NormRule(kind=NormKind.RMS_WIDE, placement=Placement.AFTER, qk_span=NormSpan.WIDTH),
        defaults=_WINDOW_DEFAULT,
    ),
    Architecture(
        model_type="exaone4",
        class_name="Exaone4ForCausalLM",
        title="EXAONE 4",
        keys=_keys("sliding_window sliding_window_pattern"),
        windows=Windows.PATTERN,
        window_pattern=4,
        rotation=Rotation.WINDOWED_OR_ALL,
        has_kv_heads_default=False,
        biases=_NO_BIASES,
        norms=NormRule(placement=Placement.AFTER, qk_span=NormSpan.HEAD),
        defaults=_WINDOW_DEFAULT,
    ),
    Architecture(
        model_type="cohere",
        class_name="CohereForCausalLM",
        title="Command R",
        keys=_keys("attention_bias layer_norm_eps logit_scale use_qk_norm use_parallel_embedding"),
        rope=RopeRule(theta=500_000.0, is_interleaved=True),
        norms=NormRule(
            kind=NormKind.LAYER,
            placement=Placement.SHARED,
            eps_key="layer_norm_eps",
            qk_span=NormSpan.EACH_HEAD,
            qk_key="use_qk_norm",
        ),
        scales=ScaleRule(logit_scale=0.0625),
        is_tied=True,
        fixed=_COHERE_FIXED,
        same=_COHERE_SAME,
    ),
    Architecture(
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        title="Command R7B, Command A",
        keys=_keys(
            "attention_bias layer_norm_eps logit_scale sliding_window sliding_window_pattern"
            " use_parallel_embedding"
        ),
        windows=Windows.PATTERN,
        window_pattern=4,
        rotation=Rotation.WINDOWED,
        rope=RopeRule(is_interleaved=True),
        norms=NormRule(kind=NormKind.LAYER, placement=Placement.SHARED, eps_key="layer_norm_eps"),
        scales=ScaleRule(logit_scale=0.0625),
        is_tied=True,
        defaults={"sliding_window_pattern": 4, **_WINDOW_DEFAULT},
        fixed={"order_of_interleaved_layers": "local_attn_first", **_COHERE_FIXED},
        same={"layer_switch": ("sliding_window_pattern",), **_COHERE_SAME},
    ),
    *GEMMA_ARCHITECTURES,
)

_BY_CLASS = {name: row for row in ARCHITECTURES for name in (row.class_name, *row.class_aliases)}
_BY_TYPE = {name: row for row in ARCHITECTURES for name in (row.model_type, *row.aliases)}
MODEL_TYPES = frozenset(_BY_TYPE)
"""Names of the families that have a row."""


def architecture_of(raw: RawConfig) -> Architecture:
    """Return the family in `architectures` and `model_type`, which must agree; one may be missing.

    Raises UnsupportedModel for another family, BadConfig for contradictory names.
    """
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise BadConfig(f"config field 'architectures' must be a list, is {named!r}")
    for name in named:
        if not isinstance(name, str) or name not in _BY_CLASS:
            legal = ", ".join(_BY_CLASS)
            raise UnsupportedModel(f"architecture {name!r} is not supported (supported: {legal})")
    found = {_BY_CLASS[name] for name in named}
    model_type = text(raw, "model_type")
    if model_type is not None:
        found.add(_of_type(model_type))
    if len(found) != 1:
        raise BadConfig(
            "config fields 'architectures' and 'model_type' must name one model,"
            f" got {named!r} and {model_type!r}"
        )
    return found.pop()


def _of_type(model_type: str) -> Architecture:
    if (row := _BY_TYPE.get(model_type)) is None:
        legal = ", ".join(_BY_TYPE)
        raise UnsupportedModel(f"model type {model_type!r} is not supported (supported: {legal})")
    return row
