"""RMS norms of the output of recurrent layers by groups of elements, with their gates, in one launch."""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint.recurrent import GateNorm
from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.triton_kernels.launch import Launch, padded
from stage_worker.model.triton_kernels.norms import normed

_ELEMENTS = 1024
"""Of one program, at least, where groups are smaller."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatedNorm:
    """Norm of groups of `width` elements by `weight` [width] of every group, or [groups * width], before or
    after the gate; None without a norm.

    Without `rounds`, the result alone is rounded; else output and weight are in the run dtype, and a norm
    before the gate is rounded before and after its weight. Gates are those of SiLU, or of the sigmoid with
    `has_sigmoid`.
    """

    weight: Tensor | None
    width: int
    eps: float
    order: GateNorm
    rounds: bool
    has_sigmoid: bool = False


# fmt: off
# Steps have any number of sequences: other kernels for some would be compiled while a stage serves.
@triton.jit(do_not_specialize=["num_sequences"])
def gated_norm_kernel(
    x, gates, gate_stride, weight, eps, sequences, num_sequences, found,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    IS_SHARED: tl.constexpr, GATES_FIRST: tl.constexpr, ROUNDS: tl.constexpr, HAS_SIGMOID: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """`GROUPS` groups of one row: grid [rows, blocks of groups]."""
    row = tl.program_id(0).to(tl.int64)
    last = sequences + (num_sequences - 1) * FIELDS
    is_row = row < tl.load(last) + tl.load(last + 1)
    groups, columns = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, COLUMNS)[None, :]
    is_group, is_column = (groups < NUM_GROUPS)[:, None], columns < WIDTH
    mask, places = is_group & is_column, groups[:, None] * WIDTH + columns
    into = found.dtype.element_ty
    gate = tl.load(gates + row * gate_stride + places, mask=mask & is_row, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if HAS_SIGMOID else gate * tl.sigmoid(gate)
    own = tl.load(x + row * (NUM_GROUPS * WIDTH) + places, mask=mask & is_row, other=0.0).to(tl.float32)
    if GATES_FIRST:
        own = own * gate
    if weight is not None:
        factor = tl.load(weight + (columns if IS_SHARED else places), mask=mask, other=0.0).to(tl.float32)
        own = normed(own, factor, is_column, eps, into, WIDTH, ROUNDS, False)
        if ROUNDS:
            own = own.to(into).to(tl.float32)
    if not GATES_FIRST:
        own = own * gate
    tl.store(found + row * (NUM_GROUPS * WIDTH) + places, own.to(into), mask=mask)
# fmt: on


def gated_norm(x: Tensor, gate: Tensor, norm: GatedNorm, rows: StateRows) -> Tensor:
    """Gated norm [n, groups * width], in the dtype of `gate`, of `x` in the same shape.

    Rows after those of all sequences become zeros, whatever they are: they are padding.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    num_groups = x.shape[1] // norm.width
    columns = padded(norm.width)
    groups = min(padded(num_groups), max(1, _ELEMENTS // columns))
    found = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    constants = {
        "NUM_GROUPS": num_groups,
        "GROUPS": groups,
        "WIDTH": norm.width,
        "COLUMNS": columns,
        "IS_SHARED": norm.weight is not None and norm.weight.shape[0] == norm.width,
        "GATES_FIRST": norm.order is not GateNorm.BEFORE,
        "ROUNDS": norm.rounds,
        "HAS_SIGMOID": norm.has_sigmoid,
        "FIELDS": SEQUENCE_FIELDS,
    }
    num_warps = max(1, min(16, groups * columns // 512))
    Launch(gated_norm_kernel, (len(x), triton.cdiv(num_groups, groups)), constants, num_warps)(
        *(x, gate, gate.stride(0), norm.weight, norm.eps, rows.sequences, len(rows.sequences), found)
    )
    return found
