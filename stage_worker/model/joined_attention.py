"""Attention to a window of shared keys and to entries, in one softmax: by torch's operators or by kernels.

By torch's operators, a query attends to either apart, since keys and entries are in different block groups:
scores, highest scores, sums of weights and weighted sums are float32, and are joined as in one softmax, in
which the sinks come first. In bfloat16, weights are relative to the highest score of their part when they are
rounded, where transformers rounds them relative to the sum of all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from checkpoint import EXPANDED_ELEMENTS, Compressed
from checkpoint.compressed import Compressor
from checkpoint.step_sizes import BLOCK_SCORES
from kvcache.layer_rows import RowKind
from stage_worker.model.attention_views import PrefillView
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.entry_layout import EntryView
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.kernels import Kernels, load_triton
from stage_worker.model.operations import attend_in_pages
from stage_worker.model.step_layout import LayerEntries, LayerKv

_Rows = Tensor | slice
"""Rows of a step: int64 [q], or a range."""


@dataclass(frozen=True, slots=True, eq=False)
class StepQueries:
    """Queries of a step: `heads` [n, heads, head_dim], with the step's own `keys` [n, 1, head_dim], which
    kernels read in pages.

    An indexer scores entries by `index_heads` [n, index_heads, index_dim], weighted by `index_weights`
    float32 [n, index_heads]; None where no query chooses.
    """

    heads: Tensor
    keys: Tensor | None
    index_heads: Tensor | None = None
    index_weights: Tensor | None = None


class JoinedAttention(Protocol):
    """Attention of a layer to keys and entries that are written."""

    def __call__(self, queries: StepQueries, kv: LayerKv) -> Tensor:
        """Mixed values [n, heads, head_dim] in the run dtype."""


def joined_attention(mixer: Compressed, sinks: Tensor, kernels: Kernels) -> JoinedAttention:
    """The implementation for `kernels`; `sinks` are float32 [heads]."""
    return AttentionByKernels(mixer, sinks) if kernels.are_triton else AttentionByTorch(mixer, sinks)


class AttentionByKernels:
    """In place, by work lists; a layer without a compressor is like any other with a window."""

    def __init__(self, mixer: Compressed, sinks: Tensor) -> None:
        self._mixer, self._sinks = mixer, sinks

    def __call__(self, queries: StepQueries, kv: LayerKv) -> Tensor:
        mixed = torch.empty_like(queries.heads)
        if self._mixer.compressor is not None:
            self._attend_joined(queries, mixed, self._mixer.compressor, kv)
            return mixed
        work = kv.step.views[self._mixer.window].work
        assert work is not None, "work lists of Triton kernels cover all queries"
        attend_in_pages(queries.heads, mixed, work, self._mixer, kv, self._sinks)
        return mixed

    def _attend_joined(self, queries: StepQueries, mixed: Tensor, plan: Compressor, kv: LayerKv) -> None:
        """Fill `mixed`; queries that choose, and others, in a launch each."""
        entries, key_pages = kv.entries, kv.step.key_pages
        assert entries is not None and key_pages is not None, "pages without entries"
        work = entries.step.entries[plan].work
        assert work is not None, "a layout for other kernels"
        chosen = self._chosen(queries, plan, work.groups, entries)
        attend = load_triton("compressed_attention").attend_joined
        for part, choice in ((work.whole, None), (work.chosen, chosen)):
            if len(part.items):
                attend(
                    *(queries.heads, mixed, part, kv.store, key_pages),
                    *(entries.rows[RowKind.ENTRY].blocks(entries.layer), work.pages),
                    ratio=plan.ratio,
                    scale=self._mixer.scale,
                    window=self._mixer.window,
                    sinks=self._sinks,
                    key_scales=kv.scales,
                    chosen=choice,
                )

    def _chosen(
        self,
        queries: StepQueries,
        plan: Compressor,
        groups: tuple[ChoiceGroup, ...],
        entries: LayerEntries,
    ) -> Tensor | None:
        """Entries int32 [r, top_k] that the queries of all `groups` choose; None without groups."""
        if not groups:
            return None
        kernels, keys = load_triton("choices"), entries.rows[RowKind.ENTRY_KEY].blocks(entries.layer)
        given = (queries.index_heads, queries.index_weights)
        found: list[Tensor] = [
            # Without a name for the scores: the next group's take their memory.
            kernels.choose(kernels.score(*given, group, keys, ratio=plan.ratio), group, plan.num_chosen)
            for group in groups
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


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


class AttentionByTorch:
    """Keys and entries apart, gathered."""

    def __init__(self, mixer: Compressed, sinks: Tensor) -> None:
        self._mixer, self._sinks = mixer, sinks
        num_chosen = None if mixer.compressor is None else mixer.compressor.num_chosen
        self._top_k = sys.maxsize if num_chosen is None else num_chosen

    def __call__(self, queries: StepQueries, kv: LayerKv) -> Tensor:
        heads, keys = queries.heads, queries.keys
        assert keys is not None, "queries for kernels"
        softmax = JoinedSoftmax(self._sinks, len(heads), self._mixer.head_dim)
        self._attend_window(heads, keys, softmax, kv)
        if self._mixer.compressor is not None:
            assert kv.entries is not None, "pages without entries"
            for view in kv.entries.step.entries[self._mixer.compressor].views:
                self._attend_entries(queries, view, softmax, kv.entries)
        return softmax.mixed().to(heads.dtype)

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

    def _attend_entries(
        self, queries: StepQueries, view: EntryView, softmax: JoinedSoftmax, entries: LayerEntries
    ) -> None:
        """Attend to all entries of a view, or to the ones that the indexer chooses."""
        is_chosen = view.most > self._top_k
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

    def _chosen(self, queries: StepQueries, view: EntryView, keys: Tensor, hidden: Tensor) -> Tensor:
        """Numbers int64 [q, top_k] of entries; those that are hidden come with too few others only."""
        assert queries.index_heads is not None and queries.index_weights is not None, "no indexer"
        index = IndexQueries(queries.index_heads[view.rows].float(), queries.index_weights[view.rows])
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
