"""Multi-head latent attention in config.json."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.blueprint import Indexer, Latent, Norm, NormKind
from checkpoint.config_fields import RawConfig, flag, natural_int, positive_float, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture, IndexRule, LatentRule
from checkpoint.rope_config import (
    FULL,
    QueryGrowth,
    RopeConfig,
    RopeKind,
    parse_query_growth,
    parse_ropes,
    yarn_mscale,
)

_LATENT_EPS = 1e-6
"""Of the norms of latents: transformers passes them none, whatever `rms_norm_eps` is."""


_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Names of layers with an indexer in `layer_types`, new and old ones of transformers."""
_FULL, _SHARED = "full", "shared"
_INDEX_LETTERS = {"F": _FULL, "S": _SHARED}


def parse_latent_layers(raw: RawConfig, row: Architecture, rule: LatentRule, num_layers: int) -> list[Latent]:
    """Return the mixer of each layer. Raises like `parse_latent`."""
    mixer = parse_latent(raw, row, rule)
    if rule.indexer is None:
        return [mixer] * num_layers
    listed = raw.get("layer_types")
    if listed is not None and (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or any(name not in _INDEXED for name in listed)
    ):
        raise UnsupportedModel(
            f"config field 'layer_types' = {listed!r} is not supported for {row.model_type!r}, only"
            f" {num_layers} times {_INDEXED[0]!r} is"
        )
    shared = replace(mixer, indexer=None)
    return [mixer if has_own else shared for has_own in _own_indexers(raw, rule.indexer, num_layers)]


def _own_indexers(raw: RawConfig, rule: IndexRule, num_layers: int) -> list[bool]:
    """Whether each layer chooses tokens itself, by the rules of transformers' GlmMoeDsaConfig."""
    if not rule.can_share:
        return [True] * num_layers
    key = next((key for key in ("indexer_types", "index_topk_pattern") if raw.get(key) is not None), None)
    if key is None:
        every = max(natural_int(raw, "index_topk_freq", 1), 1)
        first = natural_int(raw, "index_skip_topk_offset", 2)
        return [max(layer - first + 1, 0) % every == 0 for layer in range(num_layers)]
    listed = raw[key]
    if key == "index_topk_pattern" and isinstance(listed, str):
        listed = [_INDEX_LETTERS.get(letter) for letter in listed]
    if (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or any(name not in (_FULL, _SHARED) for name in listed)
        or listed[0] != _FULL
    ):
        raise BadConfig(
            f"config field {key!r} must say {_FULL!r} or {_SHARED!r} for {num_layers} layers, {_FULL!r} for"
            f" the first one, is {raw[key]!r}"
        )
    return [name == _FULL for name in listed]


def _parse_indexer(raw: RawConfig, latent: Latent, rule: IndexRule, eps: float) -> Latent:
    """`latent` with its indexer; `eps` belongs to the model's norms."""
    if latent.query_rank is None:
        raise BadConfig("config field 'q_lora_rank' is null, but the indexer projects latents of queries")
    indexer = Indexer(
        num_heads=positive_int(raw, "index_n_heads"),
        head_dim=positive_int(raw, "index_head_dim"),
        norm=Norm(kind=NormKind.LAYER, eps=eps if rule.has_eps else _LATENT_EPS, has_bias=True),
        is_interleaved=rule.is_interleaved,
        rotates_end=rule.rotates_end,
    )
    if indexer.head_dim < latent.rope_dim:
        raise BadConfig(
            f"config field 'index_head_dim' is {indexer.head_dim}, the minimum is qk_rope_head_dim"
            f" {latent.rope_dim}"
        )
    return replace(latent, indexer=indexer, top_k=positive_int(raw, "index_topk"))


def parse_latent(raw: RawConfig, row: Architecture, rule: LatentRule) -> Latent:
    """Return the mixer of any layer, with an indexer of its own if the family has them.

    Raises BadConfig, and UnsupportedModel for grouped keys.
    """
    num_heads = positive_int(raw, "num_attention_heads")
    kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
    if kv_heads != num_heads and rule.reads_kv_heads:
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
        is_split=rule.is_split,
        has_sinks=rule.has_sinks,
        has_output_gate=rule.has_output_gate,
    )
    _check_widths(raw, latent, rule)
    if rule.indexer is not None:
        eps = positive_float(raw, row.norms.eps_key)
        latent = _parse_indexer(raw, latent, rule.indexer, eps)
    rope = _parse_rope(raw, row, latent, rule) if rule.is_rotated else None
    return replace(latent, rope=rope, scale=_scale(latent, rope))


def _check_widths(raw: RawConfig, latent: Latent, rule: LatentRule) -> None:
    """Widths that transformers computes whatever the config says must be those of a head, or of a part."""
    if latent.rope_dim % 2:
        raise BadConfig(f"qk_rope_head_dim {latent.rope_dim} is odd; rotary embeddings rotate pairs")
    parts = (latent.rope_dim, latent.nope_dim, latent.query_dim)
    widths = {"qk_head_dim": (latent.query_dim,)} | ({"head_dim": parts} if rule.is_rotated else {})
    for key, expected in widths.items():
        if raw.get(key) is not None and raw[key] not in expected:
            raise BadConfig(
                f"config field {key!r} = {raw[key]!r} contradicts qk_nope_head_dim {latent.nope_dim} and"
                f" qk_rope_head_dim {latent.rope_dim}, expected {' or '.join(map(str, expected))}"
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


def _scale(latent: Latent, rope: RopeConfig | None) -> float:
    """Scale of scores, with yarn's temperature.

    Source: transformers' yarn_apply_mscale, and DeepSeek-V2's modeling_deepseek.py.
    """
    scale = float(latent.query_dim**-0.5)
    if rope is None or rope.kind is RopeKind.DEFAULT or rope.mscale_all_dim is None:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
