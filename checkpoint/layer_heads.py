"""Keys and values of layers with full attention that differ from those of windowed layers, in config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkpoint.config_fields import RawConfig, flag, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture
from checkpoint.rope_config import FULL, SLIDING

_OVERRIDES = ("num_key_value_heads", "head_dim")
_LAYER = re.compile("[0-9]{1,9}")
"""transformers pads the number of a layer with zeros."""


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """KV heads of a layer, their width in elements, and whether its values are its projected keys."""

    num_kv_heads: int
    head_dim: int
    value_is_key: bool = False


def parse_layer_heads(
    raw: RawConfig, row: Architecture, usual: LayerHeads, windows: tuple[int | None, ...]
) -> dict[str, LayerHeads]:
    """Return the heads of each layer type; `usual` are those of the whole model, `windows` those of layers.

    Other heads of layers with full attention are given by `global_head_dim` and, with `attention_k_eq_v`,
    `num_global_key_value_heads`, or by `per_layer_config`, as transformers writes it. Raises BadConfig, and
    UnsupportedModel for heads that differ within a layer type.
    """
    if row.global_head_dim is None:
        return {FULL: usual, SLIDING: usual}
    is_shared = flag(raw, "attention_k_eq_v", default=False)
    kv_heads = usual.num_kv_heads
    if is_shared:
        kv_heads = positive_int(raw, "num_global_key_value_heads", kv_heads)
    sizes = kv_heads, positive_int(raw, "global_head_dim", row.global_head_dim)
    if raw.get("per_layer_config") is not None:
        sizes = _overridden(raw["per_layer_config"], usual, windows)
    num_heads = positive_int(raw, "num_attention_heads")
    full = LayerHeads(*sizes, value_is_key=is_shared)
    if num_heads % full.num_kv_heads or full.head_dim % 2:
        raise BadConfig(
            f"layers with full attention have {full.num_kv_heads} KV heads of {full.head_dim} elements:"
            f" expected a divisor of num_attention_heads {num_heads}, and an even width"
        )
    return {FULL: full, SLIDING: usual}


def _overridden(given: object, usual: LayerHeads, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """KV heads and width in layers with full attention; all other layers have the usual ones."""
    by_layer = dict.fromkeys(range(len(windows)), (usual.num_kv_heads, usual.head_dim))
    for layer, changes in _changes(given, len(windows)).items():
        if unknown := changes.keys() - set(_OVERRIDES):
            raise UnsupportedModel(
                f"config field 'per_layer_config[{layer}].{min(unknown)}' is not supported"
            )
        kv_heads, head_dim = by_layer[layer]
        by_layer[layer] = (
            positive_int(changes, "num_key_value_heads", kv_heads),
            positive_int(changes, "head_dim", head_dim),
        )
    full = {by_layer[layer] for layer, window in enumerate(windows) if window is None}
    windowed = {by_layer[layer] for layer, window in enumerate(windows) if window is not None}
    if len(full) > 1 or len(windowed) > 1 or windowed - {(usual.num_kv_heads, usual.head_dim)}:
        found = ", ".join(f"{heads} KV heads of {width}" for heads, width in sorted({*full, *windowed}))
        raise UnsupportedModel(
            f"config field 'per_layer_config' gives layers of one type other heads ({found}), which is not"
            " supported: only layers with full attention may differ from windowed ones"
        )
    return full.pop() if full else (usual.num_kv_heads, usual.head_dim)


def _changes(given: object, num_layers: int) -> dict[int, dict[str, object]]:
    """The fields that each layer has of its own."""
    if not isinstance(given, dict):
        raise BadConfig(f"config field 'per_layer_config' must be an object, is {given!r}")
    found = {}
    for name, changes in given.items():
        layer = int(name) if _LAYER.fullmatch(name) else num_layers
        if layer >= num_layers or not isinstance(changes, dict):
            raise BadConfig(
                f"config field 'per_layer_config' must have objects of layers 0 to {num_layers - 1}, has"
                f" {name!r}: {changes!r}"
            )
        found[layer] = changes
    return found
