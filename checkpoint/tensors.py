"""Tensor names, shapes and sizes of a model, by its plan and its table of names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from checkpoint.blueprint import (
    Attention,
    Blueprint,
    Dense,
    Experts,
    Indexer,
    Latent,
    LayerPlan,
    NoFeedForward,
    Norm,
    NormSpan,
    Opaque,
    OuterTensors,
    Placement,
)
from checkpoint.compressed import Compressed
from checkpoint.compressed_shapes import POOLED_ROLES, compressed_shapes
from checkpoint.dtypes import DType, PackedDType, StoredDType
from checkpoint.names import STACK_ROLES, TensorRole
from checkpoint.ngrams import HASH_KINDS
from checkpoint.quantization import BlockTensors, PackedMatrix, StoredTensor, packed_matrices
from checkpoint.recurrent import GatedDelta, GateNorm, KimiDelta, Mamba2, NoMixer

Shapes = dict[str, tuple[int, ...]]
RoleShapes = dict[tuple[TensorRole, str], tuple[int, ...]]
"""Shape of tensor "weight" or "bias" of a role; matrices are [out, in], as in torch's linear, and
[experts, out, in] for experts.
"""
_MLP = (TensorRole.GATE, TensorRole.UP, TensorRole.DOWN)
_SHARED_MLP = (TensorRole.SHARED_GATE, TensorRole.SHARED_UP, TensorRole.SHARED_DOWN)
_LATENT = (
    *(TensorRole.Q_DOWN, TensorRole.Q_UP, TensorRole.KV_DOWN, TensorRole.KV_UP),
    TensorRole.OUTPUT_GATE,
)
_INDEX = (TensorRole.INDEX_Q, TensorRole.INDEX_K, TensorRole.INDEX_WEIGHT, TensorRole.INDEX_QK)
_DELTA = (TensorRole.DELTA_QKV, TensorRole.DELTA_Z, TensorRole.DELTA_B, TensorRole.DELTA_A)
_KDA_DOWN = (TensorRole.KDA_DECAY_DOWN, TensorRole.KDA_GATE_DOWN)
_KDA_UP = (TensorRole.KDA_DECAY_UP, TensorRole.KDA_GATE_UP)
_MATRIX_ROLES = frozenset(
    {TensorRole.Q, TensorRole.K, TensorRole.V, TensorRole.O, TensorRole.ROUTER, TensorRole.SHARED_WEIGHT}
    | {TensorRole.MAMBA_IN, TensorRole.STATE_OUT, TensorRole.EXPERTS_IN, TensorRole.EXPERTS_OUT}
    | {TensorRole.O_GROUPS, TensorRole.NGRAM_KEY, TensorRole.NGRAM_VALUE, *POOLED_ROLES}
).union(_DELTA, {TensorRole.KDA_B}, _KDA_DOWN, _KDA_UP, _LATENT, _INDEX, _MLP, _SHARED_MLP, STACK_ROLES)
CHOICE_BIAS_KIND = "e_score_correction_bias"
"""Kind of tensor of `TensorRole.CHOICE_BIAS`."""
HASH_KIND = "tid2eid"
"""Kind of tensor of `TensorRole.HASH_TABLE`."""
SINKS_KIND = "sinks"
"""Kind of tensor of `TensorRole.SINKS`."""
LAYER_SCALE_KIND = "layer_scalar"
"""Kind of tensor of `TensorRole.LAYER_SCALE`."""
ROUTER_NORM_KIND, EXPERT_SCALE_KIND = "scale", "per_expert_scale"
"""Kinds of tensor of `TensorRole.ROUTER_NORM` and `TensorRole.EXPERT_SCALE`."""
DECAY_KIND, DT_KIND = "A_log", "dt_bias"
"""Kinds of tensor of `TensorRole.STATE_DECAY` and `TensorRole.STATE_DT`."""
SKIP_KIND = "D"
"""Kind of tensor of `TensorRole.MAMBA_SKIP`."""
STREAM_ROLES = (TensorRole.MIXER_STREAMS, TensorRole.FFN_STREAMS)
"""Connections of sub-layers to residual streams; the kinds of their tensors are in `checkpoint.streams`."""
BRANCH_NORMS = (TensorRole.EXPERTS_NORM, TensorRole.EXPERTS_OUT_NORM, TensorRole.SHARED_OUT_NORM)
"""Norms of `Experts.branch_norm`."""


def role_shapes(hidden_size: int, plan: LayerPlan) -> RoleShapes:
    """Return the shape of each tensor of a layer."""
    shapes: RoleShapes = {}
    for role in norm_roles(plan):
        shapes |= _norm(role, (hidden_size,), plan.norm)
    if plan.has_scale:
        shapes[TensorRole.LAYER_SCALE, LAYER_SCALE_KIND] = (1,)
    shapes |= _connections(plan, hidden_size)
    if plan.ngrams is not None:
        shapes |= plan.ngrams.shapes
    if isinstance(plan.mixer, Latent):
        shapes |= _latent(plan.mixer, hidden_size)
    elif isinstance(plan.mixer, Compressed):
        shapes |= compressed_shapes(plan.mixer, hidden_size)
        shapes[TensorRole.SINKS, SINKS_KIND] = (plan.mixer.num_heads,)
    elif isinstance(plan.mixer, GatedDelta):
        shapes |= _delta(plan.mixer, hidden_size)
    elif isinstance(plan.mixer, KimiDelta):
        shapes |= _kimi_delta(plan.mixer, hidden_size)
    elif isinstance(plan.mixer, Mamba2):
        shapes |= _mamba(plan.mixer, hidden_size)
    elif not isinstance(plan.mixer, NoMixer):
        shapes |= _attention(plan.mixer, hidden_size)
    if plan.beside is not None:
        shapes |= _mamba(plan.beside, hidden_size)
    if isinstance(plan.feed_forward, NoFeedForward):
        return shapes
    if isinstance(plan.feed_forward, Experts):
        return shapes | _experts(plan.feed_forward, hidden_size)
    assert isinstance(plan.feed_forward, Dense), "roles of a layer that only transformers knows"
    return shapes | _mlp(plan.feed_forward, hidden_size, _MLP)


def _connections(plan: LayerPlan, hidden_size: int) -> RoleShapes:
    """Of the sub-layers that the layer has."""
    if plan.connection is None:
        return {}
    is_absent = {
        TensorRole.MIXER_STREAMS: isinstance(plan.mixer, NoMixer),
        TensorRole.FFN_STREAMS: isinstance(plan.feed_forward, NoFeedForward),
    }
    kinds = plan.connection.shapes(hidden_size).items()
    return {(role, kind): shape for role in STREAM_ROLES if not is_absent[role] for kind, shape in kinds}


def _attention(attention: Attention, hidden_size: int) -> RoleShapes:
    shapes: RoleShapes = {}
    projections = {TensorRole.Q: attention.q_rows, TensorRole.K: attention.kv_size}
    if not attention.value_is_key:
        projections[TensorRole.V] = attention.kv_size
    for role, width in projections.items():
        shapes |= _projection(role, width, hidden_size, bias=attention.qkv_bias)
    if (qk_norm := attention.qk_norm) is not None:
        for role, heads in (
            (TensorRole.Q_NORM, attention.num_heads),
            (TensorRole.K_NORM, attention.num_kv_heads),
        ):
            shapes |= _norm(role, _norm_shape(qk_norm.span, heads, attention.head_dim), qk_norm.norm)
    shapes |= _projection(TensorRole.O, hidden_size, attention.q_size, bias=attention.o_bias)
    if attention.has_sinks:
        shapes[TensorRole.SINKS, SINKS_KIND] = (attention.num_heads,)
    if (indexer := attention.indexer) is not None:
        shapes |= _projection(TensorRole.INDEX_QK, indexer.num_rows, hidden_size, bias=False)
        norms = (TensorRole.INDEX_Q_NORM, TensorRole.INDEX_K_NORM)
        shapes |= {(role, "weight"): (indexer.head_dim,) for role in norms}
    return shapes


def _latent(latent: Latent, hidden_size: int) -> RoleShapes:
    rank, bias = latent.query_rank, latent.has_bias
    if rank is None:
        shapes = _projection(TensorRole.Q, latent.q_size, hidden_size, bias=False)
    else:
        shapes = _projection(TensorRole.Q_DOWN, rank, hidden_size, bias=bias)
        shapes |= _norm(TensorRole.Q_LATENT_NORM, (rank,), latent.norm)
        shapes |= _projection(TensorRole.Q_UP, latent.q_size, rank, bias=False)
    shapes |= _projection(TensorRole.KV_DOWN, latent.page_shape.width, hidden_size, bias=bias)
    shapes |= _norm(TensorRole.KV_LATENT_NORM, (latent.kv_rank,), latent.norm)
    if latent.is_split:
        shapes[TensorRole.HEAD_KEYS, "weight"] = (latent.num_heads, latent.kv_rank, latent.nope_dim)
        shapes[TensorRole.HEAD_VALUES, "weight"] = (latent.num_heads, latent.value_dim, latent.kv_rank)
    else:
        expanded = latent.num_heads * (latent.nope_dim + latent.value_dim)
        shapes |= _projection(TensorRole.KV_UP, expanded, latent.kv_rank, bias=False)
    if latent.indexer is not None:
        assert rank is not None, "an indexer without latents of queries"
        shapes |= _indexer(latent.indexer, rank, hidden_size)
    if latent.has_sinks:
        shapes[TensorRole.SINKS, SINKS_KIND] = (latent.num_heads,)
    if latent.has_output_gate:
        shapes |= _projection(TensorRole.OUTPUT_GATE, latent.o_size, hidden_size, bias=False)
    return shapes | _projection(TensorRole.O, hidden_size, latent.o_size, bias=bias)


def _delta(delta: GatedDelta, hidden_size: int) -> RoleShapes:
    shapes: RoleShapes = {}
    for role, width in zip(
        _DELTA, (delta.conv_size, delta.o_size, delta.num_heads, delta.num_heads), strict=True
    ):
        shapes |= _projection(role, width, hidden_size, bias=False)
    shapes |= _around_state(delta)
    shapes[TensorRole.STATE_NORM, "weight"] = (delta.value_dim,)
    return shapes | _projection(TensorRole.STATE_OUT, hidden_size, delta.o_size, bias=False)


def _kimi_delta(mixer: KimiDelta, hidden_size: int) -> RoleShapes:
    shapes: RoleShapes = {}
    width, heads = mixer.q_size, mixer.num_heads
    inputs = dict.fromkeys((TensorRole.Q, TensorRole.K, TensorRole.V), width)
    inputs |= {TensorRole.KDA_B: heads} | dict.fromkeys(_KDA_DOWN, mixer.rank)
    for role, rows in inputs.items():
        shapes |= _projection(role, rows, hidden_size, bias=False)
    for role in _KDA_UP:
        shapes |= _projection(role, width, mixer.rank, bias=False)
    for role in (TensorRole.CONV_Q, TensorRole.CONV_K, TensorRole.CONV_V):
        shapes[role, "weight"] = (width, 1, mixer.kernel_size)
    shapes[TensorRole.STATE_DECAY, DECAY_KIND] = (1, 1, heads, 1)
    shapes[TensorRole.STATE_DT, DT_KIND] = (width,)
    shapes[TensorRole.STATE_NORM, "weight"] = (mixer.head_dim,)
    return shapes | _projection(TensorRole.STATE_OUT, hidden_size, width, bias=False)


def _around_state(mixer: GatedDelta | Mamba2) -> RoleShapes:
    """The convolution, decays and time steps."""
    return {
        (TensorRole.STATE_CONV, "weight"): (mixer.conv_size, 1, mixer.kernel_size),
        (TensorRole.STATE_DECAY, DECAY_KIND): (mixer.num_heads,),
        (TensorRole.STATE_DT, DT_KIND): (mixer.num_heads,),
    }


def _mamba(mamba: Mamba2, hidden_size: int) -> RoleShapes:
    shapes = _projection(TensorRole.MAMBA_IN, mamba.in_size, hidden_size, bias=mamba.has_bias)
    shapes |= _around_state(mamba)
    if mamba.has_conv_bias:
        shapes[TensorRole.STATE_CONV, "bias"] = (mamba.conv_size,)
    shapes[TensorRole.MAMBA_SKIP, SKIP_KIND] = (mamba.num_heads,)
    if mamba.gate_norm is not GateNorm.NONE:
        shapes[TensorRole.STATE_NORM, "weight"] = (mamba.o_size,)
    return shapes | _projection(TensorRole.STATE_OUT, hidden_size, mamba.o_size, bias=mamba.has_out_bias)


def _indexer(indexer: Indexer, query_rank: int, hidden_size: int) -> RoleShapes:
    shapes = _projection(TensorRole.INDEX_Q, indexer.q_size, query_rank, bias=False)
    shapes |= _projection(TensorRole.INDEX_K, indexer.head_dim, hidden_size, bias=False)
    shapes |= _norm(TensorRole.INDEX_K_NORM, (indexer.head_dim,), indexer.norm)
    return shapes | _projection(TensorRole.INDEX_WEIGHT, indexer.num_heads, hidden_size, bias=False)


def _mlp(dense: Dense, hidden_size: int, roles: tuple[TensorRole, TensorRole, TensorRole]) -> RoleShapes:
    """`roles` are gate, up and down."""
    gate, up, down = roles
    shapes: RoleShapes = {}
    for role in (gate, up) if dense.is_gated else (up,):
        shapes |= _projection(role, dense.width, hidden_size, bias=dense.has_bias)
    return shapes | _projection(down, hidden_size, dense.width, bias=dense.has_bias)


def _experts(experts: Experts, hidden_size: int) -> RoleShapes:
    shapes = _projection(TensorRole.ROUTER, experts.count, hidden_size, bias=experts.router.has_bias)
    if experts.router.has_choice_bias:
        shapes[TensorRole.CHOICE_BIAS, CHOICE_BIAS_KIND] = (experts.count,)
    if experts.router.num_hashed_tokens is not None:
        shapes[TensorRole.HASH_TABLE, HASH_KIND] = (experts.router.num_hashed_tokens, experts.per_token)
    inner, outer = experts.width, experts.latent_width or hidden_size
    if experts.latent_width is not None:
        shapes |= _projection(TensorRole.EXPERTS_IN, outer, hidden_size, bias=False)
        shapes |= _projection(TensorRole.EXPERTS_OUT, hidden_size, outer, bias=False)
    matrices = {TensorRole.EXPERT_GATE: (inner, outer)} if experts.is_gated else {}
    matrices |= {TensorRole.EXPERT_UP: (inner, outer), TensorRole.EXPERT_DOWN: (outer, inner)}
    for role, sizes in matrices.items():
        own = _projection(role, *sizes, bias=experts.has_bias)
        shapes |= {key: (experts.count, *shape) for key, shape in own.items()}
    if experts.router.has_expert_scale:
        shapes[TensorRole.EXPERT_SCALE, EXPERT_SCALE_KIND] = (experts.count,)
    if experts.branch_norm is not None:
        shapes[TensorRole.ROUTER_NORM, ROUTER_NORM_KIND] = (hidden_size,)
        for role in BRANCH_NORMS:
            shapes |= _norm(role, (hidden_size,), experts.branch_norm)
    if experts.shared is not None:
        shapes |= _mlp(experts.shared, hidden_size, _SHARED_MLP)
    if experts.has_shared_gate:
        shapes[TensorRole.SHARED_WEIGHT, "weight"] = (1, hidden_size)
    return shapes


def norm_roles(plan: LayerPlan) -> tuple[TensorRole, ...]:
    """Norms around mixer and feed-forward."""
    match plan.placement:
        case Placement.BEFORE:
            if isinstance(plan.mixer, NoMixer):
                return (TensorRole.FFN_NORM,)
            if isinstance(plan.feed_forward, NoFeedForward):
                return (TensorRole.MIXER_NORM,)
            return TensorRole.MIXER_NORM, TensorRole.FFN_NORM
        case Placement.AFTER:
            return TensorRole.MIXER_OUT_NORM, TensorRole.FFN_OUT_NORM
        case Placement.AROUND:
            return (
                TensorRole.MIXER_NORM,
                TensorRole.MIXER_OUT_NORM,
                TensorRole.FFN_NORM,
                TensorRole.FFN_OUT_NORM,
            )
        case Placement.SHARED:
            return (TensorRole.MIXER_NORM,)
        case Placement.NONE:
            return ()


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A tensor on disk: the rows of `roles`, whose "weight" or "bias" it is; of one `expert` or of all, or
    one part of a table, from row `first_row` on.

    See `Pack` for `is_alternating` and `is_transposed`.
    """

    name: str
    kind: str
    roles: tuple[TensorRole, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    is_alternating: bool = False
    is_transposed: bool = False
    first_row: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether it holds matrices, which may be quantised, and not vectors."""
        return is_matrix(self.roles[0], self.kind)

    @property
    def is_stack(self) -> bool:
        """Whether it holds a matrix or a vector of every expert, or of every head."""
        return self.roles[0] in STACK_ROLES and self.expert is None


def is_matrix(role: TensorRole, kind: str) -> bool:
    """See `LayerTensor.is_matrix`."""
    return kind == "weight" and role in _MATRIX_ROLES


def layer_tensors(config: Blueprint, layer: int) -> tuple[LayerTensor, ...]:
    """Return the tensors of layer number `layer` of a family with a row."""
    shapes = role_shapes(config.hidden_size, config.layers[layer])
    found: dict[str, LayerTensor] = {}
    for role, kind in shapes:
        if role is TensorRole.NGRAM_TABLE:
            found |= {tensor.name: tensor for tensor in _table_parts(config, layer)}
            continue
        pack = config.names.pack_of(role)
        parts = [shapes[part, kind] for part in pack.roles]
        axis = row_axis(role)
        shape = (*parts[0][:axis], sum(part[axis] for part in parts), *parts[0][axis + 1 :])
        for expert in range(shape[0]) if pack.is_per_expert else (None,):
            name = config.names.in_layer(layer, pack.tensor(kind, expert))
            own_shape = shape if expert is None else shape[1:]
            if pack.has_unit_axis:
                own_shape = (1, *own_shape)
            is_transposed = pack.is_transposed and kind == "weight" and not _is_quantised(config, name)
            if is_transposed:
                own_shape = (*own_shape[:-2], own_shape[-1], own_shape[-2])
            found[name] = LayerTensor(
                name, kind, pack.roles, own_shape, expert, pack.is_alternating, is_transposed
            )
    return tuple(found.values())


def _table_parts(config: Blueprint, layer: int) -> Iterator[LayerTensor]:
    """Of the table of n-grams."""
    ngrams, role = config.layers[layer].ngrams, TensorRole.NGRAM_TABLE
    assert ngrams is not None, "a layer without n-grams"
    module = config.names.pack_of(role).module
    for number, rows in enumerate(ngrams.shards):
        name = config.names.in_layer(layer, f"{module.replace('{shard}', str(number))}.weight")
        shape = (len(rows), ngrams.head_dim)
        yield LayerTensor(name, "weight", (role,), shape, first_row=rows.start)


def _is_quantised(config: Blueprint, matrix: str) -> bool:
    return config.quantization is not None and config.quantization.scheme_of(matrix) is not None


def row_axis(role: TensorRole) -> int:
    """Dimension of the rows in `role_shapes`."""
    return 1 if role in STACK_ROLES else 0


@dataclass(frozen=True, slots=True)
class RoleRows:
    """Rows [begin, end) of the tensor `name`; its matrices are one below the other.

    Of them every `step`-th from `first` on belongs to the role. With `is_across`, it is every `step`-th
    element of each row: the matrix is transposed, or the only row is a bias.
    """

    name: str
    begin: int
    end: int
    first: int = 0
    step: int = 1
    is_across: bool = False


RolePlaces = dict[tuple[TensorRole, str, int | None], RoleRows]
"""Place of tensor "weight" or "bias" of a role, and of an expert or of the part of a table from a row on."""


def rows_of_roles(config: Blueprint, layer: int) -> RolePlaces:
    """Return where on disk each tensor of layer number `layer` is."""
    shapes = role_shapes(config.hidden_size, config.layers[layer])
    places: RolePlaces = {}
    for tensor in layer_tensors(config, layer):
        is_across = tensor.is_transposed or (tensor.is_stack and not tensor.is_matrix)
        if is_across or tensor.is_alternating:
            places |= _taking_turns(tensor, is_across=is_across)
            continue
        if tensor.roles == (TensorRole.NGRAM_TABLE,):
            rows = RoleRows(tensor.name, 0, tensor.shape[0])
            places[TensorRole.NGRAM_TABLE, tensor.kind, tensor.first_row] = rows
            continue
        axis = row_axis(tensor.roles[0])
        begin = 0
        for expert in range(tensor.shape[0]) if tensor.is_stack else (tensor.expert,):
            for role in tensor.roles:
                end = begin + shapes[role, tensor.kind][axis]
                places[role, tensor.kind, expert] = RoleRows(tensor.name, begin, end)
                begin = end
    return places


def _taking_turns(tensor: LayerTensor, *, is_across: bool) -> RolePlaces:
    """Places of roles that share the rows of a stack, or their elements."""
    assert tensor.is_stack and (tensor.is_alternating or len(tensor.roles) == 1), "roles one after the other"
    rows, step = prod(tensor.shape[1:-1]), len(tensor.roles)
    return {
        (role, tensor.kind, expert): RoleRows(
            tensor.name, expert * rows, (expert + 1) * rows, first, step, is_across
        )
        for expert in range(tensor.shape[0])
        for first, role in enumerate(tensor.roles)
    }


def stage_tensor_shapes(
    config: Blueprint, layer_begin: int, layer_end: int, *, has_embeddings: bool, has_head: bool
) -> Shapes:
    """Return name and shape of every tensor that a stage with layers [layer_begin, layer_end) reads.

    A tied output head is the embedding matrix, listed once even if a stage has both.
    """
    if not 0 <= layer_begin < layer_end <= config.num_layers:
        raise ValueError(
            f"layers [{layer_begin}, {layer_end}) are not within the model's {config.num_layers} layers"
        )
    if config.outer is not None:
        return _opaque_shapes(config, config.outer, range(layer_begin, layer_end), has_embeddings, has_head)
    matrix = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {config.names.embeddings: matrix} if has_embeddings else {}
    for layer in range(layer_begin, layer_end):
        shapes |= {tensor.name: tensor.shape for tensor in layer_tensors(config, layer)}
    if has_head:
        shapes |= dict.fromkeys(final_norm_tensors(config), (config.hidden_size,))
        shapes |= collapse_shapes(config)
        shapes[head_tensor(config)] = matrix
    return shapes


def _opaque_shapes(
    config: Blueprint, outer: OuterTensors, layers: range, has_embeddings: bool, has_head: bool
) -> Shapes:
    shapes: Shapes = dict(outer.before) if has_embeddings else {}
    for layer in layers:
        inside = config.layers[layer].feed_forward
        assert isinstance(inside, Opaque), "a family without a row"
        prefix = outer.in_layer.format(layer=layer)
        shapes |= {prefix + name: shape for name, shape in inside.tensors}
    return shapes | dict(outer.after) if has_head else shapes


def head_tensor(config: Blueprint) -> str:
    """Name of the output head's matrix; a tied one is the embeddings."""
    return config.names.embeddings if config.tie_word_embeddings else config.names.head


def final_norm_tensors(config: Blueprint) -> tuple[str, ...]:
    """Names of the final norm's weight and, if it has one, bias; none without that norm."""
    if config.final_norm is None:
        return ()
    kinds = ("weight", "bias") if config.final_norm.has_bias else ("weight",)
    return tuple(config.names.final_norm(kind) for kind in kinds)


def collapse_shapes(config: Blueprint) -> Shapes:
    """Name and shape of the tensors that make one row of several residual streams, in order of their kinds.

    Whether they are float32 in memory is said by `Blueprint.collapse`.
    """
    if config.collapse is None:
        return {}
    kinds = config.collapse.shapes(config.hidden_size)
    return {config.names.of_collapse(kind): shape for kind, shape in kinds.items()}


def stage_tensor_names(
    config: Blueprint, layer_begin: int, layer_end: int, *, has_embeddings: bool, has_head: bool
) -> list[str]:
    """Return the names of the stored tensors that a stage reads: several for a quantised matrix."""
    shapes = stage_tensor_shapes(
        config, layer_begin, layer_end, has_embeddings=has_embeddings, has_head=has_head
    )
    return list(stored_tensors(config, shapes))


def packed_tensors(config: Blueprint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, PackedMatrix]:
    """Return the quantised tensors among `shapes`, see `stage_tensor_shapes`."""
    if config.quantization is None:
        return {}
    if isinstance(config.quantization, BlockTensors):
        return config.quantization.packed(shapes)
    plain = {
        one.name
        for layer in range(config.num_layers)
        for one in layer_tensors(config, layer)
        if not one.is_matrix
    }.union(collapse_shapes(config))
    matrices = {name: shape for name, shape in shapes.items() if name not in plain}
    return packed_matrices(config.quantization, matrices, embeddings=config.names.embeddings)


def stored_tensors(config: Blueprint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Return the tensors in files that hold the tensors `shapes`, by name."""
    packed, integers = packed_tensors(config, shapes), _integer_tensors(config)
    stored: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        if name in packed:
            stored |= {part.name: part for part in packed[name].parts.values()}
        else:
            dtypes: tuple[StoredDType, ...] = _TABLE_DTYPES if name in integers else tuple(DType)
            stored[name] = StoredTensor(name=name, dtypes=dtypes, shapes=(shape,))
    return stored


_TABLE_DTYPES = (PackedDType.I32, PackedDType.I64)


def _integer_tensors(config: Blueprint) -> set[str]:
    """Names of the tensors that hold numbers of experts, or hashes of n-grams."""
    found = set()
    for layer, plan in enumerate(config.layers):
        kinds = [(TensorRole.HASH_TABLE, HASH_KIND)] if plan.is_hashed else []
        kinds += [(TensorRole.NGRAM_HASH, kind) for kind in HASH_KINDS] if plan.ngrams is not None else []
        packs = ((config.names.pack_of(role), kind) for role, kind in kinds)
        found |= {config.names.in_layer(layer, pack.tensor(kind, None)) for pack, kind in packs}
    return found


def num_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes)


def _projection(role: TensorRole, out_size: int, in_size: int, *, bias: bool) -> RoleShapes:
    weight: RoleShapes = {(role, "weight"): (out_size, in_size)}
    return weight | {(role, "bias"): (out_size,)} if bias else weight


def _norm(role: TensorRole, shape: tuple[int, ...], norm: Norm) -> RoleShapes:
    weight: RoleShapes = {(role, "weight"): shape}
    return weight | {(role, "bias"): shape} if norm.has_bias else weight


def _norm_shape(span: NormSpan, num_heads: int, head_dim: int) -> tuple[int, ...]:
    match span:
        case NormSpan.HEAD:
            return (head_dim,)
        case NormSpan.EACH_HEAD:
            return (num_heads, head_dim)
        case NormSpan.WIDTH:
            return (num_heads * head_dim,)
