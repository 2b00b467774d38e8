"""Embeddings of n-grams of the self-check's reference: token by token, and shared with no stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from checkpoint import Norm
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from checkpoint.ngrams import HASH_KINDS, NgramEmbedding

if TYPE_CHECKING:
    from stage_worker.loading.reference import StreamedLayer, StreamedModel

NGRAM_NORMS = (TensorRole.NGRAM_KEY_NORM, TensorRole.NGRAM_STREAM_NORM, TensorRole.NGRAM_CONV_NORM)


def with_ngrams(
    layer: StreamedLayer, streams: Tensor, lengths: Sequence[int], plan: NgramEmbedding
) -> Tensor:
    """`streams` [copies, n, channels] plus what the n-grams of the tokens add to them."""
    model, places = layer.model, layer.places
    vectors = [model.table(places[TensorRole.NGRAM_HASH, kind, None], torch.int64) for kind in HASH_KINDS]
    texts = model.tokens.split_with_sizes(list(lengths))
    numbers = torch.cat([row_numbers(text.tolist(), plan, *vectors) for text in texts])
    rows = torch.stack([_row(layer, plan, number) for number in numbers.flatten().tolist()])
    found = rows.view(1, len(numbers), -1).repeat(len(streams), 1, 1)
    kernel = model.kernel(places[TensorRole.NGRAM_CONV, "weight", None])
    weights = {role: model.vector(places[role, "weight", None]) for role in NGRAM_NORMS}
    key, value = (layer.projected(found, role) for role in (TensorRole.NGRAM_KEY, TensorRole.NGRAM_VALUE))
    features = NgramInputs(key, value, streams).features(plan, kernel, weights, lengths, model)
    return model.rounded(streams + features)


def _row(layer: StreamedLayer, plan: NgramEmbedding, number: int) -> Tensor:
    """Row `number` of the table, from the part of it that has it."""
    begin = next(part.start for part in plan.shards if number in part)
    return layer.model.row(layer.places[TensorRole.NGRAM_TABLE, "weight", begin], number - begin)[0]


def row_numbers(
    text: Sequence[int], plan: NgramEmbedding, multipliers: Tensor, sizes: Tensor, offsets: Tensor
) -> Tensor:
    """Rows of the table for each token of a text and each head, int64 [n, heads]."""
    factors, found = multipliers.tolist(), []
    for place in range(len(text)):
        rows: list[int] = []
        for size in range(2, plan.size + 1):
            mixed, is_over = 0, False
            for distance in range(size):
                at = place - distance
                is_over |= at < 0 or (distance > 0 and text[at] == plan.separator)
                mixed ^= (plan.separator if is_over else text[at]) * factors[distance]
            heads = slice((size - 2) * plan.heads_per_size, (size - 1) * plan.heads_per_size)
            rows += [
                mixed % count + offset
                for count, offset in zip(sizes[heads].tolist(), offsets[heads].tolist(), strict=True)
            ]
        found.append(rows)
    return torch.tensor(found)


@dataclass(frozen=True, slots=True, eq=False)
class NgramInputs:
    """Projections of n tokens: `key` [copies, n, channels] and `value` [copies, n, hidden_size]; and
    the residual `streams` [copies, n, channels] that they are added to.
    """

    key: Tensor
    value: Tensor
    streams: Tensor

    def features(
        self,
        plan: NgramEmbedding,
        kernel: Tensor,
        weights: Mapping[TensorRole, Tensor],
        lengths: Sequence[int],
        model: StreamedModel,
    ) -> Tensor:
        """What is added, [copies, n, channels], for texts of `lengths`.

        `kernel` is [channels, 1, kernel_size], `weights` are those of `NGRAM_NORMS`, [channels] each.
        """
        norm = Norm(kind=NormKind.RMS_OFFSET, eps=plan.norm_eps)

        def normed(x: Tensor, role: TensorRole) -> Tensor:
            by_stream = torch.unflatten(x, -1, (plan.num_streams, -1))
            return model.normed(by_stream, norm, weights[role].view(plan.num_streams, -1))

        products = normed(self.key, NGRAM_NORMS[0]) * normed(self.streams, NGRAM_NORMS[1])
        score = model.rounded(products.sum(-1, keepdim=True) / plan.hidden_size**0.5)
        root = score.abs().clamp_min(1e-6).sqrt() * score.sign()
        gated = model.rounded(model.rounded(root.sigmoid()) * self.value[:, :, None]).flatten(2)
        fresh = normed(gated, NGRAM_NORMS[2]).flatten(2)
        convolved = []
        for rows in fresh.split_with_sizes(list(lengths), dim=1):
            padded = pad(rows.transpose(1, 2), (plan.reach, 0))
            found = model.rounded(conv1d(padded, kernel, dilation=plan.size, groups=plan.channels))
            convolved.append(model.rounded(silu(found)).transpose(1, 2))
        return model.rounded(gated + torch.cat(convolved, 1))
