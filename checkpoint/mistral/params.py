"""params.json as a config.json and the row of the family that it describes.

A key that no rule reads is refused by name, as it may change tokens. Sources: vLLM's
transformers_utils/configs/mistral.py and mistral_large_3.py, and published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkpoint.architectures import architecture_of
from checkpoint.config_fields import RawConfig, flag, positive_float, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture
from checkpoint.mistral.names import MISTRAL_NAMES
from checkpoint.quantization_config import FIELD as QUANTIZATION_FIELD

DEFAULT_LENGTH = 128_000
"""Of files without a longest sequence, as in vLLM."""
_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "sliding_window": "sliding_window",
    "dtype": "dtype",
}
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_FIELDS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_LENGTHS = ("max_position_embeddings", "max_seq_len")
_INERT = frozenset({"vision_encoder"})
_FIXED: dict[str, object] = {"model_type": "transformer", "use_biases": False, "causal": True}
_FIXED_EXPERTS: dict[str, object] = {
    "route_every_n": 1,
    "renorm_strategy": "WEIGHTS",
    "use_load_balancing_bias": False,
}
_INERT_EXPERTS = frozenset({"expert_parallel", "expert_model_parallel"})
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadParams:
    """`raw` is a config.json of the model with the row `row`."""

    raw: RawConfig
    row: Architecture


def read_params(params: RawConfig) -> ReadParams:
    """Translate a parsed params.json. Raises UnsupportedModel and BadConfig, with the key."""
    given = {key: value for key, value in params.items() if value is not None}
    has_latents = given.get("qk_nope_head_dim") is not None
    _refuse_unknown(given, _known_keys(), _FIXED, "")
    raw = {name: given[key] for key, name in _FIELDS.items() if key in given}
    raw["max_position_embeddings"] = _length(given)
    raw["rope_parameters"] = _rope(given, has_latents=has_latents)
    if (quantization := _quantization(given)) is not None:
        raw[QUANTIZATION_FIELD] = quantization
    if has_latents:
        return _with_latents(given, raw)
    if "moe" in given:
        raise UnsupportedModel(
            "config field 'moe' is supported with latent attention (qk_nope_head_dim) only: use the"
            " checkpoint with config.json"
        )
    if others := [key for key in _LATENT_FIELDS if key in given]:
        raise BadConfig(f"config field {others[0]!r} is given, but 'qk_nope_head_dim' is missing")
    is_scaled = "yarn" in given
    row = architecture_of({"model_type": "ministral3" if is_scaled else "mistral"})
    # Neighbours are rotated together; conversions to config.json reorder rows of queries and keys instead.
    rope = replace(row.rope, is_interleaved=True)
    return ReadParams(raw={**raw, "model_type": row.model_type}, row=_named(replace(row, rope=rope)))


def _with_latents(given: RawConfig, raw: dict[str, object]) -> ReadParams:
    """Multi-head latent attention with experts: Mistral Large 3, Mistral Small 4."""
    if isinstance(given.get("sliding_window"), int):
        raise UnsupportedModel("config field 'sliding_window' is not supported with latent attention")
    if positive_float(given, "norm_eps") != _LATENT_EPS:
        raise UnsupportedModel(
            f"config field 'norm_eps' = {given['norm_eps']!r} is not supported with latent attention, only"
            f" {_LATENT_EPS} is: engines disagree about the norms of latents"
        )
    experts = given.get("moe")
    if not isinstance(experts, Mapping):
        raise BadConfig(f"config field 'moe' must be an object, is {experts!r:.120}")
    experts = {key: value for key, value in experts.items() if value is not None}
    _refuse_unknown(experts, {*_EXPERT_FIELDS, *_INERT_EXPERTS}, _FIXED_EXPERTS, "moe.")
    row = architecture_of({"model_type": "mistral4"})
    raw |= {name: given[name] for name in _LATENT_FIELDS if name in given}
    raw |= {name: experts[key] for key, name in _EXPERT_FIELDS.items() if key in experts}
    # A query without a latent has null in config.json, where a missing field has a default.
    raw.setdefault("q_lora_rank", None)
    for name in ("kv_lora_rank", "v_head_dim", "qk_rope_head_dim"):
        positive_int(raw, name)
    for key, name in _EXPERT_FIELDS.items():
        if key in ("num_experts", "num_experts_per_tok", "expert_hidden_dim") and name not in raw:
            raise BadConfig(f"config field 'moe.{key}' is missing")
    return ReadParams(raw={**raw, "model_type": row.model_type}, row=_named(row))


def _named(row: Architecture) -> Architecture:
    return replace(row, names=MISTRAL_NAMES)


def _known_keys() -> set[str]:
    others = ("rope_theta", "yarn", "llama_4_scaling", "moe", "quantization", QUANTIZATION_FIELD)
    return {*_FIELDS, *_LATENT_FIELDS, *_LENGTHS, *_INERT, *others}


def _refuse_unknown(given: RawConfig, known: set[str], fixed: RawConfig, prefix: str) -> None:
    for key, value in given.items():
        if key in fixed:
            if type(value) is not type(fixed[key]) or value != fixed[key]:
                raise UnsupportedModel(
                    f"config field '{prefix}{key}' = {value!r:.120} is not supported, only {fixed[key]!r} is"
                )
        elif key not in known:
            raise UnsupportedModel(f"config field '{prefix}{key}' = {value!r:.120} is not supported")
    if isinstance(given.get("sliding_window"), list):
        raise UnsupportedModel(
            "config field 'sliding_window' lists a window for each layer, which is not supported"
        )


def _length(given: RawConfig) -> int:
    found = {key: positive_int(given, key) for key in _LENGTHS if key in given}
    return min(found.values(), default=DEFAULT_LENGTH)


def _object(given: RawConfig, key: str, known: set[str]) -> RawConfig:
    found = given.get(key)
    if not isinstance(found, Mapping):
        raise BadConfig(f"config field {key!r} must be an object, is {found!r:.120}")
    _refuse_unknown(found, known, {}, f"{key}.")
    return found


def _rope(given: RawConfig, *, has_latents: bool) -> dict[str, object]:
    """The rotary embedding, and how queries grow, in transformers' words.

    yarn with `apply_scale` (the default) multiplies scores by the square of its temperature: through the
    rotated elements, which are all, or with latent attention through the scale of scores, as in vLLM.
    Without it scores are as they are. Published files say so, and config.json of Mistral Small 4 does not.
    """
    theta = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
    if "yarn" not in given:
        if "llama_4_scaling" in given:
            raise UnsupportedModel("config field 'llama_4_scaling' is supported together with 'yarn' only")
        return {"rope_type": "default", **theta}
    length = "original_max_position_embeddings"
    yarn = _object(given, "yarn", {"factor", length, "beta", "alpha", "apply_scale"})
    rope: dict[str, object] = {
        "rope_type": "yarn",
        **theta,
        "factor": positive_float(yarn, "factor"),
        length: positive_int(yarn, length),
        "beta_fast": positive_float(yarn, "beta", 32.0),
        "beta_slow": positive_float(yarn, "alpha", 1.0),
    }
    if not flag(yarn, "apply_scale", default=True):
        rope["attention_factor"] = 1.0
    elif has_latents:
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if "llama_4_scaling" in given:
        growth = _object(given, "llama_4_scaling", {length, "beta"})
        if positive_int(growth, length) != rope[length]:
            raise UnsupportedModel(
                f"config field 'llama_4_scaling.{length}' = {growth[length]!r} is not supported, only the"
                f" {rope[length]} of 'yarn' is"
            )
        rope["llama_4_scaling_beta"] = positive_float(growth, "beta")
    return rope


def _quantization(given: RawConfig) -> dict[str, object] | None:
    """fp8 with a scale per tensor, in Mistral's words, or an object of compressed-tensors."""
    found = [key for key in ("quantization", QUANTIZATION_FIELD) if given.get(key)]
    if len(found) == 2:
        raise BadConfig(f"config fields 'quantization' and {QUANTIZATION_FIELD!r} are both given")
    if not found:
        return None
    value = given[found[0]]
    if not isinstance(value, Mapping):
        raise BadConfig(f"config field {found[0]!r} must be an object, is {value!r:.120}")
    if "quant_method" in value:
        method = str(value["quant_method"]).lower().replace("_", "-")
        return {**value, "quant_method": method}
    value = _object(given, found[0], {"qformat_weight", "qscheme_act"})
    for key, legal in (("qformat_weight", ("fp8_e4m3",)), ("qscheme_act", ("NO_SCALES", "TENSOR", None))):
        if value.get(key) not in legal:
            raise UnsupportedModel(
                f"config field '{found[0]}.{key}' = {value.get(key)!r:.120} is not supported"
                f" (supported: {', '.join(str(one) for one in legal if one)})"
            )
    return {"quant_method": "fp8"}
