"""Gated delta rules: states of all sequences of a step, in place, in one launch.

Decays are those of heads (Gated DeltaNet), or of the channels of their keys (Kimi Delta Attention).

Tokens of a slice follow each other within a program, which keeps a part of one head's state in registers:
all rows of some columns. What a token adds to a column depends on that column alone, so that programs share
nothing. State, sums and gates are float32; each sum is over the rows of the state, in the order of one
column of a tile, whatever else is in the step. A sequence that is computed in other slices has the same
state, bit by bit, as long as its steps have tiles of the same size.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint import GatedDelta, KimiDelta
from checkpoint.recurrent import UNIT_EPS
from stage_worker.model.state_rows import StateRows
from stage_worker.model.triton_kernels.gates import softplus
from stage_worker.model.triton_kernels.launch import padded
from stage_worker.model.triton_kernels.state_tiles import StateTiles


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaGates:
    """What strengths and decays are computed from: `strength` (b) and `decay` (a) [n, heads] in the run
    dtype, `rates` (-exp(A_log)) and `bias` [heads] in float32. `decay` and `bias` of Kimi Delta Attention
    have a number for each channel of a head's key, [n, heads * key_dim] and [heads * key_dim].
    """

    strength: Tensor
    decay: Tensor
    rates: Tensor
    bias: Tensor


# fmt: off
@triton.jit
def _unit(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _of_head(numbers, head, keys, KEY_DIM: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """The number of a head in float32, or [keys], those of its channels."""
    if BY_CHANNEL:
        found = tl.load(numbers + head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    else:
        found = tl.load(numbers + head)
    return found.to(tl.float32)


@triton.jit
def delta_kernel(
    convolved, strengths, decays, rates, biases, states, sequences, found, eps, scale,
    STRENGTH_STRIDE: tl.constexpr, DECAY_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, IS_TILED: tl.constexpr, BY_CHANNEL: tl.constexpr,
    HEADS: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr, FIELDS: tl.constexpr,
):
    """`VALUES` columns of one head of one sequence: grid [sequences, HEADS * TILES]."""
    sequence = sequences + tl.program_id(0) * FIELDS
    num_tokens, head = tl.load(sequence + 1), tl.program_id(1) // TILES
    if num_tokens == 0:
        return
    keys, values = tl.arange(0, KEYS), tl.program_id(1) % TILES * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    mask = is_key[:, None] & is_value[None, :]
    own = states + (tl.load(sequence + 2).to(tl.int64) * HEADS + head) * (KEY_DIM * VALUE_DIM)
    own += keys[:, None] * VALUE_DIM + values[None, :]
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    rate, bias = tl.load(rates + head), _of_head(biases, head, keys, KEY_DIM, BY_CHANNEL)
    state = tl.load(own, mask=mask, other=0.0)
    first = tl.load(sequence).to(tl.int64)
    given = strengths.dtype.element_ty
    for token in range(num_tokens):
        row = first + token
        at = convolved + row * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
        query = tl.load(at + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(at + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
        of_value = at + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
        value = tl.load(of_value, mask=is_value, other=0.0).to(tl.float32)
        strength = tl.sigmoid(tl.load(strengths + row * STRENGTH_STRIDE + head).to(tl.float32))
        strength = strength.to(given).to(tl.float32)
        decay = _of_head(decays + row * DECAY_STRIDE, head, keys, KEY_DIM, BY_CHANNEL)
        decay = rate * softplus(decay + bias)
        query, key = _unit(query, eps) * scale, _unit(key, eps)
        kept = tl.exp(decay)
        state = state * (kept[:, None] if BY_CHANNEL else kept)
        update = (value - tl.sum(key[:, None] * state, 0)) * strength
        state += key[:, None] * update[None, :]
        output = tl.sum(query[:, None] * state, 0).to(found.dtype.element_ty)
        tl.store(found + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + values, output, mask=is_value)
    tl.store(own, state, mask=mask)
# fmt: on


def delta_rule(
    convolved: Tensor, gates: DeltaGates, states: Tensor, rows: StateRows, mixer: GatedDelta | KimiDelta
) -> Tensor:
    """Output [n, heads * value_dim] before its norm, in the run dtype, or in float32 of Kimi Delta Attention;
    `states` advance.

    `convolved` [n, conv_size] are queries, keys and values, `states` float32 [num_states, heads, key_dim,
    value_dim]. Queries and keys are scaled to unit length, and strengths are rounded to the run dtype, as by
    torch's operators. Rows that no sequence has are undefined.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    by_channel = isinstance(mixer, KimiDelta)
    dtype = torch.float32 if by_channel else convolved.dtype
    found = convolved.new_empty(len(convolved), mixer.o_size, dtype=dtype)
    constants = {
        "STRENGTH_STRIDE": gates.strength.stride(0),
        "DECAY_STRIDE": gates.decay.stride(0),
        "KEY_HEADS": mixer.num_key_heads,
        "KEY_DIM": mixer.key_dim,
        "VALUE_DIM": mixer.value_dim,
        "KEYS": padded(mixer.key_dim),
        "IS_TILED": isinstance(mixer, GatedDelta) and mixer.layout.is_tiled,
        "BY_CHANNEL": by_channel,
    }
    tiles = StateTiles.of(rows, mixer.key_dim, mixer.value_dim, has_row_decays=by_channel)
    tiles.launch(delta_kernel, mixer.num_heads, constants, len(rows.sequences))(
        *(convolved, gates.strength, gates.decay, gates.rates, gates.bias, states, rows.sequences, found),
        *(UNIT_EPS, mixer.key_dim**-0.5),
    )
    return found
