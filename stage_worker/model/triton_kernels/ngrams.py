"""Embeddings of n-grams: rows of a table by hashes, gates of the streams, and the dilated convolution.

See `stage_worker.model.ngrams`; values are rounded to the run dtype where torch's operators round. Ids of
tokens before a step advance in a launch of their own, after all that read them.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint.ngrams import NgramEmbedding
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.ngrams import LEAST_GATE
from stage_worker.model.projections import project
from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.triton_kernels.convolution import add_convolved
from stage_worker.model.triton_kernels.launch import Launch, padded
from stage_worker.model.triton_kernels.norms import normed
from stage_worker.model.weight_reads import HostTable

_SEQUENCES = 128
"""Sequences that a program searches for its row's, at a time."""


# fmt: off
@triton.jit
def _sequence_of(row, sequences, num_sequences, SEQUENCES: tl.constexpr, FIELDS: tl.constexpr):
    """The last sequence that begins at `row` or before; those without rows begin after all others."""
    found = tl.full([], 0, tl.int32)
    for begin in range(0, num_sequences, SEQUENCES):
        index = begin + tl.arange(0, SEQUENCES)
        first = tl.load(sequences + index * FIELDS, mask=index < num_sequences, other=2147483647)
        found += tl.sum((first <= row).to(tl.int32), 0)
    return sequences + (found - 1) * FIELDS


# Steps have any number of sequences: other kernels for some would be compiled while a stage serves.
@triton.jit(do_not_specialize=["num_sequences"])
def lookup_kernel(
    tokens, kept, sequences, num_sequences, multipliers, sizes, offsets, table, separator, found,
    SIZE: tl.constexpr, PER_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr, FIELDS: tl.constexpr,
):
    """Rows of all heads of one token, zeros if no sequence has it: grid [tokens]."""
    row, heads = tl.program_id(0), tl.arange(0, HEADS)
    sequence = _sequence_of(row, sequences, num_sequences, SEQUENCES, FIELDS)
    place = row - tl.load(sequence)
    is_row, is_head = place < tl.load(sequence + 1), heads < NUM_HEADS
    own = kept + tl.load(sequence + 2).to(tl.int64) * (SIZE - 1)
    nothing, is_inside = tl.zeros([HEADS], tl.int64), heads >= 0
    mixed = (nothing + tl.load(tokens + row)) * tl.load(multipliers)
    for distance in tl.static_range(1, SIZE):
        is_fresh = place >= distance
        fresh = tl.load(tokens + row - distance, mask=is_row & is_fresh, other=0)
        earlier = tl.load(own + (SIZE - 1 + place - distance), mask=is_row & (place < distance), other=0.0)
        before = nothing + tl.where(is_fresh, fresh, earlier.to(tl.int64) + separator)
        is_inside = is_inside & (before != separator)
        product = tl.where(is_inside, before, separator) * tl.load(multipliers + distance)
        mixed = tl.where(heads // PER_SIZE + 1 >= distance, mixed ^ product, mixed)
    size = tl.load(sizes + heads, mask=is_head, other=1)
    rest = mixed % size
    at = tl.where(rest < 0, rest + size, rest) + tl.load(offsets + heads, mask=is_head, other=0)
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = is_head[:, None] & (columns < HEAD_DIM)
    x = tl.load(table + at[:, None] * HEAD_DIM + columns, mask=mask & is_row, other=0.0)
    into = found + row.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    tl.store(into + heads[:, None] * HEAD_DIM + columns, x, mask=mask)


@triton.jit
def advance_kernel(
    tokens, kept, sequences, separator, KEPT: tl.constexpr, IDS: tl.constexpr, FIELDS: tl.constexpr,
):
    """The last `KEPT` ids of one sequence: grid [sequences]. No other program has its slot."""
    sequence, ids = sequences + tl.program_id(0) * FIELDS, tl.arange(0, IDS)
    first, count = tl.load(sequence), tl.load(sequence + 1)
    own, is_kept = kept + tl.load(sequence + 2).to(tl.int64) * KEPT, (ids < KEPT) & (count > 0)
    place = count - KEPT + ids
    fresh = tl.load(tokens + first + place, mask=is_kept & (place >= 0), other=0)
    earlier = tl.load(own + count + ids, mask=is_kept & (place < 0), other=0.0)
    # Every thread has read what others write.
    tl.debug_barrier()
    tl.store(own + ids, tl.where(place >= 0, (fresh - separator).to(tl.float32), earlier), mask=is_kept)


@triton.jit
def _rounded(x, into):
    return x.to(into).to(tl.float32)


@triton.jit
def _normed(x, weight, columns, eps, into, WIDTH: tl.constexpr):
    """`x` float32 [1, columns], normed, and rounded after the weight."""
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    return _rounded(normed(x, factor, columns < WIDTH, eps, into, WIDTH, False, False), into)


@triton.jit(do_not_specialize=["num_sequences"])
def gates_kernel(
    streams, keys, values, key_norm, stream_norm, conv_norm, eps, root, least, sequences, num_sequences,
    output, gated, fresh,
    NUM_STREAMS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
):
    """One stream of a row: grid [rows, streams]. Its copy, and of a row of a sequence what is added to it
    and what is convolved.
    """
    row, stream, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLUMNS)[None, :]
    at, mask = (row * NUM_STREAMS + stream) * WIDTH + columns, columns < WIDTH
    into = output.dtype.element_ty
    own = tl.load(streams + at, mask=mask, other=0.0)
    tl.store(output + at, own, mask=mask)
    last = sequences + (num_sequences - 1) * FIELDS
    if row >= tl.load(last) + tl.load(last + 1):
        return
    key = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
    key = _normed(key, key_norm + stream * WIDTH, columns, eps, into, WIDTH)
    asked = _normed(own.to(tl.float32), stream_norm + stream * WIDTH, columns, eps, into, WIDTH)
    product = _rounded(tl.sum(_rounded(key * asked, into), 1), into)
    score = _rounded(tl.div_rn(product, tl.zeros_like(product) + root), into)
    distance = tl.sqrt_rn(_rounded(tl.maximum(tl.abs(score), least), into))
    sign = tl.where(score > 0.0, 1.0, tl.where(score < 0.0, -1.0, 0.0))
    gate = _rounded(tl.sigmoid(_rounded(distance, into) * sign), into)
    gate = tl.where(score == score, gate, score)
    value = tl.load(values + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    found = _rounded(gate[:, None] * value, into)
    tl.store(gated + at, found.to(into), mask=mask)
    found = _normed(found, conv_norm + stream * WIDTH, columns, eps, into, WIDTH)
    tl.store(fresh + at, found.to(into), mask=mask)
# fmt: on


class FusedNgrams:
    """An `NgramFunction`, see `NgramEmbedding`."""

    def __init__(self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels) -> None:
        """Packed weights replace the given keys and values."""
        self._plan, self._weights = plan, weights
        products = kernels.layer_products
        self._key, self._value = (project(one, None, products) for one in (weights.key, weights.value))
        norms = (weights.key_norm, weights.stream_norm, weights.conv_norm)
        self._norms = tuple(weight.float() + 1.0 for weight in norms)

    def __call__(self, streams: Tensor, memory: LayerStates) -> Tensor:
        tokens, rows, plan = memory.step.token_ids, memory.rows, self._plan
        assert tokens is not None, "a layout without token ids"
        inputs, ids = memory.parts[2:]  # after the mixer's, see `NgramEmbedding.state_parts`
        found = looked_up(tokens, ids, rows, plan, self._weights)
        advance(tokens, ids, rows, plan)
        output, gated, fresh = self._gated(streams, self._key(found), self._value(found), rows)
        add_convolved(output, fresh, self._weights.conv, inputs, rows, gated, plan.size)
        return output

    def _gated(
        self, streams: Tensor, keys: Tensor, values: Tensor, rows: StateRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of `streams` [m, channels], values times gates [n, channels], and their norm."""
        plan = self._plan
        assert rows.sequences is not None, "slices of torch's operators"
        output, gated, fresh = (streams.new_empty(x.shape) for x in (streams, keys, keys))
        columns = padded(plan.hidden_size)
        constants = {
            "NUM_STREAMS": plan.num_streams,
            "WIDTH": plan.hidden_size,
            "COLUMNS": columns,
            "FIELDS": SEQUENCE_FIELDS,
        }
        root = math.sqrt(plan.hidden_size)
        num_warps = max(1, min(16, columns // 256))
        Launch(gates_kernel, (len(streams), plan.num_streams), constants, num_warps)(
            *(streams, keys, values, *self._norms, plan.norm_eps, root, LEAST_GATE),
            *(rows.sequences, len(rows.sequences), output, gated, fresh),
        )
        return output, gated, fresh


def looked_up(
    tokens: Tensor, kept: Tensor, rows: StateRows, plan: NgramEmbedding, weights: NgramWeights
) -> Tensor:
    """Rows of all heads side by side, [n, width], of `tokens` int64 [n], after the ids `kept` float32
    [num_states, size - 1] of each slot, less the separator. Rows that no sequence has are zeros.

    The kernel reads a `HostTable` where it is: the driver maps page-locked memory to the device.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    table = weights.table.rows if isinstance(weights.table, HostTable) else weights.table
    found = torch.empty(len(tokens), plan.width, dtype=table.dtype, device=tokens.device)
    columns, heads = padded(plan.head_dim), padded(plan.num_heads)
    constants = {
        "SIZE": plan.size,
        "PER_SIZE": plan.heads_per_size,
        "NUM_HEADS": plan.num_heads,
        "HEADS": heads,
        "HEAD_DIM": plan.head_dim,
        "COLUMNS": columns,
        "SEQUENCES": _SEQUENCES,
        "FIELDS": SEQUENCE_FIELDS,
    }
    Launch(lookup_kernel, (len(tokens),), constants, max(1, min(8, heads * columns // 512)))(
        *(tokens, kept, rows.sequences, len(rows.sequences), weights.multipliers, weights.sizes),
        *(weights.offsets, table, plan.separator, found),
    )
    return found


def advance(tokens: Tensor, kept: Tensor, rows: StateRows, plan: NgramEmbedding) -> None:
    """The ids `kept` of each slot, see `looked_up`, after the step's `tokens`."""
    assert rows.sequences is not None, "slices of torch's operators"
    num_kept = plan.size - 1
    constants = {"KEPT": num_kept, "IDS": padded(num_kept), "FIELDS": SEQUENCE_FIELDS}
    Launch(advance_kernel, (len(rows.sequences),), constants, 1)(tokens, kept, rows.sequences, plan.separator)
