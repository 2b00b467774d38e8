"""The scan of Mamba2: states of all sequences of a step, in place, in one launch.

As in `delta_rule`, tokens of a slice follow each other within a program, which keeps all rows of some columns
of one head's state. State, sums and output are float32.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint import Mamba2
from stage_worker.model.state_rows import StateRows
from stage_worker.model.triton_kernels.gates import softplus
from stage_worker.model.triton_kernels.launch import padded
from stage_worker.model.triton_kernels.state_tiles import StateTiles


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScanGates:
    """Time steps `step` [n, heads] in the run dtype, before their `bias`; `rates` (-exp(A_log)), `bias` and
    `skip` (D) are float32 [heads].
    """

    step: Tensor
    rates: Tensor
    bias: Tensor
    skip: Tensor


# fmt: off
@triton.jit
def scan_kernel(
    convolved, steps, rates, biases, skips, states, sequences, found,
    STEP_STRIDE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_WIDTH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
    TILES: tl.constexpr, FIELDS: tl.constexpr,
):
    """`VALUES` columns of one head of one sequence: grid [sequences, HEADS * TILES]."""
    sequence = sequences + tl.program_id(0) * FIELDS
    num_tokens, head = tl.load(sequence + 1), tl.program_id(1) // TILES
    if num_tokens == 0:
        return
    entries, values = tl.arange(0, ROWS), tl.program_id(1) % TILES * VALUES + tl.arange(0, VALUES)
    is_state, is_value = entries < STATE_SIZE, values < HEAD_DIM
    mask = is_state[:, None] & is_value[None, :]
    group, own_values = head // (HEADS // GROUPS), head * HEAD_DIM + values
    own = states + (tl.load(sequence + 2).to(tl.int64) * GROUPS + group) * (STATE_SIZE * GROUP_WIDTH)
    own += entries[:, None] * GROUP_WIDTH + (own_values - group * GROUP_WIDTH)[None, :]
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    state = tl.load(own, mask=mask, other=0.0)
    first = tl.load(sequence).to(tl.int64)
    for token in range(num_tokens):
        row = first + token
        at = convolved + row * (HEADS * HEAD_DIM + 2 * GROUPS * STATE_SIZE)
        x = tl.load(at + own_values, mask=is_value, other=0.0).to(tl.float32)
        of_group = at + HEADS * HEAD_DIM + group * STATE_SIZE + entries
        b = tl.load(of_group, mask=is_state, other=0.0).to(tl.float32)
        c = tl.load(of_group + GROUPS * STATE_SIZE, mask=is_state, other=0.0).to(tl.float32)
        step = softplus(tl.load(steps + row * STEP_STRIDE + head).to(tl.float32) + bias)
        state = state * tl.exp(step * rate) + b[:, None] * (x * step)[None, :]
        output = tl.sum(c[:, None] * state, 0) + x * skip
        tl.store(found + row * (HEADS * HEAD_DIM) + own_values, output, mask=is_value)
    tl.store(own, state, mask=mask)
# fmt: on


def state_scan(convolved: Tensor, gates: ScanGates, states: Tensor, rows: StateRows, mixer: Mamba2) -> Tensor:
    """Output float32 [n, heads * head_dim], before its gate; `states` advance.

    `convolved` [n, conv_size] are inputs, B and C, `states` float32 [num_states, groups, state_size,
    group_width]. Rows that no sequence has are undefined.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    found = convolved.new_empty(len(convolved), mixer.o_size, dtype=torch.float32)
    constants = {
        "STEP_STRIDE": gates.step.stride(0),
        "GROUPS": mixer.num_head_groups,
        "STATE_SIZE": mixer.state_size,
        "HEAD_DIM": mixer.head_dim,
        "GROUP_WIDTH": mixer.group_width,
        "ROWS": padded(mixer.state_size),
    }
    tiles = StateTiles.of(rows, mixer.state_size, mixer.head_dim)
    tiles.launch(scan_kernel, mixer.num_heads, constants, len(rows.sequences))(
        *(convolved, gates.step, gates.rates, gates.bias, gates.skip, states, rows.sequences, found)
    )
    return found
