"""Multi-head latent attention: pages hold latents, from which attention takes keys and values in two ways.

* Absorbed: queries are projected to the width of a latent, attend to the latents themselves, and the mixed
  latents are projected to values. No key or value of a head exists. One-token slices are computed so: the
  step reads `kv_rank + rope_dim` elements of each token, whatever the number of heads.
* Expanded: keys and values of each head are computed from the latents, a few heads at a time, then attention
  is as usual. It has more than three times fewer multiplications for each query and key, but expands every
  key; slices of several tokens choose by `is_expanded`.

With an indexer, or the choice of an earlier layer's (`stage_worker.model.indexer`), queries of more keys than
`Latent.top_k` attend to the chosen ones only. One-token slices gather just these latents; longer slices hide
the others by masks, since each of their queries has tokens of its own. Fewer keys are attended to as above.
Triton kernels read the chosen latents of each query of either kind, absorbed.

Both compute the same sums in another order. In float32 they differ by rounding only (1e-5 of the spread). In
bfloat16, absorbed queries and mixed latents are rounded where expanded keys and values are; scores and
softmax are float32 in both, weights are rounded to the run dtype, as in `operations.decode_products`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import EXPANDED_ELEMENTS, Latent
from checkpoint.names import TensorRole
from stage_worker.model.attention_views import DecodeView, PrefillView, QueryBlock
from stage_worker.model.attention_work import AttentionWork
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.indexer import IndexQueries, TokenIndexer, chosen_tokens
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import LatentWeights
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.operations import attend_in_pages, decode_products, prefill_products
from stage_worker.model.projections import project
from stage_worker.model.rope import Rotary, RotaryTable, rotate_
from stage_worker.model.step_layout import LayerKv, LayerMemory, Selection


def is_expanded(mixer: Latent, num_queries: int, num_keys: int) -> bool:
    """Whether a slice needs fewer multiplications if keys and values are expanded.

    Expanding the keys that are older than the slice is the additional work. Projecting the slice's own keys
    costs what projecting its queries and mixed latents does. Each visible pair of query and key saves twice
    the latent's width less the widths of a key and a value.
    """
    older = num_keys - num_queries
    pairs = num_queries * (2 * older + num_queries)
    widths = mixer.nope_dim + mixer.value_dim
    return 2 * older * mixer.kv_rank * widths < pairs * (2 * mixer.kv_rank - widths)


def _num_keys(view: DecodeView, kv: LayerKv) -> int:
    """Keys of each slice of a view, with the padding."""
    return view.pages.shape[1] * kv.store.shape[3]


@dataclass(frozen=True, slots=True)
class _ChosenBlocks:
    """The query blocks of prefill view `number`, each with a mask that hides the tokens that are not chosen.

    A mask exists only while its block is computed: all of them would be queries times keys.
    """

    blocks: tuple[QueryBlock, ...]
    selection: Selection
    number: int
    top_k: int

    def __iter__(self) -> Iterator[QueryBlock]:
        for place, block in enumerate(self.blocks):
            if block.keys[1] <= self.top_k:
                yield block
                continue
            tokens = self.selection.tokens[self.number, place].to(torch.int64)
            hidden = torch.full((len(tokens), block.keys[1]), -math.inf, device=tokens.device)
            yield replace(block, edges=((0, hidden.scatter_(1, tokens, 0.0)), *block.edges))


class LatentAttention:
    """See `Latent`."""

    def __init__(
        self,
        mixer: Latent,
        weights: LatentWeights,
        norms: Mapping[TensorRole, NormWeights],
        kernels: Kernels,
    ) -> None:
        """`norms` has those of latents and of the indexer's keys.

        Packed weights replace the given ones; those of keys and values are not packed, but separated.
        """
        products = kernels.layer_products
        self._mixer = mixer
        self._top_k = sys.maxsize if mixer.top_k is None else mixer.top_k
        self._indexer = None
        if weights.indexer is not None:
            self._indexer = TokenIndexer(mixer, weights.indexer, norms[TensorRole.INDEX_K_NORM], kernels)
        self._rotary = Rotary.of(mixer)
        self._query_down = None
        if weights.query_down is not None:
            self._query_down = project(weights.query_down, weights.query_down_bias, products)
            self._query_norm = row_norm(mixer.norm, norms[TensorRole.Q_LATENT_NORM])
        self._query = project(weights.query, None, products)
        self._latent = project(weights.latent, weights.latent_bias, products)
        self._gate = None if weights.gate is None else project(weights.gate, None, products)
        self._sinks = None if weights.sinks is None else weights.sinks.float()
        self._latent_norm = row_norm(mixer.norm, norms[TensorRole.KV_LATENT_NORM])
        # Products by parts of one tensor are slow.
        self._to_keys, self._to_values = weights.keys.contiguous(), weights.values.contiguous()

    def __call__(self, normed: Tensor, kv: LayerMemory) -> Tensor:
        """Mixed values [m, heads * value_dim] of `normed` [m, hidden_size], with zeros after the step's
        tokens.
        """
        assert isinstance(kv, LayerKv), "memory of another kind"
        step, mixer = kv.step, self._mixer
        num_rows, num_tokens = len(normed), step.num_tokens
        latents_of_queries = self._latents_of_queries(normed)
        query = self._query(latents_of_queries).view(num_rows, mixer.num_heads, -1)[:num_tokens]
        fresh = self._latent(normed)[:num_tokens, None]
        latents = fresh[..., : mixer.kv_rank]
        latents.copy_(self._latent_norm(latents))
        rotary = step.rotary[self._rotary]
        rotate_(query[..., mixer.nope_dim :], rotary.cos, rotary.sin)
        rotate_(fresh[..., mixer.kv_rank :], rotary.cos, rotary.sin)
        if rotary.query_scale is not None:
            query.mul_(rotary.query_scale)
        # All slices are written before any attends, since slices may share pages.
        kv.write(fresh)
        if self._indexer is not None:
            self._choose(self._indexer, normed, latents_of_queries, rotary, kv)
        new = normed.new_empty if num_rows == num_tokens else normed.new_zeros
        mixed = new(num_rows, mixer.num_heads, mixer.value_dim)
        views = step.views[None]
        if views.work is not None:
            self._attend_in_pages(query, mixed, views.work, views.work_rows, kv)
        for number, group in enumerate(views.choices):
            self._attend_to_choice(query, mixed, group, kv, kv.selection.tokens[number,])
        for number, view in enumerate(views.decodes):
            self._decode(query, mixed, view, kv, kv.selection.tokens.get((number,)))
        prefills = zip(step.prefill_rows, views.prefills, strict=True)
        for number, ((begin, end), prefill) in enumerate(prefills):
            chosen = self._restricted(prefill, number, kv)
            self._prefill(query[begin:end], fresh[begin:end, 0], mixed[begin:end], chosen, kv)
        mixed = mixed.view(num_rows, -1)
        return mixed if self._gate is None else mixed.mul_(self._gate(normed).sigmoid_())

    def _latents_of_queries(self, normed: Tensor) -> Tensor:
        """[m, query_rank], or `normed` itself without such latents."""
        return normed if self._query_down is None else self._query_norm(self._query_down(normed))

    def _choose(
        self, indexer: TokenIndexer, normed: Tensor, latents: Tensor, rotary: RotaryTable, kv: LayerKv
    ) -> None:
        """Write the step's keys of the indexer, and choose the tokens that queries with more keys than
        `top_k` attend to, in this layer and in those after it without an indexer.
        """
        step, views = kv.step, kv.step.views[None]
        if kv.kernels.are_triton:
            kv.selection.tokens = {}  # the choice of an earlier layer is not needed any more
            kv.selection.tokens = indexer.write(normed, latents, rotary, kv, self._top_k)
            return
        fresh = indexer.keys(normed, rotary)
        kv.write_index(fresh)
        tokens: dict[tuple[int, ...], Tensor] = {}
        kv.selection.tokens = tokens
        prefills = list(zip(step.prefill_rows, views.prefills, strict=True))
        longest = [_num_keys(view, kv) for view in views.decodes] + [view.num_keys for _, view in prefills]
        if max(longest, default=0) <= self._top_k:
            return
        queries = indexer.queries(normed, latents, rotary)
        for number, view in enumerate(views.decodes):
            if _num_keys(view, kv) > self._top_k:
                scores = queries.select(view.rows).scores(kv.gather_index(view.pages))
                hidden = () if view.mask is None else ((0, view.mask[0, :, 0]),)
                tokens[number,] = chosen_tokens(scores, self._top_k, hidden)
        for number, ((begin, end), prefill) in enumerate(prefills):
            if prefill.num_keys > self._top_k:
                keys = fresh[None, begin:end] if prefill.pages is None else kv.gather_index(prefill.pages)
                for place, chosen in self._chosen_by_block(queries.rows(begin, end), keys, prefill):
                    tokens[number, place] = chosen

    def _chosen_by_block(
        self, queries: IndexQueries, keys: Tensor, view: PrefillView
    ) -> Iterator[tuple[int, Tensor]]:
        """Number and tokens of each query block with more keys than `top_k`; `keys` are [1, s, head_dim]."""
        for number, block in enumerate(view.blocks):
            first_key, end = block.keys
            assert first_key == 0, "no window"
            if end > self._top_k:
                scores = queries.rows(*block.queries).scores(keys[:, :end])
                yield number, chosen_tokens(scores, self._top_k, block.edges)

    def _restricted(self, view: PrefillView, number: int, kv: LayerKv) -> PrefillView:
        """Prefill view `number` with masks that hide the tokens that are not chosen."""
        if view.num_keys <= self._top_k:
            return view
        return replace(view, blocks=_ChosenBlocks(tuple(view.blocks), kv.selection, number, self._top_k))

    def _decode(
        self, query: Tensor, mixed: Tensor, view: DecodeView, kv: LayerKv, tokens: Tensor | None
    ) -> None:
        """Fill the rows of `view` in `mixed`, absorbed; with `tokens`, from these keys only."""
        chosen = query if view.rows is None else query.index_select(0, view.rows)
        rows, mask = self._visible(view, kv, tokens)
        # Shared keys are mixed, too: bfloat16 products on a CPU would copy rows without them.
        absorbed = self._absorbed(chosen)[None]
        found = decode_products(absorbed, rows, rows, mask, self._mixer, self._sinks)
        values = self._values(found[0, ..., : self._mixer.kv_rank])
        if view.rows is None:
            mixed[: len(values)].copy_(values)
        else:
            mixed.index_copy_(0, view.rows, values)

    def _visible(self, view: DecodeView, kv: LayerKv, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Latents [1, b, s, width] that the queries of `view` attend to, and their mask."""
        if tokens is None:
            assert _num_keys(view, kv) <= self._top_k, "no tokens were chosen"
            return kv.gather(view.pages)[0], view.mask
        places, size = tokens.to(torch.int64), kv.store.shape[3]
        slots = view.pages.gather(1, places // size) * size + places % size
        mask = None if view.mask is None else view.mask[0, :, 0].gather(1, places)[None, :, None]
        return kv.gather_latents(slots)[None], mask

    def _attend_in_pages(
        self, query: Tensor, mixed: Tensor, work: AttentionWork, rows: Tensor | None, kv: LayerKv
    ) -> None:
        """Fill `rows` of `mixed` (None: all), absorbed."""
        chosen = query if rows is None else query.index_select(0, rows)
        latents = chosen.new_empty(len(chosen), self._mixer.num_heads, self._mixer.kv_rank)
        attend_in_pages(self._absorbed(chosen), latents, work, self._mixer, kv, self._sinks)
        if rows is None:
            mixed[: len(chosen)].copy_(self._values(latents))
        else:
            mixed.index_copy_(0, rows, self._values(latents))

    def _attend_to_choice(
        self, query: Tensor, mixed: Tensor, group: ChoiceGroup, kv: LayerKv, tokens: Tensor
    ) -> None:
        """Fill the rows of `group` in `mixed`, absorbed, from `tokens` int32 [n, top_k] of each query."""
        rows = slice(*group.span)
        chosen = query[rows] if group.queries is None else query.index_select(0, group.queries)
        latents = chosen.new_empty(len(chosen), self._mixer.num_heads, self._mixer.kv_rank)
        work = group.attention
        attend_in_pages(self._absorbed(chosen), latents, work, self._mixer, kv, self._sinks, tokens)
        if group.queries is None:
            mixed[rows].copy_(self._values(latents))
        else:
            mixed.index_copy_(0, group.queries, self._values(latents))

    def _prefill(self, query: Tensor, fresh: Tensor, mixed: Tensor, view: PrefillView, kv: LayerKv) -> None:
        """Fill `mixed` [n, heads, value_dim] for the n queries of one sequence.

        `fresh` [n, kv_rank + rope_dim] are their own rows of the pages.
        """
        rows = fresh if view.pages is None else kv.gather(view.pages)[0][0, 0, : view.num_keys]
        if is_expanded(self._mixer, len(query), view.num_keys):
            self._prefill_expanded(query, rows, mixed, view)
        else:
            self._prefill_absorbed(query, rows, mixed, view)

    def _prefill_absorbed(self, query: Tensor, rows: Tensor, mixed: Tensor, view: PrefillView) -> None:
        rank = self._mixer.kv_rank
        absorbed = self._absorbed(query).transpose(0, 1)[None]
        found = query.new_empty(1, self._mixer.num_heads, len(query), rank)
        keys, values = rows[None], rows[None, :, :rank]
        prefill_products(absorbed, keys, values, view, self._mixer, found, self._sinks)
        mixed.copy_(self._values(found[0].transpose(0, 1)))

    def _prefill_expanded(self, query: Tensor, rows: Tensor, mixed: Tensor, view: PrefillView) -> None:
        mixer = self._mixer
        latents, shared = rows.split_with_sizes((mixer.kv_rank, mixer.rope_dim), dim=1)
        of_a_head = len(rows) * (mixer.query_dim + mixer.value_dim)
        step = max(1, EXPANDED_ELEMENTS // of_a_head)
        for first in range(0, mixer.num_heads, step):
            heads = slice(first, first + step)
            keys, values = (
                linear(latents, matrix[heads].flatten(0, 1)).view(len(rows), -1, matrix.shape[1])
                for matrix in (self._to_keys, self._to_values)
            )
            keys = torch.cat((keys, shared[:, None].expand(-1, keys.shape[1], -1)), dim=2)
            by_query, target = (x[:, heads].transpose(0, 1)[:, None] for x in (query, mixed))
            sinks = None if self._sinks is None else self._sinks[heads]
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
            prefill_products(by_query, keys, values, view, mixer, target, sinks)

    def _absorbed(self, query: Tensor) -> Tensor:
        """Queries for latents and shared keys, [n, heads, kv_rank + rope_dim]."""
        plain, rotated = query.split_with_sizes((self._mixer.nope_dim, self._mixer.rope_dim), dim=2)
        of_latents = torch.bmm(plain.transpose(0, 1), self._to_keys).transpose(0, 1)
        return torch.cat((of_latents, rotated), dim=2)

    def _values(self, latents: Tensor) -> Tensor:
        """Values [n, heads, value_dim] of mixed `latents` [n, heads, kv_rank]."""
        return torch.bmm(latents.transpose(0, 1), self._to_values.transpose(1, 2)).transpose(0, 1)
