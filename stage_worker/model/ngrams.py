"""Embeddings of hashed n-grams, added to the residual streams of a layer, see `checkpoint.NgramEmbedding`.

Every stage has the token ids of a step, as steps are forwarded whole, so that a layer with n-grams may be on
any stage. Hashes are int64, all else in the run dtype with norms in float32, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.nn.functional import rms_norm as scaled_to_unit

from checkpoint.ngrams import NgramEmbedding
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.operations import NgramFunction, Operations
from stage_worker.model.projections import project
from stage_worker.model.state_rows import StateRows
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.weight_reads import HostTable

LEAST_GATE = 1e-6
"""Before the root: the least distance of a gate's argument from 0, unless it is 0."""


def ngram_features(
    plan: NgramEmbedding, weights: NgramWeights, operations: Operations, kernels: Kernels
) -> NgramFunction:
    """See `NgramEmbedding`. Packed weights replace the given ones, but for the table.

    Raises ValueError for hashes that could choose rows outside of the table.
    """
    least = min(int(weights.sizes.min()) - 1, int(weights.offsets.min()))
    if least < 0 or int((weights.offsets + weights.sizes).max()) > plan.num_rows:
        raise ValueError(f"sizes or offsets of n-gram hashes exceed their table of {plan.num_rows} rows")
    return operations.ngram_function(plan, weights, kernels) or SeparateNgrams(plan, weights, kernels)


class NgramLookup:
    """Rows of a table by the hashes of n-grams."""

    def __init__(self, plan: NgramEmbedding, weights: NgramWeights) -> None:
        self._plan, self._rows = plan, _rows_of(weights.table)
        self._multipliers, self._sizes, self._offsets = weights.multipliers, weights.sizes, weights.offsets

    def __call__(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Rows of all heads side by side, [n, width], of `tokens` int64 [n]; `before` int64 [n, size - 1] are
        the tokens before each, the last one first.
        """
        separator = self._plan.separator
        is_inside = (before != separator).to(torch.int64).cumprod(dim=1).bool()
        context = torch.where(is_inside, before, separator)
        mixed, rows = tokens * self._multipliers[0], []
        sizes = self._sizes.view(-1, self._plan.heads_per_size)
        for distance, of_heads in enumerate(sizes, start=1):
            mixed = mixed ^ (context[:, distance - 1] * self._multipliers[distance])
            rows.append(torch.remainder(mixed[:, None], of_heads))
        return self._rows(torch.cat(rows, dim=1) + self._offsets).flatten(1)


def _rows_of(table: Tensor | HostTable) -> Callable[[Tensor], Tensor]:
    """Rows [..., head_dim] of `table` by their numbers int64 [...]."""
    if isinstance(table, HostTable):
        return partial(_copied_rows, table.rows)
    return partial(embedding, weight=table)


def _copied_rows(table: Tensor, numbers: Tensor) -> Tensor:
    """Looked up on the host, which waits for the device."""
    return embedding(numbers.cpu(), table).to(numbers.device)


def tokens_before(tokens: Tensor, rows: StateRows, kept: Tensor, separator: int) -> Tensor:
    """The k tokens before each of `tokens` int64 [n], the last one first, int64 [n, k].

    `kept` float32 [num_states, k] are those before the slices, less `separator`; they advance.
    """
    num_before = kept.shape[1]
    before = tokens.new_empty(len(tokens), num_before)
    if rows.singles is not None:
        assert rows.single_slots is not None, "slices without slots"
        earlier = kept.index_select(0, rows.single_slots).to(torch.int64) + separator
        seen = torch.cat((earlier, tokens.index_select(0, rows.singles)[:, None]), dim=1)
        before.index_copy_(0, rows.singles, earlier.flip(1))
        kept.index_copy_(0, rows.single_slots, (seen[:, 1:] - separator).to(kept.dtype))
    for begin, end, slot in rows.longer:
        seen = torch.cat((kept[slot].to(torch.int64) + separator, tokens[begin:end]))
        before[begin:end] = seen[:-1].unfold(0, num_before, 1).flip(1)
        kept[slot].copy_(seen[-num_before:] - separator)
    return before


class SeparateNgrams:
    """An `NgramFunction` by torch's operators."""

    def __init__(self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels) -> None:
        """Packed weights replace the given keys and values."""
        self._plan, self._lookup = plan, NgramLookup(plan, weights)
        products = kernels.layer_products
        self._key, self._value = (project(one, None, products) for one in (weights.key, weights.value))
        norms = (weights.key_norm, weights.stream_norm, weights.conv_norm)
        self._key_norm, self._stream_norm, self._conv_norm = (
            weight.float().view(plan.num_streams, -1) + 1.0 for weight in norms
        )
        self._convolution = CausalConvolution(weights.conv, dilation=plan.size)

    def __call__(self, streams: Tensor, memory: LayerStates) -> Tensor:
        tokens, plan = memory.step.token_ids, self._plan
        assert tokens is not None, "a layout without token ids"
        inputs, ids = memory.parts[2:]  # after the mixer's, see `NgramEmbedding.state_parts`
        rows = self._lookup(tokens, tokens_before(tokens, memory.rows, ids, plan.separator))
        keys = self._normed(torch.unflatten(self._key(rows), 1, (plan.num_streams, -1)), self._key_norm)
        by_stream = torch.unflatten(streams[: len(tokens)], 1, (plan.num_streams, -1))
        products = (keys * self._normed(by_stream, self._stream_norm)).sum(dim=2, keepdim=True)
        scores = products / math.sqrt(plan.hidden_size)
        gates = (scores.abs().clamp_min(LEAST_GATE).sqrt() * scores.sign()).sigmoid()
        gated = gates * self._value(rows)[:, None]
        fresh = self._normed(gated, self._conv_norm).flatten(1)
        output = streams.clone()
        output[: len(tokens)] += gated.flatten(1) + self._convolved(fresh, inputs, memory.rows)
        return output

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [n, streams, hidden_size], each row of it normalised, times `weight` [streams, hidden_size]."""
        scaled = scaled_to_unit(x.to(torch.float32), x.shape[-1:], None, self._plan.norm_eps)
        return scaled.mul_(weight).to(x.dtype)

    def _convolved(self, fresh: Tensor, kept: Tensor, rows: StateRows) -> Tensor:
        """[n, channels] of `fresh` [n, channels] after the `kept` inputs, which advance."""
        found = torch.empty_like(fresh)
        if rows.singles is not None:
            assert rows.single_slots is not None, "slices without slots"
            singles = fresh.index_select(0, rows.singles)
            of_singles = self._convolution.of_singles(singles, kept, rows.single_slots)
            found.index_copy_(0, rows.singles, of_singles)
        for begin, end, slot in rows.longer:
            found[begin:end] = self._convolution.of_chunk(fresh[begin:end], kept[slot])
        return found
