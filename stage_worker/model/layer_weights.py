"""Weight tensors of a layer, with fused projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoint import (
    Attention,
    Blueprint,
    Compressed,
    Dense,
    DType,
    Experts,
    GatedDelta,
    KimiDelta,
    Latent,
    LayerPlan,
    Mamba2,
    Mixer,
    NoFeedForward,
    NoMixer,
    Recurrent,
)
from checkpoint.blueprint import FeedForwardPlan
from checkpoint.compressed_shapes import GATE_BIAS_KIND
from checkpoint.held import held_plans, stacked_roles
from checkpoint.names import TensorRole
from checkpoint.ngrams import MULTIPLIERS_KIND, OFFSETS_KIND, SIZES_KIND
from checkpoint.tensors import (
    BRANCH_NORMS,
    CHOICE_BIAS_KIND,
    DECAY_KIND,
    DT_KIND,
    EXPERT_SCALE_KIND,
    HASH_KIND,
    LAYER_SCALE_KIND,
    ROUTER_NORM_KIND,
    SINKS_KIND,
    SKIP_KIND,
    STREAM_ROLES,
    LayerTensor,
    layer_tensors,
    role_shapes,
    row_axis,
)
from kvcache.layer_rows import RowKind
from stage_worker.model.held_matrices import (
    HeldMatrix,
    HeldRows,
    empty_matrix,
)
from stage_worker.model.norms import NormWeights
from stage_worker.model.projections import Weight
from stage_worker.model.weight_reads import HostTable

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}


Destinations = dict[str, Tensor | HeldRows | HostTable]
"""Checkpoint tensor name -> contiguous view, or rows of a held matrix or of a table on the host, that it is
loaded into.
"""

NewTable = Callable[[torch.dtype, int, int], HostTable | None]
"""A table of a dtype, rows and a width in memory of the host; None where all weights are."""


def no_table(dtype: torch.dtype, num_rows: int, width: int) -> None:
    """All weights are in one memory."""


NewTensor = Callable[..., Tensor]
"""Allocates an uninitialised tensor of the given sizes, in the run dtype on the stage's device."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenseWeights:
    """An MLP. Matrices are [out, in]; `up` of a gated one has the gate's rows first."""

    up: Weight
    up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertsWeights:
    """A mixture of experts: router [experts, hidden_size], `up` [experts, 2 * width, hidden_size] with the
    gate's rows first, or only the ups' if they are not gated, and `down` [experts, hidden_size, width];
    biases lack the last dimension. A held matrix has those of all experts one below the other. With
    `Experts.latent_width`, that replaces hidden_size in `up` and `down`, between `latent_in` [latent_width,
    hidden_size] and `latent_out`, its transposed shape.

    `choice_bias` [experts] is float32, and so is the router if its plan `is_wide`. `shared_weight` is
    [1, hidden_size], `router_norm` [hidden_size], `expert_scale` [experts]. `hash_table` int16 [vocabulary,
    per_token] has numbers of experts.
    """

    router: Tensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    up: Weight
    up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    shared: DenseWeights | None
    shared_weight: Tensor | None
    router_norm: Tensor | None = None
    expert_scale: Tensor | None = None
    latent_in: Weight | None = None
    latent_out: Weight | None = None
    hash_table: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionWeights:
    """Queries, keys and values, stacked by rows in `qkv`; `sinks` is [heads].

    Layers whose values are their keys have no rows of values. Gates of the output are the last rows. `index`
    has the rows of an indexer's queries, then of its keys.
    """

    qkv: Weight
    qkv_bias: Tensor | None
    sinks: Tensor | None
    index: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexerWeights:
    """An indexer. `query` is [heads * head_dim, query_rank], `key` [head_dim, hidden_size] and `weight`
    [heads, hidden_size].
    """

    query: Tensor
    key: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LatentWeights:
    """Latent attention. `query` is [q_size, query_rank] after `query_down` [query_rank, hidden_size], or
    [q_size, hidden_size] without; `latent` [kv_rank + rope_dim, hidden_size] has the shared key's rows last;
    `keys` [heads, nope_dim, kv_rank] and `values` [heads, value_dim, kv_rank] are views of what is loaded.
    `gate` is [heads * value_dim, hidden_size], `sinks` [heads].
    """

    query_down: Weight | None
    query_down_bias: Tensor | None
    query: Weight
    latent: Weight
    latent_bias: Tensor | None
    keys: Tensor
    values: Tensor
    indexer: IndexerWeights | None = None
    gate: Weight | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolingWeights:
    """Pooling to `width` elements; `bias` float32 [ratio, columns] has twice as many with overlap."""

    width: int
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompressedWeights:
    """Compressed attention. `query` is [q_size, query_rank] after `query_down` [query_rank, hidden_size],
    `key` [head_dim, hidden_size], `groups` [o_size, group_size]; `pending` [pending_width, hidden_size] has
    the rows of values and gates of entries, then those of their keys, as far as there are any. `sinks` is
    [heads], `index_query` [q_size of the indexer, query_rank], `index_weight` [its heads, hidden_size].
    """

    query_down: Weight
    query: Weight
    key: Weight
    groups: Tensor
    sinks: Tensor
    pending: Weight | None
    pooling: Mapping[RowKind, PoolingWeights]
    index_query: Tensor | None
    index_weight: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaWeights:
    """Gated DeltaNet. `input` has the rows of queries, keys, values, gates, strengths and decays; `conv` is
    [channels, 1, kernel_size], `norm` [value_dim]; `decay` (A_log, or rates, see `DeltaLayout`) and
    `dt_bias` [heads] are float32.
    """

    input: Weight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KimiDeltaWeights:
    """Kimi Delta Attention. `input` has the rows of queries, keys, values, strengths, and latents of decays
    and gates; `decay_up` and `gate_up` are [heads * head_dim, rank]; `conv` is [channels, 1, kernel_size],
    `norm` [head_dim]; `decay` (A_log, or rates, see `KimiDelta`) [1, 1, heads, 1] and `dt_bias`
    [heads * head_dim] are float32.
    """

    input: Weight
    decay_up: Weight
    gate_up: Weight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MambaWeights:
    """Mamba2. `input` has the rows of gates, inputs, B, C and time steps, `input_bias` [in_size]; `conv` is
    [channels, 1, kernel_size], `conv_bias` [channels], `norm` [heads * head_dim], None without a norm;
    `decay`, `dt_bias` and `skip` [heads] are float32.
    """

    input: Weight
    input_bias: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None


MixerWeights = (
    AttentionWeights | LatentWeights | CompressedWeights | DeltaWeights | KimiDeltaWeights | MambaWeights
)


StreamTensors = Mapping[str, Tensor]
"""Tensors of one connection to residual streams, or of a collapse, by kind."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NgramWeights:
    """Embeddings of n-grams. `multipliers` [size], `sizes` and `offsets` [heads] are int64; `table` is [rows,
    head_dim], of a GPU on its host, `key` [channels, width], `value` [hidden_size, width], `conv` [channels,
    1, kernel_size]; the norms are [channels].
    """

    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    table: Tensor | HostTable
    key: Weight
    value: Weight
    key_norm: Tensor
    stream_norm: Tensor
    conv_norm: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; `scale` is [1].

    `mixer` and its output `o` are None without a mixer, `feed_forward` without a feed-forward. `beside` has
    an output `beside_o`. `streams` are the connections of mixer and feed-forward, with
    `LayerPlan.connection`.
    """

    norms: Mapping[TensorRole, NormWeights]
    mixer: MixerWeights | None
    o: Weight | None
    o_bias: Tensor | None
    feed_forward: DenseWeights | ExpertsWeights | None
    scale: Tensor | None = None
    beside: MambaWeights | None = None
    beside_o: Weight | None = None
    beside_o_bias: Tensor | None = None
    streams: Mapping[TensorRole, StreamTensors] = field(default_factory=dict)
    ngrams: NgramWeights | None = None


_NORMS = (
    *(TensorRole.MIXER_NORM, TensorRole.MIXER_OUT_NORM, TensorRole.FFN_NORM, TensorRole.FFN_OUT_NORM),
    *(TensorRole.Q_NORM, TensorRole.K_NORM, TensorRole.Q_LATENT_NORM, TensorRole.KV_LATENT_NORM),
    *(TensorRole.INDEX_Q_NORM, TensorRole.INDEX_K_NORM, TensorRole.ENTRY_NORM, TensorRole.INDEX_NORM),
    *BRANCH_NORMS,
)


def allocate_layer(
    config: Blueprint, layer: int, new: NewTensor, new_table: NewTable = no_table
) -> tuple[LayerWeights, Destinations]:
    """Allocate uninitialised weights of layer number `layer`, and their destinations."""
    tensors = _Allocation(config, layer, new, new_table)
    mixer, has_beside = config.layers[layer].mixer, config.layers[layer].beside is not None
    out_role = TensorRole.STATE_OUT if isinstance(mixer, Recurrent) else TensorRole.O
    weights = LayerWeights(
        norms={
            role: NormWeights(tensors.found(role, "weight"), tensors.get(role, "bias"))
            for role in _NORMS
            if tensors.get(role, "weight") is not None
        },
        mixer=_mixer(mixer, tensors),
        o=None if isinstance(mixer, NoMixer) else tensors.matrix(out_role),
        o_bias=tensors.get(out_role, "bias"),
        feed_forward=_feed_forward(config.layers[layer].known_feed_forward, tensors),
        scale=tensors.get(TensorRole.LAYER_SCALE, LAYER_SCALE_KIND),
        beside=_mamba(tensors) if has_beside else None,
        beside_o=tensors.matrix(TensorRole.STATE_OUT) if has_beside else None,
        beside_o_bias=tensors.get(TensorRole.STATE_OUT, "bias") if has_beside else None,
        streams={role: found for role in STREAM_ROLES if (found := tensors.kinds_of(role))},
        ngrams=None if config.layers[layer].ngrams is None else _ngrams(tensors),
    )
    return weights, tensors.destinations()


def _mixer(mixer: Mixer, tensors: _Allocation) -> MixerWeights | None:
    if isinstance(mixer, NoMixer):
        return None
    if isinstance(mixer, GatedDelta):
        return DeltaWeights(
            input=tensors.matrix(TensorRole.DELTA_QKV),
            conv=tensors.found(TensorRole.STATE_CONV, "weight"),
            decay=tensors.found(TensorRole.STATE_DECAY, DECAY_KIND),
            dt_bias=tensors.found(TensorRole.STATE_DT, DT_KIND),
            norm=tensors.found(TensorRole.STATE_NORM, "weight"),
        )
    if isinstance(mixer, KimiDelta):
        return _kimi_delta(tensors)
    if isinstance(mixer, Mamba2):
        return _mamba(tensors)
    if isinstance(mixer, Attention):
        return AttentionWeights(
            qkv=tensors.matrix(TensorRole.Q),
            qkv_bias=tensors.get(TensorRole.Q, "bias"),
            sinks=tensors.get(TensorRole.SINKS, SINKS_KIND),
            index=None if mixer.indexer is None else tensors.matrix(TensorRole.INDEX_QK),
        )
    if isinstance(mixer, Compressed):
        return _compressed(mixer, tensors)
    keys, values = _expansion(mixer, tensors)
    return LatentWeights(
        query_down=None if mixer.query_rank is None else tensors.matrix(TensorRole.Q_DOWN),
        query_down_bias=tensors.get(TensorRole.Q_DOWN, "bias"),
        query=tensors.matrix(TensorRole.Q if mixer.query_rank is None else TensorRole.Q_UP),
        latent=tensors.matrix(TensorRole.KV_DOWN),
        latent_bias=tensors.get(TensorRole.KV_DOWN, "bias"),
        keys=keys,
        values=values,
        indexer=None if mixer.indexer is None else _indexer(tensors),
        gate=tensors.matrix(TensorRole.OUTPUT_GATE) if mixer.has_output_gate else None,
        sinks=tensors.get(TensorRole.SINKS, SINKS_KIND),
    )


def _compressed(mixer: Compressed, tensors: _Allocation) -> CompressedWeights:
    has_entries, has_keys = mixer.compressor is not None, mixer.entry_index_width > 0
    pooling = {}
    if has_entries:
        bias = tensors.found(TensorRole.ENTRY_BIAS, GATE_BIAS_KIND)
        pooling[RowKind.ENTRY] = PoolingWeights(width=mixer.head_dim, bias=bias)
    if has_keys:
        bias = tensors.found(TensorRole.INDEX_BIAS, GATE_BIAS_KIND)
        pooling[RowKind.ENTRY_KEY] = PoolingWeights(width=mixer.entry_index_width, bias=bias)
    return CompressedWeights(
        query_down=tensors.matrix(TensorRole.Q_DOWN),
        query=tensors.matrix(TensorRole.Q_UP),
        key=tensors.matrix(TensorRole.K),
        groups=tensors.found(TensorRole.O_GROUPS, "weight"),
        sinks=tensors.found(TensorRole.SINKS, SINKS_KIND),
        pending=tensors.matrix(TensorRole.ENTRY_VALUE) if has_entries else None,
        pooling=pooling,
        index_query=tensors.get(TensorRole.INDEX_Q, "weight"),
        index_weight=tensors.get(TensorRole.INDEX_WEIGHT, "weight"),
    )


def _kimi_delta(tensors: _Allocation) -> KimiDeltaWeights:
    return KimiDeltaWeights(
        input=tensors.matrix(TensorRole.Q),
        decay_up=tensors.matrix(TensorRole.KDA_DECAY_UP),
        gate_up=tensors.matrix(TensorRole.KDA_GATE_UP),
        conv=tensors.found(TensorRole.CONV_Q, "weight"),
        decay=tensors.found(TensorRole.STATE_DECAY, DECAY_KIND),
        dt_bias=tensors.found(TensorRole.STATE_DT, DT_KIND),
        norm=tensors.found(TensorRole.STATE_NORM, "weight"),
    )


def _mamba(tensors: _Allocation) -> MambaWeights:
    return MambaWeights(
        input=tensors.matrix(TensorRole.MAMBA_IN),
        input_bias=tensors.get(TensorRole.MAMBA_IN, "bias"),
        conv=tensors.found(TensorRole.STATE_CONV, "weight"),
        conv_bias=tensors.get(TensorRole.STATE_CONV, "bias"),
        decay=tensors.found(TensorRole.STATE_DECAY, DECAY_KIND),
        dt_bias=tensors.found(TensorRole.STATE_DT, DT_KIND),
        skip=tensors.found(TensorRole.MAMBA_SKIP, SKIP_KIND),
        norm=tensors.get(TensorRole.STATE_NORM, "weight"),
    )


def _expansion(mixer: Latent, tensors: _Allocation) -> tuple[Tensor, Tensor]:
    """Keys and values of `LatentWeights`."""
    if mixer.is_split:
        keys = tensors.found(TensorRole.HEAD_KEYS, "weight").transpose(1, 2)
        return keys, tensors.found(TensorRole.HEAD_VALUES, "weight")
    by_head = tensors.found(TensorRole.KV_UP, "weight").view(mixer.num_heads, -1, mixer.kv_rank)
    return by_head[:, : mixer.nope_dim], by_head[:, mixer.nope_dim :]


def _indexer(tensors: _Allocation) -> IndexerWeights:
    return IndexerWeights(
        query=tensors.found(TensorRole.INDEX_Q, "weight"),
        key=tensors.found(TensorRole.INDEX_K, "weight"),
        weight=tensors.found(TensorRole.INDEX_WEIGHT, "weight"),
    )


def _feed_forward(plan: FeedForwardPlan, tensors: _Allocation) -> DenseWeights | ExpertsWeights | None:
    if isinstance(plan, NoFeedForward):
        return None
    if isinstance(plan, Dense):
        return _dense(tensors, TensorRole.UP, TensorRole.DOWN)
    has_shared, has_latents = plan.shared is not None, plan.latent_width is not None
    return ExpertsWeights(
        router=tensors.found(TensorRole.ROUTER, "weight"),
        router_bias=tensors.get(TensorRole.ROUTER, "bias"),
        choice_bias=tensors.get(TensorRole.CHOICE_BIAS, CHOICE_BIAS_KIND),
        up=tensors.matrix(TensorRole.EXPERT_UP),
        up_bias=tensors.get(TensorRole.EXPERT_UP, "bias"),
        down=tensors.matrix(TensorRole.EXPERT_DOWN),
        down_bias=tensors.get(TensorRole.EXPERT_DOWN, "bias"),
        shared=_dense(tensors, TensorRole.SHARED_UP, TensorRole.SHARED_DOWN) if has_shared else None,
        shared_weight=tensors.get(TensorRole.SHARED_WEIGHT, "weight"),
        router_norm=tensors.get(TensorRole.ROUTER_NORM, ROUTER_NORM_KIND),
        expert_scale=tensors.get(TensorRole.EXPERT_SCALE, EXPERT_SCALE_KIND),
        latent_in=tensors.matrix(TensorRole.EXPERTS_IN) if has_latents else None,
        latent_out=tensors.matrix(TensorRole.EXPERTS_OUT) if has_latents else None,
        hash_table=tensors.get(TensorRole.HASH_TABLE, HASH_KIND),
    )


def _ngrams(tensors: _Allocation) -> NgramWeights:
    return NgramWeights(
        multipliers=tensors.found(TensorRole.NGRAM_HASH, MULTIPLIERS_KIND),
        sizes=tensors.found(TensorRole.NGRAM_HASH, SIZES_KIND),
        offsets=tensors.found(TensorRole.NGRAM_HASH, OFFSETS_KIND),
        table=tensors.table(),
        key=tensors.matrix(TensorRole.NGRAM_KEY),
        value=tensors.matrix(TensorRole.NGRAM_VALUE),
        key_norm=tensors.found(TensorRole.NGRAM_KEY_NORM, "weight"),
        stream_norm=tensors.found(TensorRole.NGRAM_STREAM_NORM, "weight"),
        conv_norm=tensors.found(TensorRole.NGRAM_CONV_NORM, "weight"),
        conv=tensors.found(TensorRole.NGRAM_CONV, "weight"),
    )


def _dense(tensors: _Allocation, up: TensorRole, down: TensorRole) -> DenseWeights:
    return DenseWeights(
        up=tensors.matrix(up),
        up_bias=tensors.get(up, "bias"),
        down=tensors.matrix(down),
        down_bias=tensors.get(down, "bias"),
    )


class _Allocation:
    """Tensors and held matrices of a layer; the parts of a stacked one are views of it."""

    def __init__(self, config: Blueprint, layer: int, new: NewTensor, new_table: NewTable) -> None:
        self._new_table = new_table
        self._table: HostTable | None = None
        self._tensors = layer_tensors(config, layer)
        self._new, self._shapes = new, role_shapes(config.hidden_size, config.layers[layer])
        self._wide = _wide_roles(config.layers[layer])
        self._places: dict[tuple[TensorRole, str], tuple[Weight, int, int]] = {}
        """Each part's tensor or matrix, and range of rows."""
        held = held_plans(config, layer)
        device = new(0).device
        for role, kind in self._shapes:
            if (role, kind) in self._places:
                continue
            if kind == "weight" and role in held:
                self._place(role, kind, empty_matrix(held[role], device))
            else:
                self._place(role, kind, None)

    def _place(self, role: TensorRole, kind: str, matrix: HeldMatrix | None) -> None:
        """Place the stack that begins with `role` in `matrix`, or in a new tensor."""
        shapes, parts = self._shapes, stacked_roles(role, kind, self._shapes)
        axis = row_axis(role)
        sizes = [shapes[part, kind][axis] for part in parts]
        into: Weight
        if role is TensorRole.NGRAM_TABLE:
            self._table = self._new_table(self._new(0).dtype, *shapes[role, kind])
        if matrix is not None:
            into = matrix
        elif role is TensorRole.NGRAM_TABLE and self._table is not None:
            into = self._table.rows
        else:
            into = self._new(*shapes[role, kind][:axis], sum(sizes), *shapes[role, kind][axis + 1 :])
            if role is TensorRole.HASH_TABLE:
                into = into.to(torch.int16)
            elif role is TensorRole.NGRAM_HASH:
                into = into.to(torch.int64)
            elif role in self._wide:
                into = into.float()
        for index, part in enumerate(parts):
            begin = sum(sizes[:index])
            self._places[part, kind] = (into, begin, begin + sizes[index])

    def get(self, role: TensorRole, kind: str) -> Tensor | None:
        """The tensor that holds a part, with all parts stacked in it."""
        place = self._places.get((role, kind))
        if place is None:
            return None
        assert isinstance(place[0], Tensor), f"{role.value} is held as it is stored"
        return place[0]

    def kinds_of(self, role: TensorRole) -> dict[str, Tensor]:
        """All tensors of a role, by kind."""
        kinds = [kind for found, kind in self._places if found is role]
        return {kind: self.found(role, kind) for kind in kinds}

    def matrix(self, role: TensorRole) -> Weight:
        """What holds a matrix, with all matrices stacked in it."""
        return self._places[role, "weight"][0]

    def found(self, role: TensorRole, kind: str) -> Tensor:
        tensor = self.get(role, kind)
        assert tensor is not None, f"a layer without {role.value}"
        return tensor

    def table(self) -> Tensor | HostTable:
        """The table of n-grams."""
        return self._table or self.found(TensorRole.NGRAM_TABLE, "weight")

    def destinations(self) -> Destinations:
        return {tensor.name: self._destination(tensor) for tensor in self._tensors}

    def _destination(self, tensor: LayerTensor) -> Tensor | HeldRows | HostTable:
        found = [self._places[role, tensor.kind] for role in tensor.roles]
        (into, begin, _), (last, _, end) = found[0], found[-1]
        if not isinstance(into, Tensor):
            height = into.plan.rows // into.plan.experts
            if tensor.is_stack:
                return HeldRows(into, 0, into.plan.rows)
            first = height * (tensor.expert or 0)
            return HeldRows(into, first + begin, first + end)
        is_one = into is last
        if tensor.expert is not None:
            place = into[tensor.expert][begin:end]
        elif tensor.roles == (TensorRole.NGRAM_TABLE,):
            place = into[tensor.first_row :][: tensor.shape[0]]
        else:
            place = into.narrow(row_axis(tensor.roles[0]), begin, end - begin)
        if tensor.is_transposed:
            place = place.view(tensor.shape)
        if len(tensor.shape) > place.dim():
            place = place[None]
        is_whole = is_one and place.shape == tensor.shape and place.is_contiguous()
        assert is_whole, f"{tensor.name} is scattered"
        is_table = tensor.roles == (TensorRole.NGRAM_TABLE,)
        return HostTable(place) if is_table and self._table is not None else place


def _wide_roles(plan: LayerPlan) -> tuple[TensorRole, ...]:
    """Roles whose tensors are float32 in memory."""
    inner = plan.known_feed_forward
    found: tuple[TensorRole, ...] = (TensorRole.CHOICE_BIAS, TensorRole.MAMBA_SKIP)
    found += (TensorRole.STATE_DECAY, TensorRole.STATE_DT, TensorRole.ENTRY_BIAS, TensorRole.INDEX_BIAS)
    if plan.connection is not None and plan.connection.is_wide:
        found += STREAM_ROLES
    return (*found, TensorRole.ROUTER) if isinstance(inner, Experts) and inner.router.is_wide else found
