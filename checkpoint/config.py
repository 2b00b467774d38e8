"""Model configuration from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from checkpoint.config_fields import RawConfig, flag, positive_float, positive_int, refuse_unknown_keys, text
from checkpoint.dtypes import DType
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.rope_config import RopeConfig, parse_rope

_DEFAULT_MAX_WINDOW_LAYERS = 28
"""Default in transformers' Qwen2Config and Qwen3Config."""


def parse_layer_windows(
    raw: RawConfig, num_layers: int, *, windowed_by_default: bool
) -> tuple[int | None, ...]:
    """Return each layer's window in positions (the query's own included); None for full attention.

    With `windowed_by_default` (mistral), `sliding_window` alone gives every layer the window. Otherwise
    `use_sliding_window` must be true, and `layer_types`, or else `max_window_layers` (the number of leading
    layers with full attention), selects the layers.

    Raises UnsupportedModel for another layer type, BadConfig for contradictory fields.
    """
    window = _parse_window(raw, windowed_by_default=windowed_by_default)
    full_layers = 0 if windowed_by_default else _num_full_layers(raw)
    implied = tuple(window if layer >= full_layers else None for layer in range(num_layers))
    listed = _parse_layer_types(raw, num_layers, window)
    if listed is None:
        return implied
    if windowed_by_default and listed != implied:
        raise UnsupportedModel(
            "config field 'layer_types' mixes kinds of layers, which is not supported for this architecture"
        )
    return listed


def _parse_window(raw: RawConfig, *, windowed_by_default: bool) -> int | None:
    enabled = windowed_by_default or flag(raw, "use_sliding_window", default=False)
    if not enabled or raw.get("sliding_window") is None:
        return None
    return positive_int(raw, "sliding_window")


def _num_full_layers(raw: RawConfig) -> int:
    if raw.get("max_window_layers") == 0:
        return 0
    return positive_int(raw, "max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)


def _parse_layer_types(raw: RawConfig, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise BadConfig(f"config field 'layer_types' must list {num_layers} layers, is {types!r}")
    for layer, name in enumerate(types):
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"config field 'layer_types[{layer}]' = {name!r} is not supported")
        if name == "sliding_attention" and window is None:
            raise BadConfig(f"config field 'layer_types[{layer}]' = {name!r}, but no sliding window is set")
    return tuple(window if name == "sliding_attention" else None for name in types)


class ModelFamily(Enum):
    """A decoder family; the value is its `model_type` in config.json."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


_ARCHITECTURES = {
    "LlamaForCausalLM": ModelFamily.LLAMA,
    "MistralForCausalLM": ModelFamily.MISTRAL,
    "Qwen2ForCausalLM": ModelFamily.QWEN2,
    "Qwen3ForCausalLM": ModelFamily.QWEN3,
}

_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
_FAMILY_KEYS = {
    ModelFamily.LLAMA: frozenset({"attention_bias", "mlp_bias"}),
    ModelFamily.MISTRAL: frozenset({"sliding_window"}),
    ModelFamily.QWEN2: _WINDOW_KEYS,
    ModelFamily.QWEN3: _WINDOW_KEYS | {"attention_bias"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. Widths are in elements, lengths in tokens.

    `head_dim` is independent of hidden_size / num_attention_heads. `layer_windows[i]` is the number of
    positions, the query's own included, that layer i sees, or None for all. `dtype` is the checkpoint's
    dtype, the default run dtype.
    """

    family: ModelFamily
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: DType
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def parse_config(raw: Mapping[str, object], *, stored_dtype: DType | None = None) -> ModelConfig:
    """Validate a parsed config.json. `stored_dtype` is used if the config names no dtype.

    Raises UnsupportedModel, with the architecture or the field and its value, and BadConfig for missing,
    impossible or contradictory values.
    """
    family = _parse_family(raw)
    refuse_unknown_keys(raw, _FAMILY_KEYS[family])
    _refuse_activation(raw)
    heads, kv_heads, head_dim = _parse_heads(raw, family)
    attention_bias = flag(raw, "attention_bias", default=False)
    num_layers = positive_int(raw, "num_hidden_layers")
    return ModelConfig(
        family=family,
        hidden_size=positive_int(raw, "hidden_size"),
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive_int(raw, "vocab_size"),
        max_position_embeddings=positive_int(raw, "max_position_embeddings"),
        rms_norm_eps=positive_float(raw, "rms_norm_eps"),
        rope=parse_rope(raw),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", default=False),
        dtype=_parse_dtype(raw, stored_dtype),
        qkv_bias=attention_bias or family is ModelFamily.QWEN2,
        o_bias=attention_bias,
        mlp_bias=flag(raw, "mlp_bias", default=False),
        qk_norm=family is ModelFamily.QWEN3,
        layer_windows=parse_layer_windows(raw, num_layers, windowed_by_default=family is ModelFamily.MISTRAL),
    )


def _parse_family(raw: RawConfig) -> ModelFamily:
    """Return the family in `architectures` and `model_type`, which must agree; one may be missing."""
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise BadConfig(f"config field 'architectures' must be a list, is {named!r}")
    for architecture in named:
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            legal = ", ".join(_ARCHITECTURES)
            raise UnsupportedModel(f"architecture {architecture!r} is not supported (supported: {legal})")
    families = {_ARCHITECTURES[architecture] for architecture in named}
    model_type = text(raw, "model_type")
    if model_type is not None:
        families.add(_family_of(model_type))
    if len(families) != 1:
        raise BadConfig(
            "config fields 'architectures' and 'model_type' must name one model,"
            f" got {named!r} and {model_type!r}"
        )
    return families.pop()


def _family_of(model_type: str) -> ModelFamily:
    try:
        return ModelFamily(model_type)
    except ValueError:
        legal = ", ".join(family.value for family in ModelFamily)
        message = f"model type {model_type!r} is not supported (supported: {legal})"
        raise UnsupportedModel(message) from None


def _refuse_activation(raw: RawConfig) -> None:
    activation = text(raw, "hidden_act")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(
            f"config field 'hidden_act' = {activation!r} is not supported (supported: silu)"
        )


def _parse_heads(raw: RawConfig, family: ModelFamily) -> tuple[int, int, int]:
    """Return attention heads, KV heads and head width; defaults as in transformers' config classes."""
    heads = positive_int(raw, "num_attention_heads")
    if "num_key_value_heads" not in raw and family is not ModelFamily.LLAMA:
        raise BadConfig("config field 'num_key_value_heads' is missing")
    kv_heads = positive_int(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadConfig(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = positive_int(raw, "head_dim", _default_head_dim(raw, family, heads))
    if head_dim % 2:
        raise BadConfig(f"head_dim {head_dim} is odd; rotary embeddings rotate pairs")
    return heads, kv_heads, head_dim


def _default_head_dim(raw: RawConfig, family: ModelFamily, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return 0
    if family is ModelFamily.QWEN3:
        return 128
    hidden_size = positive_int(raw, "hidden_size")
    if hidden_size % heads:
        raise BadConfig(
            f"hidden_size {hidden_size} is not a multiple of {heads} attention heads, and head_dim is missing"
        )
    return hidden_size // heads


def _parse_dtype(raw: RawConfig, stored: DType | None) -> DType:
    names = {name for key in ("dtype", "torch_dtype") if (name := text(raw, key)) is not None}
    dtypes = {DType.from_name(name) for name in names}
    if len(dtypes) > 1:
        raise BadConfig(f"config fields 'dtype' and 'torch_dtype' contradict: {', '.join(sorted(names))}")
    if dtypes:
        return dtypes.pop()
    if stored is None:
        raise BadConfig("config field 'dtype' is missing")
    return stored
