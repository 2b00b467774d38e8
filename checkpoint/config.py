"""Reads config.json into a Blueprint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from checkpoint.architectures import architecture_of
from checkpoint.block_indexer import parse_block_indexer, without_indexed
from checkpoint.block_types import MLP, MOE, block_types, with_blocks
from checkpoint.blueprint import (
    Activation,
    Attention,
    Blueprint,
    Dense,
    Experts,
    FeedForwardPlan,
    Latent,
    LayerPlan,
    Mixer,
    NoFeedForward,
    Norm,
    QkNorm,
)
from checkpoint.compressed_config import parse_compressed_layers
from checkpoint.config_fields import (
    RawConfig,
    flag,
    natural_int,
    optional_float,
    positive_float,
    positive_int,
    refuse_unknown_keys,
    text,
    unknown_key,
    unknown_keys,
    with_usual_keys,
)
from checkpoint.dtypes import DType
from checkpoint.errors import BadConfig, CheckpointError, UnsupportedModel
from checkpoint.expert_config import parse_experts, parse_hashed_layers, parse_sparse_layers
from checkpoint.family_rules import (
    Architecture,
    EmbeddingScale,
    RecurrentLayers,
    Rotation,
    SparseLayers,
    Streams,
    Windows,
)
from checkpoint.latent_config import parse_latent, parse_latent_layers
from checkpoint.layer_heads import LayerHeads, parse_layer_heads
from checkpoint.multipliers import RowScale, parse_row_scales
from checkpoint.names import TensorRole
from checkpoint.ngram_config import parse_ngrams
from checkpoint.ngrams import NgramEmbedding
from checkpoint.quantization_config import parse_quantization
from checkpoint.recurrent import Mamba2, Recurrent
from checkpoint.recurrent_config import parse_block_mixers, parse_recurrent, parse_recurrent_layers
from checkpoint.rope_config import (
    FULL,
    SLIDING,
    QueryGrowth,
    parse_query_growth,
    parse_ropes,
    scaled_length,
)
from checkpoint.stream_config import Connection, parse_collapse, parse_connection
from checkpoint.wrappers import text_config

_DEFAULT_MAX_WINDOW_LAYERS = 28
"""Default in transformers' Qwen2Config and Qwen3Config."""


def parse_config(
    raw: Mapping[str, object], *, stored_dtype: DType | None = None, row: Architecture | None = None
) -> Blueprint:
    """Validate a parsed config.json, or the part of its text model. `stored_dtype` is used if it names none.

    `row` is the family's, by default the one that the config names.

    Raises UnsupportedModel, with the architecture or the field and its value, and BadConfig for missing,
    impossible or contradictory values.
    """
    raw = text_config(raw)
    row = row or architecture_of(raw)
    refuse_unknown_keys(raw, row.known_keys)
    raw = with_blocks({**row.defaults, **with_usual_keys(raw, row.other_keys)}, row)
    _refuse_other_values(raw, row)
    _refuse_contradictions(raw, row)
    layers = _parse_layers(raw, row)
    hidden_size = positive_int(raw, "hidden_size")
    caps, final_norm = row.scales.has_caps, _parse_norm(raw, row)
    return Blueprint(
        model_type=row.model_type,
        hidden_size=hidden_size,
        vocab_size=positive_int(raw, "vocab_size"),
        max_position_embeddings=positive_int(raw, "max_position_embeddings"),
        layers=layers,
        final_norm=None if row.streams is Streams.GATED else final_norm,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", default=row.is_tied),
        dtype=parse_dtype(raw, stored_dtype),
        legal_cuts=frozenset(number for number in range(1, len(layers)) if _may_begin(layers[number])),
        num_draft_layers=natural_int(raw, "num_nextn_predict_layers", 0),
        quantization=parse_quantization(raw),
        names=row.names,
        embedding_scale=_parse_embedding_scale(raw, row, hidden_size),
        logit_scale=_parse_logit_scale(raw, row),
        logit_softcap=_cap(raw, "final_logit_softcapping", row.scales.logit_cap) if caps else None,
        collapse=None if row.streams is None else parse_collapse(raw, row.streams, final_norm.eps),
        scaled_length=scaled_length(raw, is_counted=row.rope.is_per_type),
    )


def _may_begin(layer: LayerPlan) -> bool:
    """Whether a stage may begin with `layer`: it needs nothing of earlier layers but hidden states."""
    return not (isinstance(layer.mixer, Latent) and layer.mixer.needs_choice)


def _refuse_other_values(raw: RawConfig, row: Architecture) -> None:
    for key, value in row.fixed.items():
        if raw.get(key) is not None and raw[key] != value:
            raise UnsupportedModel(
                f"config field {key!r} = {raw[key]!r} is not supported for {row.model_type!r},"
                f" only {value!r} is{row.reasons.get(key, '')}"
            )


def _refuse_contradictions(raw: RawConfig, row: Architecture) -> None:
    for key, paths in row.same.items():
        for path in paths:
            value: object = raw
            for part in path.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None and raw.get(key) is not None and raw[key] != value:
                raise BadConfig(f"config fields {key!r} = {raw[key]!r} and {path!r} = {value!r} contradict")


def config_errors(raw: RawConfig) -> tuple[CheckpointError, ...]:
    """Return the errors of a parsed config.json: every unknown field, and one error of each part."""
    try:
        raw = text_config(raw)
        row = architecture_of(raw)
    except CheckpointError as error:
        return (error,)
    unknown = unknown_keys(raw, row.known_keys)
    errors: list[CheckpointError] = [unknown_key(raw, key) for key in unknown]
    given = {key: value for key, value in raw.items() if key not in unknown}
    try:
        known = with_blocks({**row.defaults, **with_usual_keys(given, row.other_keys)}, row)
    except CheckpointError as error:
        return (*errors, error)
    for parse in (
        lambda: [positive_int(known, key) for key in ("hidden_size", "vocab_size")],
        lambda: positive_int(known, "max_position_embeddings"),
        lambda: _parse_mixers(known, row, positive_int(known, "num_hidden_layers")),
        lambda: _parse_norm(known, row),
        lambda: _parse_feed_forwards(known, row, positive_int(known, "num_hidden_layers")),
        lambda: parse_quantization(known),
        lambda: parse_dtype(known, DType.F32),
        lambda: parse_config(given, stored_dtype=DType.F32),  # checks between parts
    ):
        try:
            parse()
        except CheckpointError as error:
            errors.append(error)
    return tuple({str(error): error for error in errors}.values())


def _parse_layers(raw: RawConfig, row: Architecture) -> tuple[LayerPlan, ...]:
    num_layers = positive_int(raw, "num_hidden_layers")
    mixers = _parse_mixers(raw, row, num_layers)
    feed_forwards = _parse_feed_forwards(raw, row, num_layers)
    beside = _parse_beside(raw, row)
    norm, connection = _parse_norm(raw, row), _parse_connection(raw, row)
    num_streams = 1 if connection is None else connection.num_streams
    ngrams = _parse_ngrams(raw, row, mixers, num_streams)
    plan = LayerPlan(
        mixer=mixers[0],
        beside=beside,
        row_scales=_parse_scales(raw, mixers[0], beside) if row.scales.has_row_scales else (),
        feed_forward=feed_forwards[0],
        norm=norm,
        placement=row.norms.placement,
        residual_scale=positive_float(raw, "residual_multiplier", 1.0) if row.scales.has_multipliers else 1.0,
        has_scale=row.has_layer_scale,
        connection=connection,
    )
    return tuple(
        replace(plan, mixer=mixer, feed_forward=feed_forward, ngrams=ngrams.get(layer))
        for layer, (mixer, feed_forward) in enumerate(zip(mixers, feed_forwards, strict=True))
    )


def _parse_beside(raw: RawConfig, row: Architecture) -> Mamba2 | None:
    if row.mamba is None or row.mamba.layers is not RecurrentLayers.BESIDE:
        return None
    recurrent = parse_recurrent(raw, row, _parse_norm(raw, row).eps)
    assert isinstance(recurrent, Mamba2), "a row with Mamba2"
    return recurrent


def _parse_scales(raw: RawConfig, mixer: Mixer, beside: Mamba2 | None) -> tuple[RowScale, ...]:
    assert isinstance(mixer, Attention) and beside is not None, "a family with both"
    hidden_size = positive_int(raw, "hidden_size")
    sizes = {TensorRole.Q: mixer.q_size} | dict.fromkeys((TensorRole.K, TensorRole.V), mixer.kv_size)
    sizes |= dict.fromkeys((TensorRole.O, TensorRole.STATE_OUT, TensorRole.DOWN), hidden_size)
    return parse_row_scales(raw, beside, sizes | {TensorRole.GATE: positive_int(raw, "intermediate_size")})


def _parse_connection(raw: RawConfig, row: Architecture) -> Connection | None:
    return None if row.streams is None else parse_connection(raw, row.streams, _parse_norm(raw, row).eps)


def _parse_ngrams(
    raw: RawConfig, row: Architecture, mixers: Sequence[Mixer], num_streams: int
) -> dict[int, NgramEmbedding]:
    """Of the layers that have them."""
    if not row.has_ngrams:
        return {}
    are_recurrent = tuple(isinstance(mixer, Recurrent) for mixer in mixers)
    return parse_ngrams(raw, are_recurrent, num_streams=num_streams, eps=_parse_norm(raw, row).eps)


def _parse_mixers(raw: RawConfig, row: Architecture, num_layers: int) -> list[Mixer]:
    if row.is_compressed:
        return [*parse_compressed_layers(raw, row, num_layers)]
    if row.latent is not None and row.latent.indexer is not None:
        return [*parse_latent_layers(raw, row, row.latent, num_layers)]
    recurrent = parse_recurrent(raw, row, _parse_norm(raw, row).eps)
    if recurrent is None or row.recurrent_layers is RecurrentLayers.BESIDE:
        return _parse_attentions(raw, row, num_layers)
    if row.recurrent_layers is RecurrentLayers.BLOCKS:
        attention = _parse_attentions({**raw, "layer_types": None}, row, 1)[0]
        return parse_block_mixers(raw, recurrent, attention)
    if row.has_block_indexer:
        raw = {**raw, "layer_types": without_indexed(raw.get("layer_types"))}
    are_recurrent = parse_recurrent_layers(raw, row.recurrent_layers, num_layers)
    others = {key: value for key, value in raw.items() if key != "layer_types"}
    attentions = _parse_attentions(others, row, num_layers)
    return [
        recurrent if is_recurrent else mixer
        for is_recurrent, mixer in zip(are_recurrent, attentions, strict=True)
    ]


def _parse_attentions(raw: RawConfig, row: Architecture, num_layers: int) -> list[Mixer]:
    windows = parse_layer_windows(raw, num_layers, row.windows, row.window_pattern)
    mixer = _parse_mixer(raw, row)
    if not isinstance(mixer, Attention):
        return [mixer] * num_layers
    heads = parse_layer_heads(raw, row, LayerHeads(mixer.num_kv_heads, mixer.head_dim), windows)
    ropes = parse_ropes(raw, row.rope, {name: own.head_dim for name, own in heads.items()})
    mixers: list[Mixer] = []
    for window, is_rotated in zip(windows, _rotated_layers(raw, row, windows), strict=True):
        layer_type = FULL if window is None else SLIDING
        own = heads[layer_type]
        own_mixer = replace(
            mixer,
            window=window,
            rope=ropes[layer_type] if is_rotated else None,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            value_is_key=own.value_is_key,
        )
        mixers.append(_with_indexer(own_mixer, raw, row))
    return mixers


def _with_indexer(mixer: Attention, raw: RawConfig, row: Architecture) -> Attention:
    """`mixer` with its indexer, if the family has them."""
    if not row.has_block_indexer:
        return mixer
    rotated = mixer.head_dim if mixer.rope is None else mixer.rope.width or mixer.head_dim
    return replace(mixer, indexer=parse_block_indexer(raw, _parse_norm(raw, row).eps, rotated=rotated))


def _parse_mixer(raw: RawConfig, row: Architecture) -> Mixer:
    """The mixer of any layer; attention lacks its window and rotation."""
    return _parse_attention(raw, row) if row.latent is None else parse_latent(raw, row, row.latent)


def _parse_feed_forwards(raw: RawConfig, row: Architecture, num_layers: int) -> list[FeedForwardPlan]:
    if (rule := row.experts) is None:
        return [_parse_dense(raw, row)] * num_layers
    is_sparse = parse_sparse_layers(raw, rule.layers, num_layers)
    experts = None
    if any(is_sparse):
        experts = parse_experts(raw, rule, _parse_activation(raw, row), _parse_norm(raw, row))
    if rule.layers is SparseLayers.BLOCKS:
        return _parse_blocks(raw, row, experts)
    if rule.has_hashes and experts is not None:
        return [*parse_hashed_layers(raw, experts, num_layers)]
    dense = None if all(is_sparse) else _parse_dense(raw, row)
    chosen = (experts if has_experts else dense for has_experts in is_sparse)
    return [feed_forward for feed_forward in chosen if feed_forward is not None]


def _parse_blocks(raw: RawConfig, row: Architecture, experts: Experts | None) -> list[FeedForwardPlan]:
    """The feed-forwards of layers that have a mixer or a feed-forward."""
    types = block_types(raw)
    plans: dict[str, FeedForwardPlan] = {}
    if MLP in types:
        plans[MLP] = _parse_dense(raw, row)
    if experts is not None:
        plans[MOE] = experts
    return [plans.get(name, NoFeedForward()) for name in types]


def _parse_attention(raw: RawConfig, row: Architecture) -> Attention:
    """Attention of any layer, without window and rotation."""
    heads, kv_heads, head_dim = _parse_heads(raw, row)
    growth = parse_query_growth(raw, row.rope)
    biases, scales, rule = row.biases, row.scales, row.norms
    has_qk_norm = rule.qk_key is None or flag(raw, rule.qk_key, default=False)
    qk_norm = rule.qk_span and QkNorm(
        norm=_parse_norm(raw, row), span=rule.qk_span, is_after_rotation=rule.is_qk_after_rotation
    )
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=None,
        scale=_parse_attention_scale(raw, row, head_dim),
        softcap=_cap(raw, "attn_logit_softcapping", scales.score_cap) if scales.has_caps else None,
        qk_norm=qk_norm if has_qk_norm else None,
        query_growth=None if growth is None else QueryGrowth(beta=growth[0], original_length=growth[1]),
        qkv_bias=_bias(raw, biases.qkv, default=biases.qkv_default),
        o_bias=_bias(raw, biases.o, default=biases.default),
        value_norm_eps=_parse_norm(raw, row).eps if rule.has_value_norm else None,
        has_sinks=row.has_sinks,
        has_output_gate=row.has_output_gate,
    )


def _bias(raw: RawConfig, key: str | None, *, default: bool) -> bool:
    return default if key is None else flag(raw, key, default=default)


def _cap(raw: RawConfig, key: str, default: float | None) -> float | None:
    return optional_float(raw, key) if key in raw else default


def _parse_norm(raw: RawConfig, row: Architecture) -> Norm:
    rule = row.norms
    return Norm(kind=rule.kind, eps=positive_float(raw, rule.eps_key), has_bias=rule.has_bias)


def _parse_dense(raw: RawConfig, row: Architecture) -> Dense:
    biases = row.biases
    return Dense(
        width=positive_int(raw, row.width_key),
        activation=_parse_activation(raw, row),
        is_gated=row.is_gated,
        has_bias=_bias(raw, biases.feed_forward, default=biases.default),
    )


def _parse_activation(raw: RawConfig, row: Architecture) -> Activation:
    name = text(raw, row.activation_key) or row.activation
    try:
        return Activation("silu" if name == "swish" else name)
    except ValueError:
        legal = ", ".join(activation.value for activation in Activation)
        message = f"config field {row.activation_key!r} = {name!r} is not supported (supported: {legal})"
        raise UnsupportedModel(message) from None


def _parse_attention_scale(raw: RawConfig, row: Architecture, head_dim: int) -> float:
    scales = row.scales
    if scales.attention is not None:
        return scales.attention
    if scales.query_scalar is not None:
        return float(positive_float(raw, "query_pre_attn_scalar", scales.query_scalar) ** -0.5)
    if scales.has_multipliers:
        return positive_float(raw, "attention_multiplier", 1.0)
    return float(head_dim**-0.5)


def _parse_embedding_scale(raw: RawConfig, row: Architecture, hidden_size: int) -> float:
    match row.scales.embedding:
        case EmbeddingScale.NONE:
            return 1.0
        case EmbeddingScale.MULTIPLIER:
            return positive_float(raw, "embedding_multiplier", 1.0)
        case EmbeddingScale.ROOT:
            return math.sqrt(hidden_size)


def _parse_logit_scale(raw: RawConfig, row: Architecture) -> float:
    scales = row.scales
    if scales.logit_scale is not None:
        return positive_float(raw, "logit_scale", scales.logit_scale)
    if scales.has_row_scales:
        return positive_float(raw, "lm_head_multiplier", 1.0)
    return 1.0 / positive_float(raw, "logits_scaling", 1.0) if scales.has_multipliers else 1.0


def parse_layer_windows(
    raw: RawConfig, num_layers: int, rule: Windows, pattern: int = 0
) -> tuple[int | None, ...]:
    """Return each layer's window in positions (the query's own included); None for full attention.

    With ALL, `sliding_window` alone gives every layer the window; with SWITCHED, `use_sliding_window` must be
    true. With PATTERN, `layer_types` selects the
    layers, or else every n-th has full attention (`sliding_window_pattern`, by default `pattern`), and with
    PATTERN_THEN_FULL also the last one, whatever `layer_types` says. Otherwise
    `use_sliding_window` must be true, and `layer_types`, or else `max_window_layers` (the number of leading
    layers with full attention), selects them.

    Raises UnsupportedModel for another layer type, BadConfig for contradictory fields.
    """
    window = _parse_window(raw, rule)
    implied = _implied_windows(raw, num_layers, rule, pattern, window)
    listed = _parse_layer_types(raw, num_layers, window)
    if rule is Windows.PATTERN_THEN_FULL:
        return (*(listed or implied)[:-1], None)
    if listed is None:
        if rule is Windows.LISTED and window is not None:
            raise BadConfig("config field 'layer_types' is missing, but 'use_sliding_window' is true")
        return implied
    if rule in (Windows.ALL, Windows.SWITCHED, Windows.NONE) and listed != implied:
        raise UnsupportedModel(
            "config field 'layer_types' mixes kinds of layers, which is not supported for this architecture"
        )
    return listed


def _parse_window(raw: RawConfig, rule: Windows) -> int | None:
    switched = (Windows.SWITCHED, Windows.SELECTED, Windows.LISTED)
    is_enabled = (
        rule is Windows.ALL
        or rule.has_pattern
        or (rule in switched and flag(raw, "use_sliding_window", default=False))
    )
    if not is_enabled or raw.get("sliding_window") is None:
        return None
    return positive_int(raw, "sliding_window")


def _implied_windows(
    raw: RawConfig, num_layers: int, rule: Windows, pattern: int, window: int | None
) -> tuple[int | None, ...]:
    if rule.has_pattern and window is not None and raw.get("layer_types") is None:
        every = positive_int(raw, "sliding_window_pattern", pattern)
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    full_layers = _num_full_layers(raw) if rule is Windows.SELECTED else 0
    return tuple(window if layer >= full_layers else None for layer in range(num_layers))


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
        if name not in (FULL, SLIDING):
            raise UnsupportedModel(f"config field 'layer_types[{layer}]' = {name!r} is not supported")
        if name == SLIDING and window is None:
            raise BadConfig(f"config field 'layer_types[{layer}]' = {name!r}, but no sliding window is set")
    return tuple(window if name == SLIDING else None for name in types)


def _rotated_layers(raw: RawConfig, row: Architecture, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Whether each layer has rotary embeddings."""
    match row.rotation:
        case Rotation.ALL:
            return (True,) * len(windows)
        case Rotation.WINDOWED:
            return tuple(window is not None for window in windows)
        case Rotation.WINDOWED_OR_ALL:
            has_none = raw.get("sliding_window") is None
            return tuple(has_none or window is not None for window in windows)
        case Rotation.NONE:
            return (False,) * len(windows)
        case Rotation.NAMED:
            return (_is_rotary(raw),) * len(windows)
        case Rotation.LISTED:
            return _parse_rotated(raw, len(windows))


def _is_rotary(raw: RawConfig) -> bool:
    name = text(raw, "position_embedding_type") or "nope"
    if name not in ("rope", "nope"):
        raise UnsupportedModel(f"config field 'position_embedding_type' = {name!r} is not supported")
    return name == "rope"


def _parse_rotated(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    listed = raw.get("no_rope_layers")
    if listed is None:
        every = positive_int(raw, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers or any(x not in (0, 1) for x in listed):
        raise BadConfig(
            f"config field 'no_rope_layers' must list 0 or 1 for {num_layers} layers, is {listed!r}"
        )
    return tuple(bool(x) for x in listed)


def _parse_heads(raw: RawConfig, row: Architecture) -> tuple[int, int, int]:
    """Number of heads, of KV heads, and their width, by the defaults of transformers' config classes."""
    heads = positive_int(raw, "num_attention_heads")
    if "num_key_value_heads" not in raw and not row.has_kv_heads_default:
        raise BadConfig("config field 'num_key_value_heads' is missing")
    kv_heads = positive_int(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadConfig(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = positive_int(raw, "head_dim", _default_head_dim(raw, row, heads))
    if head_dim % 2:
        raise BadConfig(f"head_dim {head_dim} is odd; rotary embeddings rotate pairs")
    return heads, kv_heads, head_dim


def _default_head_dim(raw: RawConfig, row: Architecture, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return 0
    if row.head_dim is not None:
        return row.head_dim
    hidden_size = positive_int(raw, "hidden_size")
    if hidden_size % heads:
        raise BadConfig(
            f"hidden_size {hidden_size} is not a multiple of {heads} attention heads, and head_dim is missing"
        )
    return hidden_size // heads


def parse_dtype(raw: RawConfig, stored: DType | None) -> DType:
    """Return the dtype that config.json names, or else `stored`. Raises BadConfig without either."""
    names = {name for key in ("dtype", "torch_dtype") if (name := text(raw, key)) is not None}
    dtypes = {DType.from_name(name) for name in names}
    if len(dtypes) > 1:
        raise BadConfig(f"config fields 'dtype' and 'torch_dtype' contradict: {', '.join(sorted(names))}")
    if dtypes:
        return dtypes.pop()
    if stored is None:
        raise BadConfig("config field 'dtype' is missing")
    return stored
