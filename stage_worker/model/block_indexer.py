"""The indexer of attention to chosen blocks: means of keys, scores of blocks, and masks of the others.

Pages have the keys of single tokens, as they are projected; means, norms and rotations of all blocks that a
sequence has are computed in each step. Scores and choices are as in `stage_worker.model.indexer`. torch's
operators hide by masks what is not chosen, in decodes, too; Triton kernels read only what a query has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from checkpoint import Attention, Norm
from checkpoint.block_indexer import BlockIndexer
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from stage_worker.model.attention_views import DecodeView, PrefillView, QueryBlock
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.kernels import Kernels, load_triton
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import attend_in_pages, operations
from stage_worker.model.projections import Weight, project
from stage_worker.model.rope import Rotary, rotate_
from stage_worker.model.step_layout import LayerKv
from stage_worker.model.window_views import AttentionViews


class BlockChooser:
    """See `BlockIndexer`."""

    def __init__(
        self, mixer: Attention, weight: Weight, norms: Mapping[TensorRole, NormWeights], kernels: Kernels
    ) -> None:
        """Packed weights replace the given one."""
        assert mixer.indexer is not None, "a layer without an indexer"
        self._mixer, self._plan = mixer, mixer.indexer
        self._rotary, self._block_rotary = Rotary.of_queries(mixer), Rotary.of_blocks(mixer)
        norm = Norm(kind=NormKind.RMS_OFFSET, eps=self._plan.norm_eps)
        self._input = project(weight, None, kernels.layer_products)
        self._query_norm, self._key_norm = (
            operations(kernels).norm(norm, norms[role])
            for role in (TensorRole.INDEX_Q_NORM, TensorRole.INDEX_K_NORM)
        )

    def __call__(self, normed: Tensor, kv: LayerKv) -> AttentionViews:
        """Write the keys of the step's tokens, with the layer's input `normed` [m, hidden_size]; return the
        views of the step in which all but the chosen blocks are hidden. By torch's operators.
        """
        step, views, plan = kv.step, kv.step.views[None], self._plan
        assert not kv.kernels.are_triton, "work lists without masks"
        projected = self._input(normed)[: step.num_tokens]
        queries, fresh = projected.split_with_sizes((plan.num_heads * plan.head_dim, plan.head_dim), dim=1)
        kv.write_index(fresh)
        prefills = list(zip(step.prefill_rows, views.prefills, strict=True))
        lengths = [view.pages.shape[1] * kv.store.shape[3] for view in views.decodes]
        if not any(map(self._has_choice, [*lengths, *(view.num_keys for _, view in prefills)])):
            return views
        found = self._queries(queries, kv)
        decodes = tuple(self._decode_view(view, found, kv) for view in views.decodes)
        return replace(
            views,
            decodes=decodes,
            prefills=tuple(
                self._prefill_view(view, found.rows(begin, end), fresh[begin:end], kv)
                for (begin, end), view in prefills
            ),
        )

    def attend(
        self, normed: Tensor, query: Tensor, output: Tensor, kv: LayerKv, sinks: Tensor | None
    ) -> None:
        """Write the keys of the step's tokens, and fill the rows of `output` [n, heads, head_dim] whose
        queries choose blocks, from the rotated `query` [n, heads, head_dim]. By Triton kernels.
        """
        kernels, plan, step = load_triton("block_keys"), self._plan, kv.step
        choices, pages = step.views[None].block_choices, kv.index.store(kv.layer)
        rotary, projected = step.rotary[self._rotary], self._input(normed)[: step.num_tokens]
        queries = kernels.write_keys(
            *(projected, plan.num_heads, self._query_norm, rotary.cos, rotary.sin, kv.writes.by_row, pages),
            has_queries=choices is not None,
        )
        if choices is None:
            return
        rotary = step.rotary[self._block_rotary]
        keys = kernels.block_keys(
            pages, choices.blocks, plan.block_size, self._key_norm, rotary.cos, rotary.sin
        )
        for group in choices.groups:
            self._attend_to_choice(query, output, group, kv, self._chosen(queries, keys, group), sinks)

    def _chosen(self, queries: Tensor, keys: Tensor, group: ChoiceGroup) -> Tensor:
        """Blocks int32 [r, top_blocks + 1] of the group's queries, each followed by the block of its last
        tokens; `keys` are [blocks, head_dim].
        """
        kernels, plan = load_triton("choices"), self._plan
        scores = kernels.score(queries, None, group, keys[:, None], ratio=plan.block_size)
        chosen: Tensor = kernels.choose(scores, group, plan.top_blocks, has_last=True)
        return chosen

    def _attend_to_choice(
        self,
        query: Tensor,
        output: Tensor,
        group: ChoiceGroup,
        kv: LayerKv,
        blocks: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Fill the rows of `group` in `output` from `blocks` of each query, see `_chosen`."""
        rows, unit = slice(*group.span), self._plan.block_size
        own = query[rows] if group.queries is None else query.index_select(0, group.queries)
        found = output[rows] if group.queries is None else torch.empty_like(own)
        attend_in_pages(own, found, group.attention, self._mixer, kv, sinks, blocks, unit)
        if group.queries is not None:
            output.index_copy_(0, group.queries, found)

    def _has_choice(self, num_keys: int) -> bool:
        return num_keys // self._plan.block_size > self._plan.top_blocks

    def _queries(self, projected: Tensor, kv: LayerKv) -> IndexQueries:
        """Rotated queries; all heads count alike."""
        rotary = kv.step.rotary[self._rotary]
        heads = self._query_norm(torch.unflatten(projected, 1, (self._plan.num_heads, -1)))
        rotate_(heads, rotary.cos, rotary.sin)
        wide = heads.to(torch.float32)
        return IndexQueries(wide, wide.new_ones(wide.shape[:2]))

    def _block_keys(self, keys: Tensor, kv: LayerKv) -> Tensor:
        """Keys [b, blocks, head_dim] of the whole blocks of `keys` [b, s, head_dim], from position 0 on."""
        size, num_blocks = self._plan.block_size, keys.shape[1] // self._plan.block_size
        blocks = torch.unflatten(keys[:, : num_blocks * size], 1, (num_blocks, size))
        means = self._key_norm(blocks.to(torch.float32).mean(dim=2).to(keys.dtype))
        rotary = kv.step.rotary[self._block_rotary]
        missing = num_blocks - len(rotary.cos)  # padding of pages, which no query sees
        cos, sin = (x[:num_blocks, 0] for x in (rotary.cos, rotary.sin))
        if missing > 0:
            cos, sin = (pad(x, (0, 0, 0, missing)) for x in (cos, sin))
        rotate_(means, cos, sin)
        return means

    def _decode_view(self, view: DecodeView, queries: IndexQueries, kv: LayerKv) -> DecodeView:
        num_keys = view.pages.shape[1] * kv.store.shape[3]
        if not self._has_choice(num_keys):
            return view
        positions = kv.step.positions
        if view.rows is not None:
            positions = positions.index_select(0, view.rows)
        keys = self._block_keys(kv.gather_index(view.pages), kv)
        mask = mask_of_others(self._plan, queries.select(view.rows), keys, positions, num_keys)[None, :, None]
        return replace(view, mask=mask if view.mask is None else mask + view.mask)

    def _prefill_view(
        self, view: PrefillView, queries: IndexQueries, fresh: Tensor, kv: LayerKv
    ) -> PrefillView:
        """`fresh` [n, head_dim] are the keys of the queries' own tokens."""
        if not self._has_choice(view.num_keys):
            return view
        keys = fresh[None] if view.pages is None else kv.gather_index(view.pages)[:, : view.num_keys]
        block_keys, first = self._block_keys(keys, kv), view.num_keys - len(fresh)

        def mask_of(block: QueryBlock) -> Tensor | None:
            (begin, end), (low, num_keys) = block.queries, block.keys
            assert low == 0, "no window"
            if not self._has_choice(num_keys):
                return None
            positions = torch.arange(first + begin, first + end, device=fresh.device)
            whole = block_keys[:, : num_keys // self._plan.block_size]
            return mask_of_others(self._plan, queries.rows(begin, end), whole, positions, num_keys)

        return replace(view, blocks=_ChosenBlocks(tuple(view.blocks), mask_of))


def mask_of_others(
    plan: BlockIndexer, queries: IndexQueries, keys: Tensor, positions: Tensor, num_keys: int
) -> Tensor:
    """Additive mask float32 [n, num_keys] of queries at `positions` int64 [n]: -inf for the tokens of whole
    blocks that are not chosen. `keys` are [n or 1, blocks, head_dim], of blocks from position 0 on.
    """
    size, num_blocks = plan.block_size, keys.shape[1]
    is_whole = torch.arange(num_blocks, device=keys.device) < ((positions + 1) // size)[:, None]
    parts = torch.zeros(is_whole.shape, device=keys.device).masked_fill_(~is_whole, -math.inf)
    chosen = chosen_tokens(queries.scores(keys), plan.top_blocks, ((0, parts),))
    is_hidden = is_whole.scatter(1, chosen.to(torch.int64), False).repeat_interleave(size, dim=1)
    mask = torch.zeros(len(positions), num_keys, device=keys.device)
    mask[:, : num_blocks * size].masked_fill_(is_hidden, -math.inf)
    return mask


@dataclass(frozen=True, slots=True)
class _ChosenBlocks:
    """Query blocks of a slice, each with a mask from `mask_of`, if it has one.

    A mask exists only while its block is computed: all of them would be queries times keys.
    """

    blocks: tuple[QueryBlock, ...]
    mask_of: Callable[[QueryBlock], Tensor | None]

    def __iter__(self) -> Iterator[QueryBlock]:
        for block in self.blocks:
            mask = self.mask_of(block)
            yield block if mask is None else replace(block, edges=((0, mask), *block.edges))
