"""The text model inside a checkpoint of several modalities: served alone, the other parts are never read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkpoint.blueprint import Blueprint
from checkpoint.config_fields import RawConfig, refuse_unknown_keys
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.headers import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A model of several modalities by its `model_type` and its class in transformers.

    `other_names` are the names of its class in published checkpoints.

    `text_types` are the model types of its `text_config`; `keys` are the fields beside it, which do not
    change generated text.
    """

    model_type: str
    class_name: str
    text_types: frozenset[str]
    keys: frozenset[str]
    other_names: frozenset[str] = frozenset()


_COMMON_KEYS = frozenset({"text_config", "vision_config"})

WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper(
        model_type="gemma3",
        class_name="Gemma3ForConditionalGeneration",
        text_types=frozenset({"gemma3_text"}),
        keys=frozenset({"mm_tokens_per_image"}),
    ),
    Wrapper(
        model_type="gemma4",
        class_name="Gemma4ForConditionalGeneration",
        text_types=frozenset({"gemma4_text"}),
        keys=frozenset({"audio_config", "vision_soft_tokens_per_image"}),
    ),
    Wrapper(
        model_type="mistral3",
        class_name="Mistral3ForConditionalGeneration",
        text_types=frozenset({"mistral", "ministral3", "mistral4"}),
        keys=frozenset(
            {
                "multimodal_projector_bias",
                "projector_hidden_act",
                "spatial_merge_size",
                "vision_feature_layer",
            }
        ),
    ),
    *(
        Wrapper(
            model_type=model_type,
            class_name=f"{class_prefix}ForConditionalGeneration",
            text_types=frozenset({f"{model_type}_text"}),
            keys=frozenset({"language_model_only"}),
        )
        for model_type, class_prefix in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
    ),
    Wrapper(
        model_type="qwen4_exp",
        class_name="Qwen4ExpForConditionalGeneration",
        text_types=frozenset({"qwen4_exp_text"}),
        keys=frozenset({"language_model_only"}),
    ),
    Wrapper(
        model_type="kimi_k25",
        class_name="Kimi_K25ForConditionalGeneration",
        other_names=frozenset({"KimiK25ForConditionalGeneration"}),
        text_types=frozenset({"deepseek_v3", "kimi_k2"}),
        keys=frozenset(
            {
                "ignore_index",
                "projection_hidden_size",
                "projection_layer_norm_eps",
                "use_unified_vision_chunk",
                "video_placeholder",
            }
        ),
    ),
)

_PLACES = (
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
"""Prefix of the text model's tensors, and its head, as transformers 4 and 5 name them."""
_OTHER_MODULES = (
    *("vision_tower", "multi_modal_projector", "mm_projector"),
    *("embed_vision", "audio_tower", "embed_audio", "visual"),
)
_OTHERS = tuple(f"{prefix}{module}." for prefix in ("", "model.") for module in _OTHER_MODULES)
"""Prefixes of the tensors of other modalities."""
_INHERITED = (
    *("dtype", "torch_dtype", "eos_token_id", "bos_token_id"),
    *("quantization_config", "compression_config"),
)


def text_config(raw: RawConfig) -> RawConfig:
    """Return the config of the text model of a wrapper, and any other config unchanged.

    Raises UnsupportedModel for an unknown wrapper or field, BadConfig for a text_config that is no object.
    """
    if not is_wrapper(raw):
        return raw
    wrapper, text = _wrapper_of(raw), raw["text_config"]
    if not isinstance(text, dict):
        raise BadConfig(f"config field 'text_config' must be an object, is {text!r}")
    if text.get("model_type") not in wrapper.text_types:
        legal = ", ".join(sorted(wrapper.text_types))
        raise UnsupportedModel(
            f"config field 'text_config.model_type' = {text.get('model_type')!r} is not supported in "
            f"{wrapper.model_type!r} (supported: {legal})"
        )
    refuse_unknown_keys(raw, wrapper.keys | _COMMON_KEYS)
    inherited = {key: raw[key] for key in _INHERITED if raw.get(key) is not None and text.get(key) is None}
    is_tied = raw.get("tie_word_embeddings") is True
    return {**text, **inherited, **({"tie_word_embeddings": True} if is_tied else {})}


def is_wrapper(raw: RawConfig) -> bool:
    """Whether the text model is a part of the checkpoint."""
    return raw.get("text_config") is not None


def _wrapper_of(raw: RawConfig) -> Wrapper:
    named = raw.get("model_type"), raw.get("architectures") or []
    for wrapper in WRAPPERS:
        classes = {wrapper.class_name, *wrapper.other_names}
        if wrapper.model_type == named[0] and named[1] in ([], *([name] for name in classes)):
            return wrapper
    legal = ", ".join(wrapper.class_name for wrapper in WRAPPERS)
    raise UnsupportedModel(
        f"model type {named[0]!r} with architectures {named[1]!r} is not supported (supported: {legal})"
    )


def named_as_in(config: Blueprint, tensors: Mapping[str, TensorEntry]) -> Blueprint:
    """`config` of a wrapper's text model, with the names that `tensors` have."""
    ignored = (*config.names.ignored, *_OTHERS)
    for prefix, head in _PLACES:
        names = config.names.at(prefix, head, ignored)
        if names.embeddings in tensors:
            return replace(config, names=names)
    prefix, head = _PLACES[-1]
    return replace(config, names=config.names.at(prefix, head, ignored))
