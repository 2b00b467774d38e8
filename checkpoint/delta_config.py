"""Gated DeltaNet in config.json: which layers have it, and its sizes."""

from __future__ import annotations

from checkpoint.config_fields import RawConfig, positive_int, text
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.recurrent import DeltaLayout, GatedDelta
from checkpoint.rope_config import FULL

LINEAR = "linear_attention"
"""Layer type in config.json."""


def parse_delta_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is recurrent: by layer_types, or all but every full_attention_interval-th.

    Raises UnsupportedModel for another layer type, and without a layer of full attention; BadConfig.
    """
    types = raw.get("layer_types")
    if types is None:
        every = positive_int(raw, "full_attention_interval", 4)
        are_recurrent = tuple((layer + 1) % every != 0 for layer in range(num_layers))
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise BadConfig(f"config field 'layer_types' must list {num_layers} layers, is {types!r}")
        for layer, name in enumerate(types):
            if name not in (FULL, LINEAR):
                raise UnsupportedModel(f"config field 'layer_types[{layer}]' = {name!r} is not supported")
        are_recurrent = tuple(name == LINEAR for name in types)
    if all(are_recurrent):
        raise UnsupportedModel(
            f"all {num_layers} layers are recurrent: at least one must have full attention"
        )
    return are_recurrent


def parse_delta(raw: RawConfig, layout: DeltaLayout, eps: float) -> GatedDelta:
    """Return the mixer of the recurrent layers. Raises BadConfig, and UnsupportedModel for an activation."""
    activation = text(raw, "hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config field 'hidden_act' = {activation!r} is not supported, only 'silu' is")
    num_heads = positive_int(raw, "linear_num_value_heads", 32)
    num_key_heads = positive_int(raw, "linear_num_key_heads", 16)
    if num_heads % num_key_heads:
        raise BadConfig(
            f"linear_num_value_heads {num_heads} is not a multiple of linear_num_key_heads {num_key_heads}"
        )
    kernel_size = positive_int(raw, "linear_conv_kernel_dim", 4)
    if kernel_size < 2:
        raise BadConfig(f"linear_conv_kernel_dim is {kernel_size}, the minimum is 2")
    return GatedDelta(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=positive_int(raw, "linear_key_head_dim", 128),
        value_dim=positive_int(raw, "linear_value_head_dim", 128),
        kernel_size=kernel_size,
        norm_eps=eps,
        layout=layout,
    )
