"""Families without a row: what transformers computes, described by config.json and the headers alone.

Sizes come from the headers, and keys, values and windows from the fields that nearly all config classes of
transformers share. A worker compares them with the layers that transformers builds, before it reads weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from checkpoint.architectures import MODEL_TYPES
from checkpoint.blueprint import Attention, Blueprint, LayerPlan, Norm, Opaque, OuterTensors
from checkpoint.config import parse_dtype
from checkpoint.config_fields import RawConfig, flag, natural_int, positive_int, text
from checkpoint.dtypes import DType
from checkpoint.errors import MissingTensor, UnexpectedTensor, UnsupportedModel
from checkpoint.headers import TensorEntry
from checkpoint.rope_config import FULL, SLIDING, scaled_length
from checkpoint.wrappers import WRAPPERS, is_wrapper

_IN_LAYER = re.compile(r"(?P<prefix>(?:.*?\.)?(?:layers|h|blocks)\.)(?P<layer>[0-9]{1,9})\.(?P<name>.+)")
_BEFORE = re.compile(r"(^|\.)(embed|wte|tok_emb|word_emb)")
"""Modules that compute the input of the first layer."""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
_UNUSED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias_mask")

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("quantization_config", "compression_config"),
        "its quantised weights are read only for families with a row",
    ),
    "is_encoder_decoder": "it is an encoder-decoder, stages have decoder layers only",
    "num_kv_shared_layers": "layers reuse keys and values of other layers, which a cut would separate",
    "hidden_size_per_layer_input": "every layer reads embeddings of its own, which no stage hands on",
    "hc_mult": "several residual streams cross a cut, stages hand on one",
    "per_layer_config": "layers have keys of different widths in one block group",
    "attention_chunk_size": "chunked attention is not supported",
    "cross_attention_layers": "it has cross-attention, stages have decoder layers only",
    "add_cross_attention": "it has cross-attention, stages have decoder layers only",
}
"""Fields that say that a family cannot be cut or cached; null, false and 0 are harmless."""


def has_row(raw: RawConfig) -> bool:
    """Whether the model's family has a row, whatever else is wrong with its config."""
    model_type = raw.get("model_type")
    types = {row.model_type for row in WRAPPERS} if is_wrapper(raw) else MODEL_TYPES
    return not isinstance(model_type, str) or model_type in types


@dataclass(slots=True)
class _Sorted:
    """Tensors of a checkpoint by the stage that needs them."""

    prefix: str = ""
    layers: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    before: dict[str, tuple[int, ...]] = field(default_factory=dict)
    after: dict[str, tuple[int, ...]] = field(default_factory=dict)


def refuse_other(raw: RawConfig) -> None:
    """Raise UnsupportedModel, by its name, for a field that keeps a family from being cut or cached."""
    model_type = text(raw, "model_type")
    if is_wrapper(raw):
        raise UnsupportedModel(
            f"model type {model_type!r} has several modalities ('text_config'): text models inside others are"
            " served only for families with a row"
        )
    named = raw.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        if not str(name).endswith(_CAUSAL):
            raise UnsupportedModel(
                f"architecture {name!r} is not supported: families without a row are served as"
                f" {' or '.join(f'*{end}' for end in _CAUSAL)}"
            )
    for key, reason in _REFUSED.items():
        if raw.get(key):
            raise UnsupportedModel(f"model type {model_type!r} with {key!r} is not supported: {reason}")
    kinds = raw.get("layer_types") or []
    for layer, kind in enumerate(kinds if isinstance(kinds, list) else ()):
        if kind not in (FULL, SLIDING):
            raise UnsupportedModel(
                f"model type {model_type!r} with layer_types[{layer}] = {kind!r} is not supported:"
                f" transformers' layers are served with {FULL!r} and {SLIDING!r} only"
            )


def parse_other(raw: RawConfig, tensors: Mapping[str, TensorEntry]) -> Blueprint:
    """Describe a model of a family without a row by its config and its tensors.

    Raises UnsupportedModel for what cannot be cut or cached, BadConfig for fields, MissingTensor and
    UnexpectedTensor for layers that are missing or too many.
    """
    refuse_other(raw)
    num_layers = positive_int(raw, "num_hidden_layers")
    found = _sort(tensors)
    _check_layers(found, num_layers)
    vocab_size, hidden_size = positive_int(raw, "vocab_size"), positive_int(raw, "hidden_size")
    dtypes = {entry.dtype for entry in tensors.values()}
    stored = dtypes.pop() if len(dtypes) == 1 else None
    matrix = {name: shape for name, shape in found.before.items() if shape == (vocab_size, hidden_size)}
    is_tied = not any(_HEAD.search(name) for name in found.after)
    layers = tuple(_layer(raw, found.layers[index], window) for index, window in enumerate(_windows(raw)))
    return Blueprint(
        model_type=text(raw, "model_type") or "",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=positive_int(raw, "max_position_embeddings"),
        layers=layers,
        final_norm=_UNREAD_NORM,
        tie_word_embeddings=is_tied,
        dtype=parse_dtype(raw, stored if isinstance(stored, DType) else None),
        legal_cuts=frozenset(range(1, num_layers)),
        outer=OuterTensors(
            in_layer=f"{found.prefix}{{layer}}.",
            before=tuple(found.before.items()),
            after=tuple((found.after | matrix if is_tied else found.after).items()),
        ),
        scaled_length=scaled_length(raw),
    )


_UNREAD_NORM = Norm(eps=1.0)
"""transformers computes the norms."""


def _sort(tensors: Mapping[str, TensorEntry]) -> _Sorted:
    found = _Sorted()
    for name, entry in sorted(tensors.items()):
        if not isinstance(entry.dtype, DType):
            raise UnsupportedModel(
                f"tensor {name} has dtype {entry.dtype.value}, families without a row have bf16, f16 or f32"
            )
        if name.endswith(_UNUSED):
            continue
        if (place := _IN_LAYER.fullmatch(name)) is not None:
            if found.prefix not in ("", place["prefix"]):
                raise UnexpectedTensor(
                    f"checkpoint has layers {found.prefix}* and {place['prefix']}*, a decoder has one list"
                )
            found.prefix = place["prefix"]
            found.layers[int(place["layer"])][place["name"]] = entry.shape
        elif _BEFORE.search(name) and not _HEAD.search(name):
            found.before[name] = entry.shape
        else:
            found.after[name] = entry.shape
    return found


def _check_layers(found: _Sorted, num_layers: int) -> None:
    if missing := [layer for layer in range(num_layers) if layer not in found.layers]:
        raise MissingTensor(f"checkpoint lacks layer {missing[0]} of {num_layers}")
    if extra := sorted(layer for layer in found.layers if layer >= num_layers):
        raise UnexpectedTensor(
            f"checkpoint has layer {extra[0]}, the config has {num_layers} layers (num_hidden_layers)"
        )
    if not found.before:
        raise MissingTensor("checkpoint has no embeddings by any name that is known")


def _layer(raw: RawConfig, tensors: Mapping[str, tuple[int, ...]], window: int | None) -> LayerPlan:
    heads = positive_int(raw, "num_attention_heads")
    query_rows = tensors.get("self_attn.q_proj.weight", (positive_int(raw, "hidden_size"),))[0]
    head_dim = positive_int(raw, "head_dim", max(query_rows // heads, 1))
    key_rows = tensors.get("self_attn.k_proj.weight", (heads * head_dim,))[0]
    attention = Attention(
        num_heads=heads,
        num_kv_heads=positive_int(raw, "num_key_value_heads", max(key_rows // head_dim, 1)),
        head_dim=head_dim,
        rope=None,
        scale=head_dim**-0.5,
        window=window,
    )
    inside = Opaque(tensors=tuple(tensors.items()), inner_elements=_inner_elements(raw, tensors))
    return LayerPlan(mixer=attention, feed_forward=inside, norm=_UNREAD_NORM)


def _inner_elements(raw: RawConfig, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """Inputs and outputs of the widest products of one token, and of each expert that it chooses, twice.

    Measured: of 6 layers 768 wide with 7 experts, a step of 512 tokens took 150 MB, dense ones 40 MB.
    """
    widest = max((sum(shape[-2:]) for shape in tensors.values() if len(shape) > 1), default=0)
    keys = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    chosen = max((natural_int(raw, key, 0) for key in keys if isinstance(raw.get(key), int)), default=0)
    counted = sum(prod(shape[:-2]) for shape in tensors.values() if len(shape) > 2)
    return 4 * widest * (1 + 2 * chosen) + counted


def _windows(raw: RawConfig) -> list[int | None]:
    """Window of each layer; None for full attention."""
    num_layers, kinds = positive_int(raw, "num_hidden_layers"), raw.get("layer_types")
    is_off = not flag(raw, "use_sliding_window", default=True) or raw.get("sliding_window") is None
    window = None if is_off else positive_int(raw, "sliding_window")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [window if kind == SLIDING else None for kind in kinds]
    return [window] * num_layers
