"""Which layers see only a sliding window of positions."""

from __future__ import annotations

from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.fields import RawConfig, flag, positive_int

_DEFAULT_MAX_WINDOW_LAYERS = 28
"""What transformers' Qwen2Config and Qwen3Config assume where config.json does not say."""


def parse_layer_windows(
    raw: RawConfig, num_layers: int, *, windowed_by_default: bool
) -> tuple[int | None, ...]:
    """The window of every layer in positions (the query's own included), None where a layer sees all.

    With `windowed_by_default` (mistral) `sliding_window` alone makes every layer windowed. Otherwise
    `use_sliding_window` must be true, and `layer_types`, or else `max_window_layers` (the first so many
    layers see all), says which layers are meant. Raises UnsupportedModel for another layer type, BadConfig
    for fields that contradict each other.
    """
    window = _parse_window(raw, windowed_by_default=windowed_by_default)
    full_layers = 0 if windowed_by_default else _num_full_layers(raw)
    implied = tuple(window if layer >= full_layers else None for layer in range(num_layers))
    listed = _parse_layer_types(raw, num_layers, window)
    if listed is None:
        return implied
    if windowed_by_default and listed != implied:
        raise UnsupportedModel(
            "config field 'layer_types' mixes layers, which this architecture does not compute"
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
            raise BadConfig(f"config field 'layer_types[{layer}]' = {name!r} without a sliding window in use")
    return tuple(window if name == "sliding_attention" else None for name in types)
