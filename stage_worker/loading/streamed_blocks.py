"""The choice of blocks of tokens in the self-check's reference, see `checkpoint.block_indexer`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from checkpoint import Attention, Norm
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from stage_worker.loading.reference_copies import routed
from stage_worker.model.rope import rotated_pairs

if TYPE_CHECKING:
    from stage_worker.loading.reference import StreamedLayer


def hidden_blocks(
    layer: StreamedLayer, x: Tensor, lengths: Sequence[int], mixer: Attention
) -> list[Tensor | None]:
    """Whether each query [copies, 1, n, n] does not see a token, of each text; None if it sees all."""
    found: list[Tensor | None] = [None] * len(lengths)
    if (plan := mixer.indexer) is None:
        return found
    norm = Norm(kind=NormKind.RMS_OFFSET, eps=plan.norm_eps)
    projected = torch.unflatten(layer.projected(x, TensorRole.INDEX_QK), -1, (plan.num_heads + 1, -1))
    queries = layer.normed(projected[:, :, :-1], TensorRole.INDEX_Q_NORM, norm)
    split = (rows.split_with_sizes(list(lengths), dim=1) for rows in (queries, projected[:, :, -1:]))
    for index, (q, k) in enumerate(zip(*split, strict=True)):
        blocks = lengths[index] // plan.block_size
        if blocks <= plan.top_blocks:
            continue
        whole = torch.unflatten(k[:, : blocks * plan.block_size], 1, (blocks, -1))
        means = layer.normed(layer.model.rounded(whole.mean(2)), TensorRole.INDEX_K_NORM, norm)
        keys = _rotated(layer, means.repeat_interleave(plan.block_size, 1), mixer)[:, :: plan.block_size]
        scores = _rotated(layer, q, mixer).transpose(1, 2) @ keys.permute(0, 2, 3, 1)
        seen = (torch.arange(lengths[index]) + 1)[:, None] // plan.block_size > torch.arange(blocks)
        total = scores.relu().sum(1).masked_fill(~seen, -math.inf)
        not_chosen = ~routed(total, plan.top_blocks) & seen
        by_token = not_chosen.repeat_interleave(plan.block_size, -1)
        found[index] = pad(by_token, (0, lengths[index] - by_token.shape[-1]))[:, None]
    return found


def _rotated(layer: StreamedLayer, heads: Tensor, mixer: Attention) -> Tensor:
    """Heads of the indexer: as many elements of each are rotated as of a head of attention."""
    rope = mixer.rope
    assert rope is not None, "an indexer without rotation"
    return layer.model.rounded(rotated_pairs(heads, replace(rope, width=rope.width or mixer.head_dim)))
