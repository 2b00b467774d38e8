"""Typed fields of config.json, and which keys are supported, ignored or rejected.

A key is *computed* if the decoder implements it, *inert* if it cannot change a logit (metadata, training,
initialisation, generation defaults, output options). Any other key is rejected by name unless it is null or
has a value listed in `_NEUTRAL`. Rejecting is the default, because an unknown field (such as a logit soft
cap) would silently give wrong tokens. False is no exception: it need not turn a feature off (`is_causal:
false` lets tokens attend to later tokens).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeVar

from checkpoint.errors import BadConfig, UnsupportedModel

RawConfig = Mapping[str, object]
MAX_LAYERS = 4096
MAX_INT = 2**31 - 1
MAX_LIST = 2**16
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": MAX_LAYERS,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    **dict.fromkeys(("num_global_key_value_heads", "global_head_dim"), 2**16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2**16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "o_groups", "o_lora_rank"), 2**16),
    **dict.fromkeys(("indexer_n_heads", "indexer_head_dim"), 2**16),
    **dict.fromkeys(("hc_count", "hc_lowrank"), 2**14),
    **dict.fromkeys(("ngram_size", "ple_conv_kernel_size"), 2**5),
    "heads_per_ngram": 2**6,
    **dict.fromkeys(("ple_embed_dim", "make_ngram_vocab_size_divisible_by"), 2**20),
    "ngram_vocab_size_base": 2**28,
    "split_ngram_parts": 2**14,
    "moe_intermediate_size": 2**22,
    "moe_latent_size": 2**20,
    "shared_expert_intermediate_size": 2**22,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**12),
    "hc_mult": 2**6,
    "hc_sinkhorn_iters": 2**10,
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_nextn_predict_layers"), 2**6),
}
"""Upper bounds, far above any existing model, so that no oversized allocation follows."""
_Number = TypeVar("_Number", int, float)


def positive_int(raw: RawConfig, key: str, default: int | None = None) -> int:
    """Return `raw[key]`, an integer from 1 to its limit (`LIMITS`), or `default` if missing or null.

    Raises BadConfig for any other value, and if it is missing without a default.
    """
    value = raw.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadConfig(f"config field {key!r} must be a positive integer, is {shown(value)}")
    if value > (limit := LIMITS.get(key, MAX_INT)):
        raise BadConfig(f"config field {key!r} is {shown(value)}, the limit is {limit}")
    return value


def natural_int(raw: RawConfig, key: str, default: int) -> int:
    """Return `raw[key]`, an integer from 0 to its limit, or `default`. Raises like `positive_int`."""
    is_zero = raw.get(key) == 0 and not isinstance(raw.get(key), bool)
    return 0 if is_zero else positive_int(raw, key) if raw.get(key) is not None else default


def positive_float(raw: RawConfig, key: str, default: float | None = None) -> float:
    """Return `raw[key]`, a finite number above 0, or `default`. Raises like `positive_int`."""
    value = raw.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise BadConfig(f"config field {key!r} must be a positive number, is {value!r}")
    return float(value)


def optional_float(raw: RawConfig, key: str) -> float | None:
    """Like `positive_float`, with None for a missing or null field."""
    return None if raw.get(key) is None else positive_float(raw, key)


def positive_floats(raw: RawConfig, key: str) -> tuple[float, ...]:
    """Return `raw[key]`, a list of finite numbers above 0. Raises like `positive_int`."""
    values = raw.get(key)
    if not isinstance(values, list) or not values or len(values) > MAX_LIST:
        raise BadConfig(f"config field {key!r} must be a list of positive numbers, is {shown(values)}")
    return tuple(positive_float({key: value}, key) for value in values)


def flag(raw: RawConfig, key: str, *, default: bool) -> bool:
    """Return `raw[key]`, a boolean, or `default` if missing or null. Raises BadConfig."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadConfig(f"config field {key!r} must be true or false, is {value!r}")
    return value


def text(raw: RawConfig, key: str) -> str | None:
    """Return `raw[key]`, a string, or None if missing or null. Raises BadConfig."""
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise BadConfig(f"config field {key!r} must be a string, is {value!r}")
    return value


def shown(value: object) -> str:
    """The value in an error, of which a file decides the length."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _default(key: str, default: _Number | None) -> _Number:
    if default is None:
        raise BadConfig(f"config field {key!r} is missing")
    return default


# Keys computed for every family.
_COMPUTED_WORDS = """
    architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling
    rope_parameters tie_word_embeddings torch_dtype dtype layer_types hidden_act quantization_config
    compression_config
"""
_COMPUTED = frozenset(_COMPUTED_WORDS.split())
# Of every family: metadata, exports, training, parallelism, kernels, outputs beside logits, and generation
# defaults of transformers 4. `pretraining_tp` only splits matrix products; `is_decoder` is read by families
# of encoders. Code that `auto_map` names is never run.
_INERT_WORDS = """
    _name_or_path name_or_path model_name base_model_name_or_path _commit_hash _from_model_config
    transformers_version tokenizer_class tokenizer_name tokenizer_padding_side tokenizer_model_max_length
    padding_side bos_token eos_token pad_token unk_token auto_map transformers.js_config language license
    unsloth_fixed unsloth_version _pre_quantization_dtype
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation
    _experts_implementation _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2
    flash_attention use_sdpa attention_softmax_in_fp32 scale_attention_softmax_in_fp32 use_fused_rms_norm
    use_fused_rope fuse_rms_norm fuse_rope fuse_linear fuse_swiglu fuse_softmax_mask fuse_attention_qkv
    fuse_attention_ffn fuse_gate_detach_matmul use_cache use_cache_kernel use_cache_quantization
    use_return_dict return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits num_logits_to_keep logits_to_keep keys_to_ignore_at_inference
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels
    initializer_range initializer_factor initializer_cutoff_factor init_method init_method_std init_std
    embedding_initializer_range rescale_prenorm_residual neftune_noise_alpha
    gradient_checkpointing use_recompute recompute recompute_granularity pretraining_tp ep_size
    tensor_parallel_degree tensor_parallel_output sequence_parallel
    router_aux_loss_coef router_z_loss_coef router_jitter_noise aux_loss_alpha aux_loss_coef seq_aux
    z_loss_coefficient tf_legacy_loss torchscript use_bfloat16 bf16 fp16 fp32
    is_decoder add_bos_token add_eos_token prefix model_max_length max_sequence_length max_seq_len seq_length
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    chunk_size_feed_forward remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens cache_implementation
"""
_INERT = frozenset(_INERT_WORDS.split())
_INERT_ENDS = (
    *("_token_id", "_token_ids", "_token_index"),
    *("dropout", "_pdrop", "dropout_prob", "dropout_rate"),
)
"""Ends of inert names: ids of special tokens, and dropout, which acts in training."""

# Values with which a decoder that ignores the key computes the same.
_OFF_WORDS = """
    add_classification_head add_cross_attention attention_bias attention_out_bias is_encoder_decoder
    layer_norm_bias lm_head_bias mlp_bias norm_bias qkv_bias reorder_and_upcast_attn rope_interleaved
    rope_traditional scale_attn_by_inverse_layer_idx tie_encoder_decoder use_bias use_bidirectional_attention
    position_embedding_xdrope use_cla use_dynamic_ntk use_logn_attn use_mrope use_mtp use_qk_norm
    use_sliding_window alibi bias ffn_bias moe o_bias parallel_attn qk_layernorm
"""
_ZERO_WORDS = """
    class_num mtp_num_hidden_layers mtp_transformer_layers n_routed_experts n_shared_experts num_experts
    num_experts_per_tok num_hash_layers num_local_experts num_mtp_modules num_nextn_predict_layers
    num_shared_experts shared_expert_intermediate_size shared_intermediate_size
"""
_ONE_WORDS = """
    attn_factor compression_ratio embedding_multiplier extrapolation_factor full_attn_mod interpolate_factor
    logit_scale logits_scaling partial_rotary_factor residual_multiplier rope_ratio rotary_pct rotary_percent
    rotary_scaling_factor
"""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_OFF_WORDS.split(), (False,)),
    **dict.fromkeys(_ZERO_WORDS.split(), (0,)),
    **dict.fromkeys(_ONE_WORDS.split(), (1.0,)),
    **dict.fromkeys(
        ("is_causal", "is_llama_config", "scale_attn_weights", "use_rmsnorm", "use_rope"), (True,)
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0, False)),
    **dict.fromkeys(("cross_attention_layers", "mlp_only_layers", "no_rope_layers"), ([],)),
    "moe_router_dtype": ("float32", "fp32"),
    "pruned_heads": ({},),
}
_NEUTRAL_ITEMS = {"attn_type_list": 1}
"""Lists by layer whose items all have this value: 1 is softmax attention."""


def with_usual_keys(raw: RawConfig, other_keys: Mapping[str, str]) -> RawConfig:
    """`raw` with the fields that have other names in a family, or are in objects, under their usual names.

    `other_keys` maps such names, and "object.name", to usual ones. Raises UnsupportedModel for another field
    of an object, BadConfig for names that contradict each other.
    """
    found = dict(raw)
    for name in {path.partition(".")[0] for path in other_keys if "." in path}:
        if (inside := found.pop(name, None)) is None:
            continue
        if not isinstance(inside, Mapping):
            raise BadConfig(f"config field {name!r} must be an object, is {shown(inside)}")
        fields = {f"{name}.{key}": value for key, value in inside.items() if value is not None}
        if unknown := fields.keys() - other_keys.keys():
            raise unknown_key({**raw, **fields}, min(unknown))
        found |= fields
    for path, key in other_keys.items():
        if (value := found.pop(path, None)) is None:
            continue
        if found.get(key) is not None and found[key] != value:
            raise BadConfig(
                f"config fields {path!r} = {shown(value)} and {key!r} = {shown(found[key])} contradict"
            )
        found[key] = value
    return found


def refuse_unknown_keys(raw: RawConfig, family_keys: frozenset[str]) -> None:
    """Raise UnsupportedModel for the first of `unknown_keys`."""
    for key in unknown_keys(raw, family_keys):
        raise unknown_key(raw, key)


def unknown_keys(raw: RawConfig, family_keys: frozenset[str]) -> list[str]:
    """Return the keys that are neither supported nor neutral.

    `family_keys` are the computed keys of this family, without the common keys.
    """
    known = _COMPUTED | family_keys
    return [
        key
        for key, value in raw.items()
        if not (key in known or _is_inert(key) or is_neutral(key, value) or _is_said_twice(raw, key))
    ]


def _is_said_twice(raw: RawConfig, key: str) -> bool:
    """Whether an unsupported key says what other fields say."""
    value = raw[key]
    match key:
        case "sliding_window" | "max_window_layers":
            return raw.get("use_sliding_window") is False
        case "hidden_activation":
            return value == raw.get("hidden_act")
        case "rotary_dim":
            return type(value) is int and value == _head_dim(raw)
        case _:
            return False


def _head_dim(raw: RawConfig) -> int:
    if raw.get("head_dim") is not None:
        return positive_int(raw, "head_dim")
    return positive_int(raw, "hidden_size") // positive_int(raw, "num_attention_heads")


def _is_inert(key: str) -> bool:
    return key in _INERT or key.endswith(_INERT_ENDS)


def unknown_key(raw: RawConfig, key: str) -> UnsupportedModel:
    """The error of an unknown key."""
    family = raw.get("model_type")
    return UnsupportedModel(f"config field {key!r} = {_shortened(raw[key])} is not supported for {family!r}")


def is_neutral(key: str, value: object) -> bool:
    """Whether an unsupported key has a value with which it has no effect."""
    if value is None:
        return True
    if key in _NEUTRAL_ITEMS and isinstance(value, list):
        return all(type(item) is int and item == _NEUTRAL_ITEMS[key] for item in value)
    # In Python True == 1 and False == 0; in a config they differ.
    return any(
        isinstance(value, bool) is isinstance(known, bool) and value == known
        for known in _NEUTRAL.get(key, ())
    )


def _shortened(value: object) -> str:
    whole = repr(value)
    return whole if len(whole) <= 120 else f"{whole[:117]}..."
