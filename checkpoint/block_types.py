"""Layers that have a mixer or a feed-forward in config.json, one type each."""

from __future__ import annotations

from checkpoint.config_fields import MAX_LAYERS, RawConfig, positive_int, text
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture, RecurrentLayers
from checkpoint.rope_config import FULL

LINEAR = "linear_attention"
"""Layer type in config.json."""
FORMER_TYPES = {"attention": FULL, "mamba": LINEAR}
"""Names of layer types in configs of transformers 4."""
MLP, MOE = "mlp", "moe"
"""Types of layers without a mixer."""
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
"""Those of hybrid_override_pattern."""


def with_blocks(raw: RawConfig, row: Architecture) -> RawConfig:
    """`raw` with the number of layers of a family whose layers have types; others as they are.

    Raises BadConfig, and UnsupportedModel for another type.
    """
    if row.mamba is None or row.mamba.layers is not RecurrentLayers.BLOCKS:
        return raw
    num_layers = len(block_types(raw))
    if positive_int(raw, "num_hidden_layers", num_layers) != num_layers:
        raise BadConfig(
            f"config field 'num_hidden_layers' is {raw['num_hidden_layers']}, but types list {num_layers}"
            " layers"
        )
    return {**raw, "num_hidden_layers": num_layers}


def block_types(raw: RawConfig) -> tuple[str, ...]:
    """The type of each layer: LINEAR, FULL, MLP or MOE. Raises like `with_blocks`."""
    pattern, listed = text(raw, "hybrid_override_pattern"), raw.get("layers_block_type")
    found: list[tuple[str, ...]] = []
    if pattern is not None:
        found.append(_by_name("hybrid_override_pattern", list(pattern), _LETTERS))
    if listed is not None:
        if not isinstance(listed, list):
            raise BadConfig(f"config field 'layers_block_type' must be a list, is {listed!r}")
        found.append(_by_name("layers_block_type", listed, FORMER_TYPES | {x: x for x in _LETTERS.values()}))
    if not found:
        raise BadConfig("config field 'layers_block_type' is missing")
    if len(set(found)) > 1:
        raise BadConfig("config fields 'hybrid_override_pattern' and 'layers_block_type' contradict")
    return found[0]


def _by_name(key: str, names: list[object] | list[str], types: dict[str, str]) -> tuple[str, ...]:
    if not 0 < len(names) <= MAX_LAYERS:
        raise BadConfig(f"config field {key!r} lists {len(names)} layers, expected 1 to {MAX_LAYERS}")
    for layer, name in enumerate(names):
        if not isinstance(name, str) or name not in types:
            raise UnsupportedModel(f"config field '{key}[{layer}]' = {name!r} is not supported")
    return tuple(types[str(name)] for name in names)
