"""The indexer of sparse attention: scores of all tokens for a query, and the choice of the highest.

Scores and their sums are float32, of keys and queries in the run dtype; weights of heads are products in
float32. Of equal scores the first tokens are chosen, so that a choice depends neither on padding nor on the
other queries; as with routers of experts, scores that differ by less than the rounding of a product may be
ordered otherwise in a batch of another shape. A score that is not a number counts as the highest: what a
sequence has computed wrongly must not be hidden by not looking at it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import INDEX_ELEMENTS, Latent
from stage_worker.model.kernels import Kernels, load_triton
from stage_worker.model.layer_weights import IndexerWeights
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import operations
from stage_worker.model.projections import project
from stage_worker.model.rope import RotaryTable, rotate_
from stage_worker.model.step_layout import LayerKv


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """Queries float32 [n, heads, head_dim] of an indexer, and the weight of each head, float32 [n, heads]."""

    heads: Tensor
    weights: Tensor

    def rows(self, begin: int, end: int) -> IndexQueries:
        """Those of rows [begin, end)."""
        return IndexQueries(self.heads[begin:end], self.weights[begin:end])

    def select(self, rows: Tensor | None) -> IndexQueries:
        """Those of `rows` int64 [b]; None: all."""
        if rows is None:
            return self
        return IndexQueries(self.heads.index_select(0, rows), self.weights.index_select(0, rows))

    def scores(self, keys: Tensor) -> Tensor:
        """Scores float32 [n, s] of `keys` [n, s, head_dim], or of [1, s, head_dim] for all queries."""
        num_queries, num_heads = self.weights.shape
        num_keys = keys.shape[1]
        wide = keys.to(torch.float32).transpose(1, 2)
        scores = wide.new_zeros(num_queries, 1, num_keys)
        step = max(1, INDEX_ELEMENTS // (num_queries * num_keys))
        for first in range(0, num_heads, step):
            heads = slice(first, first + step)
            found = torch.matmul(self.heads[:, heads], wide if len(keys) > 1 else wide[0]).relu_()
            scores.baddbmm_(self.weights[:, None, heads], found)
        return scores[:, 0]


class TokenIndexer:
    """See `checkpoint.blueprint.Indexer`."""

    def __init__(self, mixer: Latent, weights: IndexerWeights, norm: NormWeights, kernels: Kernels) -> None:
        """Packed weights replace the given ones."""
        assert mixer.indexer is not None, "a layer without an indexer"
        self._plan, self._rotated = mixer.indexer, mixer.indexer.rotated(mixer.rope_dim)
        products = kernels.layer_products
        self._query = project(weights.query, None, products)
        self._key = project(weights.key, None, products)
        self._key_norm = operations(kernels).norm(self._plan.norm, norm)
        self._weight = weights.weight

    def keys(self, normed: Tensor, rotary: RotaryTable) -> Tensor:
        """Rotated keys [n, head_dim] of the n tokens of `rotary`, for the layer's input `normed`."""
        keys = self._key_norm(self._key(normed))[: len(rotary.cos), None]
        rotate_(keys[..., self._rotated], rotary.cos, rotary.sin)
        return keys[:, 0]

    def queries(self, normed: Tensor, latents: Tensor, rotary: RotaryTable) -> IndexQueries:
        """Rotated queries of the n tokens of `rotary`, for `normed` and the `latents` of queries."""
        heads = self._heads(latents, len(rotary.cos))
        rotate_(heads[..., self._rotated], rotary.cos, rotary.sin)
        return IndexQueries(heads.to(torch.float32), self._weights(normed, len(heads)))

    def write(
        self, normed: Tensor, latents: Tensor, rotary: RotaryTable, kv: LayerKv, top_k: int
    ) -> dict[tuple[int, ...], Tensor]:
        """Write the step's keys to its pages, and choose, see `Selection.tokens`; by Triton kernels.

        Queries stay in the run dtype: products of two such elements are exact in float32.
        """
        kernels, num_tokens = load_triton("choices"), len(rotary.cos)
        groups, pages = kv.step.views[None].choices, kv.index.store(kv.layer)
        keys = self._key_norm(self._key(normed))[:num_tokens]
        heads = self._heads(latents, num_tokens) if groups else None
        kernels.rotate_and_write_keys(
            *(heads, keys, rotary.cos, rotary.sin, kv.writes.by_row, pages), first=self._rotated.start or 0
        )
        if heads is None:
            return {}
        weights = self._weights(normed, num_tokens)
        found: dict[tuple[int, ...], Tensor] = {}
        for number, group in enumerate(groups):
            # Without a name for the scores: the next group's take their memory.
            found[number,] = kernels.choose(kernels.score(heads, weights, group, pages), group, top_k)
        return found

    def _heads(self, latents: Tensor, num_tokens: int) -> Tensor:
        """Queries [num_tokens, heads, head_dim], not rotated."""
        return self._query(latents)[:num_tokens].view(num_tokens, self._plan.num_heads, -1)

    def _weights(self, normed: Tensor, num_tokens: int) -> Tensor:
        """The weight of each head, float32 [num_tokens, heads]."""
        return linear(normed[:num_tokens].to(torch.float32), self._weight.to(torch.float32))


def chosen_tokens(scores: Tensor, count: int, hidden: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Ascending indexes int32 [n, count] of the highest `scores` float32 [n, s], s at least `count`.

    Each of `hidden` is (begin, mask [n or 1, m]), additive: keys begin + i with -inf come after all others.
    """
    scores = scores.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    for begin, mask in hidden:
        scores[:, begin : begin + mask.shape[-1]].masked_fill_(mask < 0, -math.inf)
    least = scores.topk(count, dim=-1, sorted=True).values[:, -1:]
    is_chosen, is_least = scores > least, scores == least
    missing = count - is_chosen.sum(dim=-1, keepdim=True)
    is_chosen |= is_least & (is_least.cumsum(dim=-1) <= missing)
    return is_chosen.nonzero()[:, 1].view(len(scores), count).to(torch.int32)
