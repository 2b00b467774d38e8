"""The indexer of attention to chosen blocks: its queries, keys of tokens in pages, and keys of whole blocks.

See `stage_worker.model.block_indexer`. Rounded like torch's operators: means, norms, and each product and sum
of the rotation. Scores and choices are of `triton_kernels.choices`.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.block_work import SEQUENCE_FIELDS, SequenceBlocks
from stage_worker.model.triton_kernels.heads import normed_halves, rotated, rotated_rows
from stage_worker.model.triton_kernels.launch import Launch, padded
from stage_worker.model.triton_kernels.norms import KernelNorm

_HEADS = 8
"""Heads of one program."""
_BLOCKS = 16
"""Blocks of one program."""


# fmt: off
@triton.jit
def index_kernel(
    projected, stride, weights, eps, cos, sin, table_stride, slots, queries, pages,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """`HEADS` queries of one token, normed and rotated, or its key, into pages: grid [tokens, blocks of heads
    + 1].
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    is_lane, projected = lanes < HALF, projected + row * stride
    if tl.program_id(1) == tl.num_programs(1) - 1:
        slot = tl.load(slots + row)
        columns = tl.arange(0, COLUMNS)
        is_column = (columns < 2 * HALF) & (slot >= 0)
        key = tl.load(projected + NUM_HEADS * 2 * HALF + columns, mask=is_column, other=0.0)
        tl.store(pages + slot * (2 * HALF) + columns, key, mask=is_column)
    elif queries is not None:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & is_lane[None, :]
        places = head[:, None] * (2 * HALF) + lanes[None, :]
        x = tl.load(projected + places, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(projected + places + HALF, mask=mask, other=0.0).to(tl.float32)
        into = queries.dtype.element_ty
        x, y = normed_halves(x, y, weights + lanes[None, :], is_lane[None, :], eps, into, HALF, False)
        x, y = rotated(x, y, cos + row * table_stride, sin + row * table_stride, lanes, is_lane, into, HALF)
        own = queries + row * (NUM_HEADS * 2 * HALF) + places
        tl.store(own, x.to(into), mask=mask)
        tl.store(own + HALF, y.to(into), mask=mask)


# A work list has parts at any offset.
@triton.jit(do_not_specialize_on_alignment=["table", "sequences"])
def block_keys_kernel(
    pages, table, sequences, weights, eps, cos, sin, table_stride, found,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, FIELDS: tl.constexpr,
):
    """Keys of `BLOCKS` whole blocks of one sequence: grid [sequences, parts of the longest one]."""
    sequence = sequences + tl.program_id(0) * FIELDS
    blocks, lanes = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, LANES)
    num_blocks = tl.load(sequence + 1)
    if tl.program_id(1) * BLOCKS >= num_blocks:
        return
    table += tl.load(sequence)
    is_block, is_lane = blocks < num_blocks, lanes < HALF
    mask = is_block[:, None] & is_lane[None, :]
    x, y = tl.zeros([BLOCKS, LANES], tl.float32), tl.zeros([BLOCKS, LANES], tl.float32)
    for index in tl.range(0, SIZE, loop_unroll_factor=4 if SIZE % 4 == 0 else 1):
        tokens = blocks * SIZE + index
        page = tl.load(table + tokens // BLOCK_SIZE, mask=is_block, other=0)
        at = (page * BLOCK_SIZE + tokens % BLOCK_SIZE).to(tl.int64)
        own = pages + at[:, None] * (2 * HALF) + lanes[None, :]
        x += tl.load(own, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)
    into = found.dtype.element_ty
    x, y = (x / SIZE).to(into).to(tl.float32), (y / SIZE).to(into).to(tl.float32)
    x, y = normed_halves(x, y, weights + lanes[None, :], is_lane[None, :], eps, into, HALF, False)
    angles = blocks.to(tl.int64)[:, None] * table_stride + lanes[None, :]
    x, y = rotated_rows(x, y, cos + angles, sin + angles, mask, into, HALF)
    rows = (tl.load(sequence + 2) + blocks).to(tl.int64)
    own = found + rows[:, None] * (2 * HALF) + lanes[None, :]
    tl.store(own, x.to(into), mask=mask)
    tl.store(own + HALF, y.to(into), mask=mask)
# fmt: on


def write_keys(
    projected: Tensor,
    num_heads: int,
    norm: KernelNorm,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    has_queries: bool,
) -> Tensor | None:
    """Write the keys of `projected` [n, (num_heads + 1) * head_dim] to `slots` int64 [n] of `pages`
    [num_blocks, block_size, head_dim] (-1: nowhere); return its queries [n, num_heads, head_dim], normed and
    rotated, if they are needed.

    `cos` and `sin` [n, 1, head_dim] are of `RotaryTable`.
    """
    num_tokens, head_dim = len(projected), pages.shape[2]
    queries = projected.new_empty(num_tokens, num_heads, head_dim) if has_queries else None
    constants = {
        "NUM_HEADS": num_heads,
        "HALF": head_dim // 2,
        "LANES": padded(head_dim // 2),
        "COLUMNS": padded(head_dim),
        "HEADS": _HEADS,
    }
    grid = (num_tokens, 1 + (triton.cdiv(num_heads, _HEADS) if has_queries else 0))
    Launch(index_kernel, grid, constants, 1)(
        *(projected, projected.stride(0), norm.weight, norm.eps, cos, sin, cos.stride(0)),
        *(slots, queries, pages),
    )
    return queries


def block_keys(
    pages: Tensor, work: SequenceBlocks, size: int, norm: KernelNorm, cos: Tensor, sin: Tensor
) -> Tensor:
    """Keys [work.num_blocks, head_dim] of whole blocks of `size` tokens, whose keys are in `pages`
    [num_pages, page_size, head_dim]: their means, normed and rotated.

    `cos` and `sin` [blocks, 1, head_dim] are those of the first positions of a sequence's blocks.
    """
    head_dim = pages.shape[2]
    found = pages.new_empty(work.num_blocks, head_dim)
    constants = {
        "SIZE": size,
        "BLOCK_SIZE": pages.shape[1],
        "HALF": head_dim // 2,
        "LANES": padded(head_dim // 2),
        "BLOCKS": _BLOCKS,
        "FIELDS": SEQUENCE_FIELDS,
    }
    grid = (len(work.sequences), triton.cdiv(work.longest, _BLOCKS))
    Launch(block_keys_kernel, grid, constants, 4)(
        *(pages, work.table, work.sequences, norm.weight, norm.eps, cos, sin, cos.stride(0), found),
    )
    return found
