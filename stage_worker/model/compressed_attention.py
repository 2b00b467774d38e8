"""Attention to a window of shared keys, and to entries that compressors pool of earlier tokens.

A layer writes the keys of a step's tokens and what their entries are pooled of, then pools the entries that
end in the step, and then attends. Entries depend on the tokens alone, and not on the chunks in which they
were computed, up to the rounding of products.

Pooling is as in transformers: the softmax of gates is float32, and its weights are rounded before they
multiply values. See `stage_worker.model.joined_attention` for attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import Compressed, Norm
from checkpoint.blueprint import NormKind
from checkpoint.compressed import Compressor
from checkpoint.names import TensorRole
from kvcache.layer_rows import RowKind
from stage_worker.model.entry_layout import EntryStep
from stage_worker.model.joined_attention import StepQueries, joined_attention
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import CompressedWeights, PoolingWeights
from stage_worker.model.norms import NormWeights, RowNorm, row_norm, unit_norm
from stage_worker.model.projections import project
from stage_worker.model.rope import Rotary, RotaryTable, rotate_last_
from stage_worker.model.step_layout import LayerEntries, LayerKv, LayerMemory


class _Pool:
    """The pooling of entries, or of their keys."""

    def __init__(self, plan: Compressor, weights: PoolingWeights, norm: RowNorm) -> None:
        self._plan, self._norm = plan, norm
        self._width, self._bias = weights.width, weights.bias
        self.columns = weights.bias.shape[1]
        """Values of a token, and gates."""
        if plan.has_overlap:
            self._bias = torch.cat(weights.bias.tensor_split(2, dim=1))

    def __call__(self, values: Tensor, gates: Tensor, absent: Tensor) -> Tensor:
        """Normed entries [c, width] of `values` and `gates` [c, span, columns]; `absent` [c, span, 1] tokens
        are before the first one.
        """
        values, gates = (self._of_entry(x) for x in (values, gates))
        gates = (gates + self._bias).masked_fill_(absent, -math.inf)
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        return self._norm((values.masked_fill(absent, 0.0) * weights).sum(dim=1))

    def _of_entry(self, x: Tensor) -> Tensor:
        """The columns of each token that are for this entry, [c, span, width]."""
        if not self._plan.has_overlap:
            return x
        ratio, width = self._plan.ratio, self._width
        return torch.cat((x[:, :ratio, :width], x[:, ratio:, width:]), dim=1)


class CompressedAttention:
    """See `checkpoint.compressed.Compressed`."""

    def __init__(
        self,
        mixer: Compressed,
        weights: CompressedWeights,
        norms: Mapping[TensorRole, NormWeights],
        kernels: Kernels,
    ) -> None:
        """`norms` has those of latents, keys and entries. Packed weights replace the given ones."""
        products = kernels.layer_products
        self._mixer, self._rotary = mixer, Rotary.of(mixer)
        norm = Norm(kind=NormKind.RMS_WIDE, eps=mixer.norm_eps)
        self._query_down = project(weights.query_down, None, products)
        self._query_norm = row_norm(norm, norms[TensorRole.Q_LATENT_NORM])
        self._query = project(weights.query, None, products)
        self._head_norm = unit_norm(mixer.norm_eps)
        self._key = project(weights.key, None, products)
        self._key_norm = row_norm(norm, norms[TensorRole.K_NORM])
        self._attend = joined_attention(mixer, weights.sinks.float(), kernels)
        self._groups = [
            project(rows, None, products) for rows in torch.split(weights.groups, mixer.group_rank)
        ]
        self._pending = None if weights.pending is None else project(weights.pending, None, products)
        self._pools: dict[RowKind, _Pool] = {}
        plan, roles = mixer.compressor, {RowKind.ENTRY: TensorRole.ENTRY_NORM}
        roles[RowKind.ENTRY_KEY] = TensorRole.INDEX_NORM
        for kind, pooling in weights.pooling.items():
            assert plan is not None, "pooling without a compressor"
            self._pools[kind] = _Pool(plan, pooling, row_norm(norm, norms[roles[kind]]))
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
        heads = self._head_norm(self._query(latents)[:num_tokens].view(num_tokens, mixer.num_heads, -1))
        keys = self._key_norm(self._key(normed)[:num_tokens])[:, None]
        self._rotate(heads, table)
        self._rotate(keys, table)
        # All slices are written before any attends, since slices may share pages.
        kv.write(keys)
        index = None
        if mixer.compressor is not None:
            assert kv.entries is not None, "pages without entries"
            step = kv.entries.step.entries[mixer.compressor]
            self._write_entries(normed, step, mixer.compressor, kv, kv.entries)
            index = self._index_queries(normed, latents, table) if step.may_choose else None
        mixed = self._attend(StepQueries(heads, keys, *(index or ())), kv)
        self._rotate(mixed, table, is_back=True)
        output = normed.new_zeros(len(normed), mixer.o_size)
        by_group = torch.split(mixed.flatten(1), mixer.group_size, dim=1)
        places = torch.split(output[:num_tokens], mixer.group_rank, dim=1)
        for place, group, heads in zip(places, self._groups, by_group, strict=True):
            place.copy_(group(heads))
        return output

    def _rotate(self, heads: Tensor, table: RotaryTable, *, is_back: bool = False) -> None:
        if self._mixer.rope is not None:
            rotate_last_(heads, table, self._mixer.rope, is_back=is_back)

    def _write_entries(
        self, normed: Tensor, step: EntryStep, plan: Compressor, kv: LayerKv, entries: LayerEntries
    ) -> None:
        """Write what entries are pooled of, and the entries that end in the step."""
        assert self._pending is not None, "a compressor without weights"
        pending, writes = kv.pages.rows[RowKind.PENDING], kv.writes
        fresh = self._pending(normed)[: kv.step.num_tokens]
        written = fresh if writes.rows is None else fresh.index_select(0, writes.rows)
        pending.write(kv.layer, written, writes.slots)
        if not len(step.slots):
            return
        sources = kv.step.sources[plan]
        if step.kept is not None:
            sources = sources.index_select(0, step.kept)
        absent = (sources < 0)[..., None]
        widths = [pool.columns for pool in self._pools.values() for _ in range(2)]
        parts = pending.at(kv.layer, sources.clamp(min=0)).split_with_sizes(widths, dim=-1)
        table = step.rotary[self._rotary]
        for number, (kind, pool) in enumerate(self._pools.items()):
            found = pool(parts[2 * number], parts[2 * number + 1], absent)[:, None]
            self._rotate(found, table)
            entries.rows[kind].write(entries.layer, found[:, 0], step.slots)

    def _index_queries(
        self, normed: Tensor, latents: Tensor, table: RotaryTable
    ) -> tuple[Tensor, Tensor] | None:
        """Rotated queries by which entries are chosen, and weights, see `StepQueries`; None without an
        indexer.
        """
        if self._index_query is None:
            return None
        assert self._index_weight is not None, "an indexer without weights of heads"
        num_tokens, num_heads = len(table.cos), len(self._index_weight)
        heads = self._index_query(latents)[:num_tokens].view(num_tokens, num_heads, -1)
        self._rotate(heads, table)
        # Wide for the product only: a plan counts these weights in the run dtype.
        return heads, linear(normed[:num_tokens].float(), self._index_weight.float())
