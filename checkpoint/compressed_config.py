"""Attention to a window and to entries of earlier tokens in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkpoint.compressed import Compressed, Compressor, EntryIndexer
from checkpoint.config_fields import RawConfig, natural_int, optional_float, positive_float, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.family_rules import Architecture
from checkpoint.rope_config import FULL, RopeConfig, RopeKind, parse_ropes

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
"""Types of layers: without a compressor, with one whose entries an indexer chooses, and with one alone."""
_RATIOS = {_SPARSE: 4, _HEAVY: 128}
"""Tokens of an entry. Default of transformers' config class; DeepSeek's configs list them by layer."""
_OLD_RATIO_KEYS = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_MAIN, _COMPRESS = "main", "compress"
"""Names of the rotary embeddings of layers without and with a compressor."""
_THETAS = {_MAIN: ("rope_theta", 10_000.0), _COMPRESS: ("compress_rope_theta", 160_000.0)}


def parse_compressed_layers(raw: RawConfig, row: Architecture, num_layers: int) -> list[Compressed]:
    """Return the mixer of each layer. Raises BadConfig, and UnsupportedModel for an unknown type of layer."""
    types, ropes = _layer_types(raw, num_layers), _ropes(raw, row)
    plain = _without_compressor(raw, ropes[_MAIN])
    compressors = {name: _compressor(raw, name, plain) for name in set(types) - {_SLIDING}}
    return [
        plain if name == _SLIDING else replace(plain, rope=ropes[_COMPRESS], compressor=compressors[name])
        for name in types
    ]


def _layer_types(raw: RawConfig, num_layers: int) -> list[str]:
    """By layer_types, or compress_ratios (0 without a compressor), or as transformers' config class does."""
    listed, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if listed is None and ratios is not None:
        names = {0: _SLIDING} | {ratio: name for name, ratio in _RATIOS.items()}
        # The list goes on with draft layers.
        if (
            not isinstance(ratios, list)
            or len(ratios) < num_layers
            or any(type(ratio) is not int or ratio not in names for ratio in ratios)
        ):
            raise UnsupportedModel(
                f"config field 'compress_ratios' = {ratios!r:.120} is not supported, only one of"
                f" {sorted(names)} for each of {num_layers} layers is"
            )
        return [names[ratio] for ratio in ratios[:num_layers]]
    if listed is None:
        others = (_SPARSE if layer % 2 else _HEAVY for layer in range(max(num_layers - 2, 0)))
        return [*[_HEAVY] * min(num_layers, 2), *others]
    known = (_SLIDING, _SPARSE, _HEAVY)
    if not isinstance(listed, list) or len(listed) != num_layers or any(name not in known for name in listed):
        raise UnsupportedModel(
            f"config field 'layer_types' = {listed!r:.120} is not supported for {raw.get('model_type')!r},"
            f" only {num_layers} times one of {', '.join(known)} is"
        )
    return list(listed)


def _without_compressor(raw: RawConfig, rope: RopeConfig) -> Compressed:
    heads, head_dim = positive_int(raw, "num_attention_heads"), positive_int(raw, "head_dim")
    groups = positive_int(raw, "o_groups")
    if heads * head_dim % groups:
        raise BadConfig(f"{heads} heads of {head_dim} are no multiple of o_groups {groups}")
    return Compressed(
        num_heads=heads,
        head_dim=head_dim,
        query_rank=positive_int(raw, "q_lora_rank"),
        rope=rope,
        scale=float(head_dim**-0.5),
        window=positive_int(raw, "sliding_window"),
        norm_eps=positive_float(raw, "rms_norm_eps"),
        num_head_groups=groups,
        group_rank=positive_int(raw, "o_lora_rank"),
    )


def _compressor(raw: RawConfig, name: str, plain: Compressed) -> Compressor:
    """The compressor of layers of one type. What it needs must be in the window."""
    rates = raw.get("compress_rates") or _RATIOS
    if not isinstance(rates, Mapping) or rates.keys() - _RATIOS.keys():
        raise BadConfig(
            f"config field 'compress_rates' must have numbers for {' and '.join(_RATIOS)}, is {rates!r:.120}"
        )
    ratio = positive_int(rates, name, _RATIOS[name])
    ratio = positive_int(raw, _OLD_RATIO_KEYS[name], ratio)
    compressor = Compressor(ratio=ratio)
    if name == _SPARSE:
        compressor = Compressor(ratio=ratio, has_overlap=True, indexer=_indexer(raw, plain))
    if compressor.span > plain.window:
        raise UnsupportedModel(
            f"config field 'sliding_window' = {plain.window} is not supported with entries of"
            f" {compressor.span} tokens, which must be in the window"
        )
    return compressor


def _indexer(raw: RawConfig, plain: Compressed) -> EntryIndexer:
    indexer = EntryIndexer(
        num_heads=positive_int(raw, "index_n_heads"),
        head_dim=positive_int(raw, "index_head_dim"),
        num_chosen=positive_int(raw, "index_topk"),
    )
    if indexer.head_dim < plain.rope_dim:
        raise BadConfig(
            f"config field 'index_head_dim' is {indexer.head_dim}, the minimum is the {plain.rope_dim}"
            " rotated elements of a head"
        )
    return indexer


def _ropes(raw: RawConfig, row: Architecture) -> dict[str, RopeConfig]:
    """The rotary embedding of layers without and with a compressor, which alone may be scaled.

    rope_parameters has both by name, or the scaling of the latter, as rope_scaling has; then yarn has no
    temperature. The last elements of a head are rotated.
    """
    head_dim, partial = positive_int(raw, "head_dim"), _partial(raw, row)
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise BadConfig(f"config fields of rotary embeddings must be objects, one is {given!r:.120}")
    is_nested = any(name in given for name in _THETAS)
    if is_nested:
        _check_nested(raw, given)
    ropes = {}
    for name, (theta_key, theta) in _THETAS.items():
        own = given[name] if is_nested else given if name == _COMPRESS else {}
        top = {key: value for key, value in raw.items() if key != "rope_scaling"}
        top |= {"rope_parameters": own, "partial_rotary_factor": partial}
        top["rope_theta"] = None if is_nested else positive_float(raw, theta_key, theta)
        rope = parse_ropes(top, replace(row.rope, theta=theta), {FULL: head_dim})[FULL]
        if not is_nested and rope.kind is RopeKind.YARN and rope.attention_factor is None:
            rope = replace(rope, attention_factor=1.0)
        ropes[name] = replace(rope, width=rope.width or head_dim)
    return ropes


def _check_nested(raw: RawConfig, given: RawConfig) -> None:
    """Raise BadConfig unless `given` has an object for each rotary embedding, and no field contradicts it."""
    nested = {name: own for name, own in given.items() if name in _THETAS and isinstance(own, Mapping)}
    if not set(given) == set(nested) == set(_THETAS):
        raise BadConfig(
            f"config field 'rope_parameters' must have {' and '.join(map(repr, _THETAS))} with objects and no"
            f" other field, has {sorted(given)!r:.120}"
        )
    for name, (key, _) in _THETAS.items():
        if raw.get(key) is not None and raw[key] != nested[name].get("rope_theta", raw[key]):
            raise BadConfig(
                f"config fields {key!r} = {raw[key]!r:.120} and 'rope_parameters.{name}.rope_theta' ="
                f" {nested[name]['rope_theta']!r:.120} contradict"
            )
    if raw.get("rope_scaling") is not None and raw["rope_scaling"] != raw.get("rope_parameters"):
        raise BadConfig("config fields 'rope_scaling' and 'rope_parameters' contradict: leave out the former")


def _partial(raw: RawConfig, row: Architecture) -> float:
    """Rotated part of a head, by default that of `row`."""
    head_dim, width = positive_int(raw, "head_dim"), natural_int(raw, "qk_rope_head_dim", 0)
    partial = optional_float(raw, "partial_rotary_factor")
    if partial is None:
        return width / head_dim if width else row.rope.partial or 1.0
    if not 0 < partial <= 1:
        raise BadConfig(f"config field 'partial_rotary_factor' = {partial} is not above 0 and up to 1")
    if width and int(head_dim * partial) != width:
        raise BadConfig(
            f"config fields 'qk_rope_head_dim' = {width} and 'partial_rotary_factor' = {partial} contradict"
            f" with heads of {head_dim}"
        )
    return partial
