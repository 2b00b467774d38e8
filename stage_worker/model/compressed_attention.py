"""Attention to a window of shared keys, and to entries that compressors pool of earlier tokens.

A layer writes the keys of a step's tokens and what their entries are pooled of, then pools the entries that
end in the step, and then attends. Entries depend on the tokens alone, and not on the chunks in which they
were computed, up to the rounding of products.

Between the projections, `stage_worker.model.compressed_writes` and `stage_worker.model.joined_attention` have
the implementations by torch's operators and by kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import Compressed, Norm
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from stage_worker.model.compressed_writes import Fresh, compressed_writes
from stage_worker.model.joined_attention import StepQueries, joined_attention
from stage_worker.model.kernels import Kernels, ProductMethod
from stage_worker.model.layer_weights import CompressedWeights
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import operations
from stage_worker.model.projections import project
from stage_worker.model.rope import Rotary, RotaryTable
from stage_worker.model.step_layout import LayerKv, LayerMemory

GroupProducts = Callable[[Tensor, Tensor], None]
"""Fills its second argument [n, o_size] by the groups of heads of mixed values [n, q_size]."""


def group_products(mixer: Compressed, weights: Tensor, products: ProductMethod) -> GroupProducts:
    """One product for all groups where a launch costs more than a product of one token."""
    if products is ProductMethod.TRITON_ROWS:
        return _BatchedGroups(mixer, weights)
    return _SeparateGroups(mixer, weights, products)


class _BatchedGroups:
    """Plain `weights` [o_size, group_size] of all groups at once."""

    def __init__(self, mixer: Compressed, weights: Tensor) -> None:
        self._matrices = weights.view(mixer.num_head_groups, mixer.group_rank, -1).transpose(1, 2)

    def __call__(self, mixed: Tensor, output: Tensor) -> None:
        num_groups = len(self._matrices)
        heads, places = (x.view(len(x), num_groups, -1).transpose(0, 1) for x in (mixed, output))
        torch.bmm(heads, self._matrices, out=places)


class _SeparateGroups:
    """A product of a group each, of weights in any form."""

    def __init__(self, mixer: Compressed, weights: Tensor, products: ProductMethod) -> None:
        self._mixer = mixer
        self._groups = [project(rows, None, products) for rows in torch.split(weights, mixer.group_rank)]

    def __call__(self, mixed: Tensor, output: Tensor) -> None:
        by_group = torch.split(mixed, self._mixer.group_size, dim=1)
        places = torch.split(output, self._mixer.group_rank, dim=1)
        for place, group, heads in zip(places, self._groups, by_group, strict=True):
            place.copy_(group(heads))


class CompressedAttention:
    """See `checkpoint.compressed.Compressed`."""

    def __init__(
        self,
        mixer: Compressed,
        weights: CompressedWeights,
        norms: Mapping[TensorRole, NormWeights],
        kernels: Kernels,
    ) -> None:
        """`norms` has the weights of latents, keys and entries. Packed weights replace the given ones."""
        products = kernels.layer_products
        self._mixer, self._rotary = mixer, Rotary.of(mixer)
        norm = Norm(kind=NormKind.RMS_WIDE, eps=mixer.norm_eps)
        self._query_down = project(weights.query_down, None, products)
        self._query_norm = operations(kernels).norm(norm, norms[TensorRole.Q_LATENT_NORM])
        self._query = project(weights.query, None, products)
        self._key = project(weights.key, None, products)
        self._writes = compressed_writes(mixer, weights.pooling, norms, kernels)
        self._attend = joined_attention(mixer, weights.sinks.float(), kernels)
        self._groups = group_products(mixer, weights.groups, products)
        self._pending = None if weights.pending is None else project(weights.pending, None, products)
        self._index_query = None
        if weights.index_query is not None:
            self._index_query = project(weights.index_query, None, products)
        self._index_weight = weights.index_weight

    def __call__(self, normed: Tensor, kv: LayerMemory) -> Tensor:
        """Projected groups of heads [m, o_size] of `normed` [m, hidden_size], with zeros after the step's
        tokens.
        """
        assert isinstance(kv, LayerKv), "memory of another kind"
        mixer, num_tokens = self._mixer, kv.step.num_tokens
        table = kv.step.rotary[self._rotary]
        latents = self._query_norm(self._query_down(normed))
        heads = self._query(latents)[:num_tokens].view(num_tokens, mixer.num_heads, -1)
        pending = None if self._pending is None else self._pending(normed)[:num_tokens]
        # All slices are written before any attends, since slices may share pages.
        keys = self._writes.write(Fresh(heads, self._key(normed)[:num_tokens], pending), kv)
        index = None
        if self._index_query is not None and self._may_choose(kv):
            index = self._index_queries(self._index_query(latents), normed, table)
        mixed = self._attend(StepQueries(heads, keys, *(index or ())), kv)
        self._writes.rotate(mixed, table, is_back=True)
        new = normed.new_empty if len(normed) == num_tokens else normed.new_zeros
        output = new(len(normed), mixer.o_size)
        self._groups(mixed.flatten(1), output[:num_tokens])
        return output

    def _may_choose(self, kv: LayerKv) -> bool:
        """Whether queries of the step choose entries."""
        assert kv.entries is not None and self._mixer.compressor is not None, "a choice without entries"
        return kv.entries.step.entries[self._mixer.compressor].may_choose

    def _index_queries(self, heads: Tensor, normed: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """Rotated queries by which entries are chosen, and weights, see `StepQueries`."""
        assert self._index_weight is not None, "an indexer without weights of heads"
        num_tokens, num_heads = len(table.cos), len(self._index_weight)
        heads = heads[:num_tokens].view(num_tokens, num_heads, -1)
        self._writes.rotate(heads, table)
        # Wide for the product only: a plan counts these weights in the run dtype.
        return heads, linear(normed[:num_tokens].float(), self._index_weight.float())
