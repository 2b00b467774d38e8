"""The causal convolution before a recurrent state, and the last inputs of each sequence, in one launch."""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.triton_kernels.launch import Launch, padded

_TILE = {False: (1, 256), True: (16, 64)}
"""Tokens and channels of one program at a time, in decodes, and in steps with longer slices."""


# fmt: off
@triton.jit
def _inputs(
    rows, stride, own, tokens, num_tokens, is_channel, KEPT: tl.constexpr,
):
    """Inputs [tokens, channels] of a sequence: fresh ones from token 0 on, before it the `KEPT` last ones."""
    at, is_fresh = tokens.to(tl.int64)[:, None], (tokens >= 0)[:, None]
    fresh = tl.load(
        rows[None, :] + at * stride, mask=is_fresh & (tokens < num_tokens)[:, None] & is_channel[None, :],
        other=0.0,
    )
    kept = tl.load(
        own[None, :] + (at + KEPT), mask=(tokens < 0)[:, None] & is_channel[None, :], other=0.0,
    )
    return tl.where(is_fresh, fresh, kept)


@triton.jit
def convolution_kernel(
    fresh, stride, weights, bias, kept, sequences, found,
    NUM_CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, FIELDS: tl.constexpr,
):
    """`CHANNELS` of one sequence: grid [sequences, blocks of channels]. No other program has its slot."""
    sequence = sequences + tl.program_id(0) * FIELDS
    num_tokens = tl.load(sequence + 1)
    if num_tokens == 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, first = channels < NUM_CHANNELS, tl.load(sequence).to(tl.int64)
    rows, into = fresh + first * stride + channels, found + first * NUM_CHANNELS + channels
    own = kept + (tl.load(sequence + 2).to(tl.int64) * NUM_CHANNELS + channels) * (KERNEL_SIZE - 1)
    for begin in range(0, num_tokens, TOKENS):
        tokens = begin + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(KERNEL_SIZE):
            x = _inputs(
                rows, stride, own, tokens + (tap + 1 - KERNEL_SIZE), num_tokens, is_channel, KERNEL_SIZE - 1
            )
            weight = tl.load(weights + channels * KERNEL_SIZE + tap, mask=is_channel, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
        if bias is not None:
            total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        total = total.to(found.dtype.element_ty).to(tl.float32)
        tl.store(
            into[None, :] + tokens.to(tl.int64)[:, None] * NUM_CHANNELS,
            (total * tl.sigmoid(total)).to(found.dtype.element_ty),
            mask=(tokens < num_tokens)[:, None] & is_channel[None, :],
        )
    taps = tl.arange(0, TAPS)
    last = _inputs(
        rows, stride, own, num_tokens + (taps + 1 - KERNEL_SIZE), num_tokens, is_channel, KERNEL_SIZE - 1
    )
    # Every thread has read what others write.
    tl.debug_barrier()
    is_kept = (taps < KERNEL_SIZE - 1)[:, None] & is_channel[None, :]
    tl.store(own[None, :] + taps[:, None], last, mask=is_kept)
# fmt: on


def convolved(fresh: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, rows: StateRows) -> Tensor:
    """SiLU of the convolution of `fresh` [n, channels], whose rows are contiguous, and new inputs in `kept`.

    `weight` is [channels, 1, kernel_size], `bias` [channels], `kept` [num_states, channels, kernel_size - 1].
    Sums are float32, from the oldest input to the newest, then the bias; they are rounded to the run dtype,
    as is their SiLU. Rows that no sequence has are undefined.
    """
    assert rows.sequences is not None, "slices of torch's operators"
    num_channels, kernel_size = weight.shape[0], weight.shape[2]
    tokens, channels = _TILE[rows.has_longer]
    found = fresh.new_empty(len(fresh), num_channels)
    constants = {
        "NUM_CHANNELS": num_channels,
        "KERNEL_SIZE": kernel_size,
        "TAPS": padded(kernel_size - 1),
        "TOKENS": tokens,
        "CHANNELS": channels,
        "FIELDS": SEQUENCE_FIELDS,
    }
    grid = (len(rows.sequences), triton.cdiv(num_channels, channels))
    Launch(convolution_kernel, grid, constants, 4 if rows.has_longer else 2)(
        fresh, fresh.stride(0), weight, bias, kept, rows.sequences, found
    )
    return found
