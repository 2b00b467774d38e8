"""Compressed attention of the self-check's reference: whole texts, without windows of blocks or chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint import Norm
from checkpoint.blueprint import NormKind
from checkpoint.compressed import Compressed, Compressor, EntryIndexer
from checkpoint.compressed_shapes import GATE_BIAS_KIND
from checkpoint.names import TensorRole
from checkpoint.tensors import SINKS_KIND, RoleRows
from stage_worker.loading.reference_copies import routed
from stage_worker.model.rope import rotated_pairs

if TYPE_CHECKING:
    from stage_worker.loading.reference import StreamedLayer

_ENTRIES = (TensorRole.ENTRY_VALUE, TensorRole.ENTRY_GATE, TensorRole.ENTRY_BIAS, TensorRole.ENTRY_NORM)
_KEYS = (TensorRole.INDEX_VALUE, TensorRole.INDEX_GATE, TensorRole.INDEX_BIAS, TensorRole.INDEX_NORM)
Roles = tuple[TensorRole, TensorRole, TensorRole, TensorRole]


class StreamedCompressed:
    """See `Compressed`; tensors are [copies, ...]."""

    def __init__(self, layer: StreamedLayer, mixer: Compressed) -> None:
        self._layer, self._mixer = layer, mixer
        self._model, self._places = layer.model, layer.places
        self._norm = Norm(kind=NormKind.RMS_WIDE, eps=mixer.norm_eps)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[copies, n, width] for `x` [copies, n, width] of texts of `lengths`."""
        layer, mixer = self._layer, self._mixer
        rounded = self._model.rounded
        latents = layer.normed(layer.projected(x, TensorRole.Q_DOWN), TensorRole.Q_LATENT_NORM, self._norm)
        heads = torch.unflatten(layer.projected(latents, TensorRole.Q_UP), -1, (mixer.num_heads, -1))
        heads = rounded(heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + mixer.norm_eps))
        keys = layer.normed(layer.projected(x, TensorRole.K), TensorRole.K_NORM, self._norm)
        sizes = list(lengths)
        entries: Iterator[Tensor | None] = iter([None] * len(sizes))
        chosen: Iterator[Tensor | None] = iter([None] * len(sizes))
        if (plan := mixer.compressor) is not None:
            entries = self._pooled(x, sizes, plan, _ENTRIES)
            if plan.indexer is not None:
                chosen = self._chosen(x, latents, sizes, plan, plan.indexer)
        texts = zip(
            heads.split_with_sizes(sizes, 1),
            keys[:, :, None].split_with_sizes(sizes, 1),
            entries,
            chosen,
            strict=True,
        )
        mixed = torch.cat([self._attended(q, k, e, among) for q, k, e, among in texts], dim=1)
        return layer.projected(self._by_group(mixed), TensorRole.O)

    def _attended(self, heads: Tensor, keys: Tensor, entries: Tensor | None, among: Tensor | None) -> Tensor:
        """Output [copies, n, q_size] of one text.

        Queries see `among` of the `entries` [copies, e, 1, width].
        """
        mixer, count = self._mixer, heads.shape[1]
        heads = self._rotated(heads)
        rows = self._model.cached(self._rotated(keys))
        place = torch.arange(count)
        distance = place[:, None] - place
        hidden = ((distance < 0) | (distance >= mixer.window)).expand(len(heads), -1, -1)
        if entries is not None and mixer.compressor is not None:
            rows = torch.cat((rows, entries), dim=1)
            after = torch.arange(entries.shape[1]) >= (place[:, None] + 1) // mixer.compressor.ratio
            unseen = after.expand(len(heads), -1, -1) if among is None else after | ~among
            hidden = torch.cat((hidden, unseen), dim=2)
        scores = torch.einsum("cqhd,ckd->chqk", heads, rows[:, :, 0]) * mixer.scale
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        sinks = self._model.vector(self._places[TensorRole.SINKS, SINKS_KIND, None])
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        weights = self._model.rounded(scores.softmax(dim=-1)[..., :-1])
        mixed = self._model.rounded(torch.einsum("chqk,ckd->cqhd", weights, rows[:, :, 0]))
        return self._rotated(mixed, is_back=True).flatten(2)

    def _by_group(self, mixed: Tensor) -> Tensor:
        """The groups of heads [copies, n, q_size], each projected, [copies, n, o_size]."""
        mixer, rows = self._mixer, self._places[TensorRole.O_GROUPS, "weight", None]
        parts = [
            self._model.projected(part, self._rows(rows, group), None)
            for group, part in enumerate(mixed.tensor_split(mixer.num_head_groups, dim=-1))
        ]
        return torch.cat(parts, dim=-1)

    def _rows(self, rows: RoleRows, group: int) -> RoleRows:
        """The rows of one group."""
        begin = rows.begin + group * self._mixer.group_rank
        return replace(rows, begin=begin, end=begin + self._mixer.group_rank)

    def _pooled(self, x: Tensor, sizes: list[int], plan: Compressor, roles: Roles) -> Iterator[Tensor]:
        """Rotated entries [copies, e, 1, width] of each text, or their keys."""
        values, gates = (self._layer.projected(x, role) for role in roles[:2])
        bias = self._model.table(self._places[roles[2], GATE_BIAS_KIND, None], torch.float32)
        texts = zip(values.split_with_sizes(sizes, 1), gates.split_with_sizes(sizes, 1), strict=True)
        for own_values, own_gates in texts:
            entries = [
                self._entry(own_values, own_gates, bias, end, plan)
                for end in range(plan.ratio, own_values.shape[1] + 1, plan.ratio)
            ]
            width = bias.shape[1] // (2 if plan.has_overlap else 1)
            found = torch.stack(entries, 1) if entries else own_values.new_zeros(len(own_values), 0, width)
            yield self._rotated(self._layer.normed(found, roles[3], self._norm)[:, :, None], step=plan.ratio)

    def _entry(self, values: Tensor, gates: Tensor, bias: Tensor, end: int, plan: Compressor) -> Tensor:
        """The sum [copies, width] for the tokens of a text before `end`."""
        begin, width = end - plan.ratio, values.shape[-1]
        parts = [(slice(begin, end), slice(0, width))]
        if plan.has_overlap:
            parts = [(slice(begin, end), slice(width // 2, width))]
            if begin:
                parts.append((slice(begin - plan.ratio, begin), slice(0, width // 2)))
        pairs = (values, gates)
        own = [torch.cat([rows[:, tokens, columns] for tokens, columns in parts], 1) for rows in pairs]
        biases = torch.cat([bias[:, columns] for _, columns in parts])
        weights = self._model.rounded((own[1] + biases).softmax(dim=1))
        return self._model.rounded((own[0] * weights).sum(dim=1))

    def _chosen(
        self, x: Tensor, latents: Tensor, sizes: list[int], plan: Compressor, indexer: EntryIndexer
    ) -> Iterator[Tensor | None]:
        """Whether queries [copies, n, e] see the entries of each text; None if they see all before them."""
        heads = torch.unflatten(
            self._layer.projected(latents, TensorRole.INDEX_Q), -1, (indexer.num_heads, -1)
        )
        weights = self._model.exact_products(x, self._places[TensorRole.INDEX_WEIGHT, "weight", None])
        keys = self._pooled(x, sizes, plan, _KEYS)
        for own, rows, shares in zip(
            heads.split_with_sizes(sizes, 1), keys, weights.split_with_sizes(sizes, 1), strict=True
        ):
            if rows.shape[1] <= indexer.num_chosen:
                yield None
                continue
            products = torch.einsum("cqhd,ckd->cqhk", self._rotated(own), rows[:, :, 0]).relu()
            scores = torch.einsum("cqhk,cqh->cqk", products, shares)
            ends = (torch.arange(own.shape[1])[:, None] + 1) // plan.ratio
            after = torch.arange(rows.shape[1]) >= ends
            yield routed(scores.masked_fill(after, -math.inf), indexer.num_chosen)

    def _rotated(self, heads: Tensor, *, step: int = 1, is_back: bool = False) -> Tensor:
        """`heads` [copies, n, heads, width] of positions 0, `step`, 2 * `step`, ..., rotated."""
        rope = self._mixer.rope
        if rope is None:
            return heads
        still, turning = heads.tensor_split((heads.shape[-1] - self._mixer.rope_dim,), dim=-1)
        turned = rotated_pairs(turning, replace(rope, width=None), step=-step if is_back else step)
        return self._model.rounded(torch.cat((still, turned), dim=-1))
