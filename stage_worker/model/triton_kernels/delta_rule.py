"""The gated delta rule: states of all sequences of a step, in place, in one launch.

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

from checkpoint import GatedDelta
from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.triton_kernels.gates import softplus
from stage_worker.model.triton_kernels.launch import Launch, padded

_UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys."""
STATE_TILE = {False: (32, 4), True: (8, 1)}
"""Columns of a state that one program has, and its warps: decodes read and write states as fast as memory
does, and longer slices wait for sums over the rows, which are fastest within one warp.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaGates:
    """What strengths and decays are computed from: `strength` (b) and `decay` (a) [n, heads] in the run
    dtype, `rates` (-exp(A_log)) and `bias` [heads] in float32.
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
def delta_kernel(
    convolved, strengths, decays, gate_stride, rates, biases, states, sequences, found, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr, IS_TILED: tl.constexpr,
    FIELDS: tl.constexpr,
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
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    state = tl.load(own, mask=mask, other=0.0)
    first = tl.load(sequence).to(tl.int64)
    into = found.dtype.element_ty
    for token in range(num_tokens):
        row = first + token
        at = convolved + row * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
        query = tl.load(at + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(at + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(
            at + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values, mask=is_value, other=0.0
        ).to(tl.float32)
        strength = tl.sigmoid(tl.load(strengths + row * gate_stride + head).to(tl.float32))
        strength = strength.to(into).to(tl.float32)
        decay = rate * softplus(tl.load(decays + row * gate_stride + head).to(tl.float32) + bias)
        query, key = _unit(query, eps) * scale, _unit(key, eps)
        state = state * tl.exp(decay)
        update = (value - tl.sum(key[:, None] * state, 0)) * strength
        state += key[:, None] * update[None, :]
        output = tl.sum(query[:, None] * state, 0).to(into)
        tl.store(found + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + values, output, mask=is_value)
    tl.store(own, state, mask=mask)
# fmt: on


def delta_rule(
    convolved: Tensor, gates: DeltaGates, states: Tensor, rows: StateRows, mixer: GatedDelta
) -> Tensor:
    """Output [n, heads * value_dim] in the run dtype, before its norm; `states` advance.

    `convolved` [n, conv_size] are queries, keys and values, `states` float32 [num_states, heads, key_dim,
    value_dim]. Queries and keys are scaled to unit length, and strengths are rounded to the run dtype, as by
    torch's operators. Rows that no sequence has are undefined.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    num_values, num_warps = STATE_TILE[rows.has_longer]
    num_values = min(num_values, padded(mixer.value_dim))
    num_tiles = triton.cdiv(mixer.value_dim, num_values)
    found = torch.empty_like(convolved[:, : mixer.o_size], memory_format=torch.contiguous_format)
    constants = {
        "KEY_HEADS": mixer.num_key_heads,
        "HEADS": mixer.num_heads,
        "KEY_DIM": mixer.key_dim,
        "VALUE_DIM": mixer.value_dim,
        "KEYS": padded(mixer.key_dim),
        "VALUES": num_values,
        "TILES": num_tiles,
        "IS_TILED": mixer.layout.is_tiled,
        "FIELDS": SEQUENCE_FIELDS,
    }
    grid = (len(rows.sequences), mixer.num_heads * num_tiles)
    Launch(delta_kernel, grid, constants, num_warps)(
        *(convolved, gates.strength, gates.decay, gates.strength.stride(0), gates.rates, gates.bias),
        *(states, rows.sequences, found, _UNIT_EPS, mixer.key_dim**-0.5),
    )
    return found
