"""Recurrent mixers in config.json: which layers have one, and their sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from checkpoint.block_types import FORMER_TYPES, LINEAR, block_types
from checkpoint.blueprint import Mixer
from checkpoint.config_fields import RawConfig, flag, positive_int, shown, text
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture, MambaRule, RecurrentLayers
from checkpoint.recurrent import DeltaLayout, GatedDelta, GateNorm, KimiDelta, Mamba2, NoMixer, Recurrent
from checkpoint.rope_config import FULL


def parse_recurrent(raw: RawConfig, row: Architecture, eps: float) -> Recurrent | None:
    """Return the mixer of the recurrent layers of a family that has them; `eps` belongs to its norms.

    Raises BadConfig, and UnsupportedModel for an activation.
    """
    if row.delta is not None:
        return _parse_delta(raw, row.delta, eps)
    if row.has_kimi_delta:
        return replace(_parse_kimi_delta(raw, eps), has_rates=row.has_rates)
    return None if row.mamba is None else _parse_mamba(raw, row.mamba, eps)


def parse_recurrent_layers(raw: RawConfig, rule: RecurrentLayers, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is recurrent.

    Raises UnsupportedModel for another layer type, and without a layer of full attention; BadConfig.
    """
    listed = _parse_types(raw, num_layers)
    if rule is RecurrentLayers.INDICES:
        are_recurrent = _besides(raw, "attn_layer_indices", num_layers)
        if listed is not None and listed != are_recurrent:
            raise BadConfig("config fields 'attn_layer_indices' and 'layer_types' contradict each other")
    elif rule is RecurrentLayers.NUMBERED:
        are_recurrent = _numbered(raw, num_layers, listed)
    elif listed is not None:
        are_recurrent = listed
    elif rule is RecurrentLayers.INTERVAL:
        every = positive_int(raw, "full_attention_interval", 4)
        are_recurrent = tuple((layer + 1) % every != 0 for layer in range(num_layers))
    else:
        are_recurrent = (True,) * num_layers
    if all(are_recurrent):
        raise UnsupportedModel(
            f"all {num_layers} layers are recurrent: at least one must have full attention"
        )
    return are_recurrent


def parse_block_mixers(raw: RawConfig, recurrent: Recurrent, attention: Mixer) -> list[Mixer]:
    """The mixers of layers that have a mixer or a feed-forward.

    Raises UnsupportedModel without a layer of each mixer.
    """
    types = block_types(raw)
    if LINEAR not in types or FULL not in types:
        raise UnsupportedModel(
            f"{len(types)} layers have types {', '.join(sorted(set(types)))}: at least one must have full"
            " attention, and one must be recurrent"
        )
    mixers: dict[str, Mixer] = {LINEAR: recurrent, FULL: attention}
    return [mixers.get(name, NoMixer()) for name in types]


def _parse_types(raw: RawConfig, num_layers: int) -> tuple[bool, ...] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise BadConfig(f"config field 'layer_types' must list {num_layers} layers, is {types!r}")
    names = [FORMER_TYPES.get(name, name) if isinstance(name, str) else name for name in types]
    for layer, name in enumerate(names):
        if name not in (FULL, LINEAR):
            raise UnsupportedModel(f"config field 'layer_types[{layer}]' = {types[layer]!r} is not supported")
    return tuple(name == LINEAR for name in names)


def _besides(raw: RawConfig, key: str, num_layers: int) -> tuple[bool, ...]:
    """All layers but those that `key` lists."""
    listed = raw.get(key) or []
    if not isinstance(listed, list) or any(type(x) is not int or not 0 <= x < num_layers for x in listed):
        raise BadConfig(
            f"config field {key!r} must list layers from 0 to {num_layers - 1}, is {shown(listed)}"
        )
    return tuple(layer not in listed for layer in range(num_layers))


def _numbered(raw: RawConfig, num_layers: int, listed: tuple[bool, ...] | None) -> tuple[bool, ...]:
    """By two lists of layers from 1 on, `listed`, or transformers' default."""
    keys = ("kda_layers", "full_attn_layers")
    if all(raw.get(key) is None for key in keys):
        return listed or tuple(layer % 4 != 0 or layer == 0 for layer in range(num_layers))
    recurrent, full = (raw.get(key) for key in keys)
    both = [*recurrent, *full] if isinstance(recurrent, list) and isinstance(full, list) else []
    if any(type(number) is not int for number in both) or sorted(both) != list(range(1, num_layers + 1)):
        raise BadConfig(
            f"config fields 'kda_layers' and 'full_attn_layers' must list layers 1 to {num_layers} once, are"
            f" {shown(recurrent)} and {shown(full)}"
        )
    assert isinstance(recurrent, list), "checked above"
    are_recurrent = tuple(layer + 1 in recurrent for layer in range(num_layers))
    if listed is not None and listed != are_recurrent:
        raise BadConfig("config fields 'kda_layers' and 'layer_types' contradict each other")
    return are_recurrent


def _check_activation(raw: RawConfig, key: str) -> None:
    activation = text(raw, key) or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config field {key!r} = {activation!r} is not supported, only 'silu' is")


_LARGEST_FLOAT32 = 3.4028234e38
"""No time step exceeds it."""


def _check_no_limit(raw: RawConfig) -> None:
    """Raise UnsupportedModel for limits of time steps: transformers has them in prompts, not in decodes."""
    limits = raw.get("time_step_limit")
    if limits is None or (isinstance(limits, list) and len(limits) == 2):
        low, high = limits or (0.0, math.inf)
        is_endless = isinstance(high, int | float) and high > _LARGEST_FLOAT32
        if low == 0.0 and (is_endless or high == {"__float__": "Infinity"}):
            return
    raise UnsupportedModel(
        f"config field 'time_step_limit' = {limits!r} is not supported, only [0.0, Infinity] is"
    )


def _kernel_size(raw: RawConfig, key: str) -> int:
    kernel_size = positive_int(raw, key, 4)
    if kernel_size < 2:
        raise BadConfig(f"{key} is {kernel_size}, the minimum is 2")
    return kernel_size


def _parse_delta(raw: RawConfig, layout: DeltaLayout, eps: float) -> GatedDelta:
    _check_activation(raw, "hidden_act")
    num_heads = positive_int(raw, "linear_num_value_heads", 32)
    num_key_heads = positive_int(raw, "linear_num_key_heads", 16)
    if num_heads % num_key_heads:
        raise BadConfig(
            f"linear_num_value_heads {num_heads} is not a multiple of linear_num_key_heads {num_key_heads}"
        )
    return GatedDelta(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=positive_int(raw, "linear_key_head_dim", 128),
        value_dim=positive_int(raw, "linear_value_head_dim", 128),
        kernel_size=_kernel_size(raw, "linear_conv_kernel_dim"),
        norm_eps=eps,
        has_sigmoid_gate=_has_sigmoid_gate(raw),
        layout=layout,
    )


def _parse_kimi_delta(raw: RawConfig, eps: float) -> KimiDelta:
    """Latents of decays and gates are as wide as a head."""
    _check_activation(raw, "hidden_act")
    head_dim = positive_int(raw, "linear_head_dim", 128)
    return KimiDelta(
        num_heads=positive_int(raw, "linear_num_heads", 32),
        head_dim=head_dim,
        rank=head_dim,
        kernel_size=_kernel_size(raw, "linear_conv_kernel_dim"),
        norm_eps=eps,
    )


def _has_sigmoid_gate(raw: RawConfig) -> bool:
    name = text(raw, "output_gate_type") or "silu"
    if name not in ("silu", "swish", "sigmoid"):
        raise UnsupportedModel(f"config field 'output_gate_type' = {name!r} is not supported")
    return name == "sigmoid"


def _parse_mamba(raw: RawConfig, rule: MambaRule, eps: float) -> Mamba2:
    _check_activation(raw, rule.activation_key)
    _check_no_limit(raw)
    num_heads = positive_int(raw, rule.heads_key, 128)
    gate_norm = _gate_norm(raw) if rule.has_norm_keys else GateNorm.AFTER
    num_groups = positive_int(raw, rule.groups_key, 1)
    if num_heads % num_groups:
        raise BadConfig(f"{rule.heads_key} {num_heads} is not a multiple of {rule.groups_key} {num_groups}")
    return Mamba2(
        num_heads=num_heads,
        head_dim=_mamba_head_dim(raw, rule, num_heads),
        num_head_groups=num_groups,
        state_size=positive_int(raw, rule.state_key, 256),
        kernel_size=_kernel_size(raw, rule.kernel_key),
        norm_eps=0.0 if gate_norm is GateNorm.NONE else eps,
        gate_norm=gate_norm,
        has_conv_bias=flag(raw, rule.conv_bias_key, default=True),
        has_bias=flag(raw, rule.bias_key, default=False),
        has_out_bias=flag(raw, rule.out_bias_key or rule.bias_key, default=False),
        has_rates=rule.has_rates,
    )


def _gate_norm(raw: RawConfig) -> GateNorm:
    if not flag(raw, "mamba_rms_norm", default=False):
        return GateNorm.NONE
    is_before = flag(raw, "mamba_norm_before_gate", default=True)
    return GateNorm.BEFORE if is_before else GateNorm.AFTER


def _mamba_head_dim(raw: RawConfig, rule: MambaRule, num_heads: int) -> int:
    """Without `expand_key`, it is given; with it, all heads are `expand_key` times hidden_size wide."""
    if rule.expand_key is None:
        return positive_int(raw, rule.head_dim_key)
    is_given = rule.width_key is not None and raw.get(rule.width_key) is not None
    if is_given:
        width = positive_int(raw, str(rule.width_key))
    else:
        width = positive_int(raw, rule.expand_key, 2) * positive_int(raw, "hidden_size")
    is_automatic = raw.get(rule.head_dim_key) in (None, "auto")
    head_dim = width // num_heads if is_automatic else positive_int(raw, rule.head_dim_key)
    if head_dim * num_heads != width:
        raise BadConfig(
            f"{rule.heads_key} {num_heads} times {rule.head_dim_key} {head_dim} is not"
            f" {rule.width_key if is_given else f'{rule.expand_key} times hidden_size,'} {width}"
        )
    return head_dim
