"""Orders and factors of the rows of loaded projections that differ from those on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from checkpoint import Attention, Blueprint, Compressed, GatedDelta, KimiDelta, Latent, Mamba2, Mixer, NoMixer
from checkpoint.names import TensorRole
from checkpoint.tensors import layer_tensors, rows_of_roles
from stage_worker.model.held_matrices import HeldRows
from stage_worker.model.layer_weights import (
    AttentionWeights,
    DeltaWeights,
    Destinations,
    LatentWeights,
    LayerWeights,
)
from stage_worker.model.projections import Weight
from stage_worker.model.rope import head_order, index_rope
from stage_worker.model.weight_reads import HostTable


def arrange_stacks(config: Blueprint, layer: int, destinations: Destinations) -> None:
    """Turn loaded matrices and biases of experts from their order on disk into the order of `ExpertsWeights`.

    One expert's matrix is copied at a time.
    """
    for tensor in layer_tensors(config, layer):
        if not (tensor.is_transposed or tensor.is_alternating):
            continue
        for stored in _matrices(destinations[tensor.name]):
            ordered = stored.t() if tensor.is_transposed else stored
            if tensor.is_alternating:
                ordered = torch.unflatten(ordered, 0, (-1, len(tensor.roles))).transpose(0, 1)
            # A view of a square matrix would be overwritten while it is read.
            stored.copy_(ordered.reshape(stored.shape).clone())


def _matrices(stack: Tensor | HeldRows | HostTable) -> Iterator[Tensor]:
    """The matrix or the bias of each expert; of a held one, all that belongs to its rows."""
    if isinstance(stack, Tensor):
        yield from stack
        return
    assert isinstance(stack, HeldRows), "tables are in the order of files"
    for part in stack.matrix.by_row():
        yield from torch.unflatten(part, 0, (stack.matrix.plan.experts, -1))


def scale_rows(config: Blueprint, layer: int, destinations: Destinations) -> None:
    """Multiply loaded rows and biases by `LayerPlan.row_scales`, rounded to the run dtype."""
    places = rows_of_roles(config, layer)
    for scale in config.layers[layer].row_scales:
        for kind, factor in (("weight", scale.weight), ("bias", scale.bias)):
            if (rows := places.get((scale.role, kind, None))) is None:
                continue
            loaded = destinations[rows.name]
            assert isinstance(loaded, Tensor) and not rows.is_across, "rows that are held as they are stored"
            loaded[rows.begin + scale.begin : rows.begin + scale.end].mul_(factor)


def reorder_heads(mixer: Mixer, weights: LayerWeights) -> None:
    """Reorder the rows of queries and keys so that the elements of each rotated pair are half a head apart.

    Scores do not depend on the order of a head's elements, if queries and keys share it.
    """
    if isinstance(mixer, Latent):
        _reorder_latent(mixer, weights)
        _reorder_indexer(mixer, weights)
        return
    if isinstance(mixer, GatedDelta):
        _reorder_delta(mixer, weights)
        return
    if isinstance(mixer, KimiDelta | Mamba2 | NoMixer | Compressed):
        return
    if mixer.has_output_gate:
        _separate_gates(mixer, weights)
    _reorder_block_indexer(mixer, weights)
    if mixer.rope is None or (order := head_order(mixer.rope, mixer.head_dim)) is None:
        return
    assert not mixer.value_is_key, "values would be reordered, too"
    given = weights.mixer
    assert isinstance(given, AttentionWeights), "weights of another kind"
    num_rows = mixer.q_size + mixer.kv_size
    rows = [part[:num_rows] for part in _by_row(given.qkv)]
    if given.qkv_bias is not None:
        rows.append(given.qkv_bias[:num_rows])
    rows += [
        weights.norms[role].weight.view(-1)
        for role in (TensorRole.Q_NORM, TensorRole.K_NORM)
        if role in weights.norms
    ]
    for tensor in rows:
        heads = torch.unflatten(tensor, 0, (-1, mixer.head_dim))
        heads.copy_(heads[:, order])


def _reorder_block_indexer(mixer: Attention, weights: LayerWeights) -> None:
    """`reorder_heads` for an indexer's queries and keys, before and after their norms."""
    plan, given, rope = mixer.indexer, weights.mixer, index_rope(mixer)
    if plan is None or rope is None or (order := head_order(rope, plan.head_dim)) is None:
        return
    assert isinstance(given, AttentionWeights) and isinstance(given.index, Tensor), "weights of another kind"
    norms = [weights.norms[role].weight for role in (TensorRole.INDEX_Q_NORM, TensorRole.INDEX_K_NORM)]
    for tensor in (given.index, *norms):
        heads = torch.unflatten(tensor, 0, (-1, plan.head_dim))
        heads.copy_(heads[:, order])


def _separate_gates(mixer: Attention, weights: LayerWeights) -> None:
    """Move the gates, which follow the query of each head, behind the values."""
    given = weights.mixer
    assert isinstance(given, AttentionWeights), "weights of another kind"
    by_head = torch.arange(mixer.q_rows).view(mixer.num_heads, 2, mixer.head_dim)
    others = torch.arange(mixer.q_rows, mixer.q_rows + 2 * mixer.kv_size)
    order = torch.cat((by_head[:, 0].flatten(), others, by_head[:, 1].flatten()))
    biases = [] if given.qkv_bias is None else [given.qkv_bias]
    for tensor in (*_by_row(given.qkv), *biases):
        tensor.copy_(tensor[order.to(tensor.device)])


def _reorder_delta(mixer: GatedDelta, weights: LayerWeights) -> None:
    """Turn rows that are grouped by key head into the order of `DeltaWeights`."""
    layout = mixer.layout
    if not (layout.is_grouped or layout.has_grouped_heads):
        return
    given = weights.mixer
    assert isinstance(given, DeltaWeights), "weights of another kind"
    of_values = mixer.o_size // mixer.num_key_heads
    of_heads = mixer.num_heads // mixer.num_key_heads
    order, begin = [], 0
    for sizes, is_grouped in (
        ((mixer.key_dim, mixer.key_dim, of_values, of_values), layout.is_grouped),
        ((of_heads, of_heads), layout.has_grouped_heads),
    ):
        end = begin + mixer.num_key_heads * sum(sizes)
        rows = torch.arange(begin, end)
        groups = rows.view(mixer.num_key_heads, -1)
        order += [p.flatten() for p in groups.split_with_sizes(sizes, dim=1)] if is_grouped else [rows]
        begin = end
    for tensor in _by_row(given.input):
        tensor.copy_(tensor[torch.cat(order).to(tensor.device)])


def _reorder_latent(mixer: Latent, weights: LayerWeights) -> None:
    """`reorder_heads` for the rotated rows: the last of each query, and the shared key."""
    if mixer.rope is None or (order := head_order(mixer.rope, mixer.rope_dim)) is None:
        return
    given = weights.mixer
    assert isinstance(given, LatentWeights), "weights of another kind"
    for part in _by_row(given.query):
        queries = torch.unflatten(part, 0, (mixer.num_heads, mixer.query_dim))[:, mixer.nope_dim :]
        queries.copy_(queries[:, order])
    biases = [] if given.latent_bias is None else [given.latent_bias]
    for tensor in (*_by_row(given.latent), *biases):
        shared = tensor[mixer.kv_rank :]
        shared.copy_(shared[order])


def _reorder_indexer(mixer: Latent, weights: LayerWeights) -> None:
    """`reorder_heads` for the rotated rows of the indexer's keys and of each of its queries."""
    plan, given = mixer.indexer, weights.mixer
    if plan is None or mixer.rope is None:
        return
    rope = replace(mixer.rope, is_interleaved=plan.is_interleaved)
    if (order := head_order(rope, mixer.rope_dim)) is None:
        return
    assert isinstance(given, LatentWeights) and given.indexer is not None, "weights of another kind"
    norm = weights.norms[TensorRole.INDEX_K_NORM]
    vectors = (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)
    for tensor in (given.indexer.query, given.indexer.key, *vectors):
        turning = torch.unflatten(tensor, 0, (-1, plan.head_dim))[:, plan.rotated(mixer.rope_dim)]
        turning.copy_(turning[:, order])


def _by_row(weight: Weight) -> list[Tensor]:
    """Views of all that belongs to the rows of a matrix, which are their first dimension."""
    return [weight] if isinstance(weight, Tensor) else weight.by_row()
