"""Multi-head latent attention in config.json."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import Latent, Norm, QueryGrowth
from checkpoint.config_fields import RawConfig, flag, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture, LatentRule
from checkpoint.rope_config import FULL, RopeConfig, RopeKind, parse_query_growth, parse_ropes, yarn_mscale

_LATENT_EPS = 1e-6
"""Of the norms of latents: transformers passes them none, whatever `rms_norm_eps` is."""


def parse_latent(raw: RawConfig, row: Architecture, rule: LatentRule) -> Latent:
    """Return the mixer of all layers. Raises BadConfig, and UnsupportedModel for grouped keys."""
    num_heads = positive_int(raw, "num_attention_heads")
    if (kv_heads := positive_int(raw, "num_key_value_heads", num_heads)) != num_heads:
        raise UnsupportedModel(
            f"config field 'num_key_value_heads' = {kv_heads} is not supported with latent attention, only"
            f" num_attention_heads {num_heads} is"
        )
    query_rank = None if raw.get("q_lora_rank") is None else positive_int(raw, "q_lora_rank")
    growth = parse_query_growth(raw, row.rope)
    latent = Latent(
        num_heads=num_heads,
        query_rank=query_rank,
        kv_rank=positive_int(raw, "kv_lora_rank"),
        nope_dim=positive_int(raw, "qk_nope_head_dim"),
        rope_dim=positive_int(raw, "qk_rope_head_dim"),
        value_dim=positive_int(raw, "v_head_dim"),
        rope=None,
        scale=1.0,
        norm=Norm(kind=row.norms.kind, eps=_LATENT_EPS),
        query_growth=None if growth is None else QueryGrowth(beta=growth[0], original_length=growth[1]),
        has_bias=flag(raw, "attention_bias", default=False),
    )
    _check_widths(raw, latent, rule)
    rope = _parse_rope(raw, row, latent, rule)
    return replace(latent, rope=rope, scale=_scale(latent, rope))


def _check_widths(raw: RawConfig, latent: Latent, rule: LatentRule) -> None:
    """Widths that transformers writes, but does not read, must be those that it computes."""
    if latent.rope_dim % 2:
        raise BadConfig(f"qk_rope_head_dim {latent.rope_dim} is odd; rotary embeddings rotate pairs")
    head_dim = latent.query_dim if rule.is_head_whole else latent.rope_dim
    for key, width in (("qk_head_dim", latent.query_dim), ("head_dim", head_dim)):
        if raw.get(key) is not None and raw[key] != width:
            raise BadConfig(
                f"config field {key!r} = {raw[key]!r} contradicts qk_nope_head_dim {latent.nope_dim} and"
                f" qk_rope_head_dim {latent.rope_dim}, expected {width}"
            )


def _parse_rope(raw: RawConfig, row: Architecture, latent: Latent, rule: LatentRule) -> RopeConfig:
    partial = latent.rope_dim / latent.query_dim
    head_dim = latent.query_dim if rule.is_head_whole else latent.rope_dim
    rope_rule = row.rope
    if rule.is_head_whole:
        rope_rule = replace(rope_rule, partial=partial)
    rope = parse_ropes(raw, rope_rule, {FULL: head_dim})[FULL]
    if (rope.width or head_dim) != latent.rope_dim:
        raise BadConfig(
            f"config field 'partial_rotary_factor' rotates {rope.width or head_dim} elements of a head,"
            f" expected qk_rope_head_dim {latent.rope_dim}"
        )
    is_interleaved = flag(raw, "rope_interleave", default=row.rope.is_interleaved)
    return replace(rope, width=None, is_interleaved=is_interleaved)


def _scale(latent: Latent, rope: RopeConfig) -> float:
    """Scale of scores, with yarn's temperature.

    Source: transformers' yarn_apply_mscale, and DeepSeek-V2's modeling_deepseek.py.
    """
    scale = float(latent.query_dim**-0.5)
    if rope.kind is RopeKind.DEFAULT or rope.mscale_all_dim is None:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
