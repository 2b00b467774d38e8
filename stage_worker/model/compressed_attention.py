"""Attention to a window of shared keys, and to entries that compressors pool of earlier tokens.

A layer writes the keys of a step's tokens and what their entries are pooled of, then pools the entries that
end in the step, and then attends. Entries depend on the tokens alone, and not on the chunks in which they
were computed, up to the rounding of products.

Keys in the window and entries are in different block groups, so that a query attends to either apart: scores,
highest scores, sums of weights and weighted sums are float32, and are joined as in one softmax, in which the
sinks come first. In bfloat16, weights are relative to the highest score of their part when they are rounded,
where transformers rounds them relative to the sum of all. Pooling is as in transformers: the softmax of gates
is float32, and its weights are rounded before they multiply values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import EXPANDED_ELEMENTS, Compressed, Norm
from checkpoint.blueprint import NormKind
from checkpoint.compressed import Compressor
from checkpoint.names import TensorRole
from checkpoint.step_sizes import BLOCK_SCORES
from kvcache.layer_rows import RowKind
from stage_worker.model.attention_views import PrefillView
from stage_worker.model.entry_layout import EntryStep, EntryView
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import CompressedWeights, PoolingWeights
from stage_worker.model.norms import NormWeights, RowNorm, row_norm, unit_norm
from stage_worker.model.projections import project
from stage_worker.model.rope import Rotary, RotaryTable, rotate_last_
from stage_worker.model.step_layout import LayerEntries, LayerKv, LayerMemory

_Rows = Tensor | slice
"""Rows of a step: int64 [q], or a range."""


class JoinedSoftmax:
    """Weighted sums of values, of parts of the keys of a step's queries."""

    def __init__(self, sinks: Tensor, num_tokens: int, width: int) -> None:
        """`sinks` float32 [heads] are the scores of a first part without values."""
        self._highest = sinks.repeat(num_tokens, 1)
        self._total = torch.ones_like(self._highest)
        self._mixed = sinks.new_zeros(num_tokens, len(sinks), width)

    def add(self, rows: _Rows, scores: Tensor, values: Tensor) -> None:
        """Add keys with `scores` float32 [q, heads, s], which are modified, to the queries `rows`.

        `values` are [q, s, width], or [1, s, width] for all queries.
        """
        before = self._highest[rows]
        highest = torch.maximum(before, scores.amax(dim=-1))
        shrunk = (before - highest).exp_()
        weights = scores.sub_(highest[..., None]).exp_()
        self._highest[rows] = highest
        self._total[rows] = self._total[rows] * shrunk + weights.sum(dim=-1)
        mixed = _products(weights.to(values.dtype), values)
        self._mixed[rows] = self._mixed[rows] * shrunk[..., None] + mixed

    def mixed(self) -> Tensor:
        """Float32 [num_tokens, heads, width]."""
        return self._mixed.div_(self._total[..., None])


def _products(rows: Tensor, matrices: Tensor) -> Tensor:
    """[q, heads, n] for `rows` [q, heads, m] and `matrices` [q, m, n], or [1, m, n] for all q."""
    if len(matrices) == len(rows):
        return torch.bmm(rows, matrices)
    return torch.matmul(rows.flatten(0, 1), matrices[0]).view(*rows.shape[:2], -1)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """Queries of a step: `heads` [n, heads, head_dim], and those that an indexer scores entries by."""

    heads: Tensor
    index: IndexQueries | None


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
        self._sinks = weights.sinks.float()
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
        indexer = None if plan is None else plan.indexer
        self._top_k = sys.maxsize if indexer is None else indexer.num_chosen

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
        softmax = JoinedSoftmax(self._sinks, num_tokens, mixer.head_dim)
        self._attend_window(heads, keys, softmax, kv)
        if mixer.compressor is not None:
            assert kv.entries is not None, "pages without entries"
            step = kv.entries.step.entries[mixer.compressor]
            self._write_entries(normed, step, mixer.compressor, kv, kv.entries)
            queries = _Queries(heads, self._index_queries(normed, latents, table))
            for view in step.views:
                self._attend_entries(queries, view, softmax, kv.entries)
        mixed = softmax.mixed().to(normed.dtype)
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

    def _attend_window(self, heads: Tensor, keys: Tensor, softmax: JoinedSoftmax, kv: LayerKv) -> None:
        """Attend to keys of the window; `keys` [n, 1, head_dim] are the step's own."""
        step, scale = kv.step, self._mixer.scale
        views = step.views[self._mixer.window]
        for view in views.decodes:
            rows = slice(None) if view.rows is None else view.rows
            visible = kv.gather(view.pages)[0][0]
            scores = torch.bmm(heads[rows].float() * scale, visible.float().transpose(1, 2))
            if view.mask is not None:
                scores.add_(view.mask[0])
            softmax.add(rows, scores, visible)
        for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
            visible = keys[begin:end, 0] if prefill.pages is None else kv.gather(prefill.pages)[0][0, 0]
            for rows, scores, values in self._blocks(heads, visible, begin, prefill):
                softmax.add(rows, scores, values)

    def _blocks(
        self, heads: Tensor, visible: Tensor, begin: int, view: PrefillView
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, scores and values of each query block of a slice that begins with row `begin`."""
        wide = visible[: view.num_keys].float()
        for block in view.blocks:
            (first, last), (low, high) = block.queries, block.keys
            rows = slice(begin + first, begin + last)
            scores = _products(heads[rows].float() * self._mixer.scale, wide[None, low:high].mT)
            for edge, mask in block.edges:
                scores[..., edge : edge + mask.shape[1]].add_(mask[:, None])
            yield rows, scores, visible[None, low:high]

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

    def _index_queries(self, normed: Tensor, latents: Tensor, table: RotaryTable) -> IndexQueries | None:
        """Rotated queries by which entries are chosen; None without an indexer."""
        if self._index_query is None:
            return None
        assert self._index_weight is not None, "an indexer without weights of heads"
        num_tokens, num_heads = len(table.cos), len(self._index_weight)
        heads = self._index_query(latents)[:num_tokens].view(num_tokens, num_heads, -1)
        self._rotate(heads, table)
        # Wide for the product only: a plan counts these weights in the run dtype.
        weights = linear(normed[:num_tokens].float(), self._index_weight.float())
        return IndexQueries(heads.float(), weights)

    def _attend_entries(
        self, queries: _Queries, view: EntryView, softmax: JoinedSoftmax, entries: LayerEntries
    ) -> None:
        """Attend to the entries of a view, or to those of them that the indexer chooses."""
        is_chosen = queries.index is not None and view.most > self._top_k
        kind = RowKind.ENTRY_KEY if is_chosen else RowKind.ENTRY
        rows = entries.rows[kind].gather(entries.layer, view.pages)[:, : view.most]
        numbers = torch.arange(view.most, device=rows.device)
        for part, own in _parts(view, rows, self._queries_at_once(view.most, is_chosen=is_chosen)):
            # Rows that none has written are zero: a begun block is cleared, and a full one has all entries.
            hidden, values = numbers >= part.counts, own
            if is_chosen:
                chosen = self._chosen(queries, part, own, hidden)
                values, hidden = self._entries_at(chosen, part, entries), chosen >= part.counts
            heads = queries.heads[part.rows].float() * self._mixer.scale
            scores = _products(heads, values.float().mT)
            softmax.add(part.rows, scores.masked_fill_(hidden[:, None], -math.inf), values)

    def _queries_at_once(self, num_entries: int, *, is_chosen: bool) -> int:
        """Queries of a prompt whose scores, and whose chosen entries, are computed together."""
        most = max(1, BLOCK_SCORES // num_entries)
        if is_chosen:
            most = min(most, max(1, EXPANDED_ELEMENTS // (self._top_k * self._mixer.head_dim)))
        return most

    def _chosen(self, queries: _Queries, view: EntryView, keys: Tensor, hidden: Tensor) -> Tensor:
        """Numbers int64 [q, top_k] of entries; those that are hidden come with too few others only."""
        assert queries.index is not None, "no indexer"
        index = IndexQueries(queries.index.heads[view.rows], queries.index.weights[view.rows])
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)
        return chosen_tokens(index.scores(keys), self._top_k, ((0, mask),)).to(torch.int64)

    def _entries_at(self, chosen: Tensor, view: EntryView, entries: LayerEntries) -> Tensor:
        """Entries [q, top_k, head_dim] by their numbers."""
        rows = entries.rows[RowKind.ENTRY]
        size = rows.rows_per_block(entries.layer)
        pages = view.pages.expand(len(chosen), -1).gather(1, chosen // size)
        return rows.at(entries.layer, pages * size + chosen % size)


def _parts(view: EntryView, rows: Tensor, most: int) -> Iterator[tuple[EntryView, Tensor]]:
    """Parts of a prompt's view with `most` queries, and other views as they are, each with its `rows`."""
    if not isinstance(view.rows, slice):
        yield view, rows
        return
    num_queries = len(view.counts)
    for begin in range(0, num_queries, most):
        end = min(begin + most, num_queries)
        own = slice(view.rows.start + begin, view.rows.start + end)
        yield replace(view, rows=own, counts=view.counts[begin:end]), rows
