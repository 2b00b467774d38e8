"""Causal convolutions, and the last inputs of each sequence, in one launch."""

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
_DILATED_TILE = {False: (1, 64), True: (16, 64)}
"""Of convolutions with more inputs of each channel."""


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
def _convolved(
    rows, stride, own, weights, bias, channels, tokens, num_tokens, is_channel, into,
    KERNEL_SIZE: tl.constexpr, DILATION: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """SiLU [tokens, channels] of the convolution, both rounded to `into`."""
    kept: tl.constexpr = (KERNEL_SIZE - 1) * DILATION
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        x = _inputs(rows, stride, own, tokens + (tap * DILATION - kept), num_tokens, is_channel, kept)
        weight = tl.load(weights + channels * KERNEL_SIZE + tap, mask=is_channel, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    total = total.to(into).to(tl.float32)
    return (total * tl.sigmoid(total)).to(into)


@triton.jit
def convolution_kernel(
    fresh, stride, weights, bias, kept, sequences, added, found,
    NUM_CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr, DILATION: tl.constexpr, KEPT: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, FIELDS: tl.constexpr,
):
    """`CHANNELS` of one sequence: grid [sequences, blocks of channels]. No other program has its slot.

    With `added`, the sum of both is added to what is in `found`.
    """
    sequence = sequences + tl.program_id(0) * FIELDS
    num_tokens = tl.load(sequence + 1)
    if num_tokens == 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, first = channels < NUM_CHANNELS, tl.load(sequence).to(tl.int64)
    rows, into = fresh + first * stride + channels, found + first * NUM_CHANNELS + channels
    own = kept + (tl.load(sequence + 2).to(tl.int64) * NUM_CHANNELS + channels) * KEPT
    for begin in range(0, num_tokens, TOKENS):
        tokens = begin + tl.arange(0, TOKENS)
        result = _convolved(
            rows, stride, own, weights, bias, channels, tokens, num_tokens, is_channel,
            found.dtype.element_ty, KERNEL_SIZE, DILATION, TOKENS, CHANNELS,
        )
        places = tokens.to(tl.int64)[:, None] * NUM_CHANNELS
        mask = (tokens < num_tokens)[:, None] & is_channel[None, :]
        if added is not None:
            first_added = added + first * NUM_CHANNELS + channels
            other = tl.load(first_added[None, :] + places, mask=mask, other=0.0).to(tl.float32)
            both = (other + result.to(tl.float32)).to(found.dtype.element_ty).to(tl.float32)
            before = tl.load(into[None, :] + places, mask=mask, other=0.0).to(tl.float32)
            result = (before + both).to(found.dtype.element_ty)
        tl.store(into[None, :] + places, result, mask=mask)
    taps = tl.arange(0, TAPS)
    last = _inputs(rows, stride, own, num_tokens + (taps - KEPT), num_tokens, is_channel, KEPT)
    # Every thread has read what others write.
    tl.debug_barrier()
    is_kept = (taps < KEPT)[:, None] & is_channel[None, :]
    tl.store(own[None, :] + taps[:, None], last, mask=is_kept)
# fmt: on


def convolved(fresh: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, rows: StateRows) -> Tensor:
    """SiLU of the convolution of `fresh` [n, channels], whose rows are contiguous, and new inputs in `kept`.

    `weight` is [channels, 1, kernel_size], `bias` [channels], `kept` [num_states, channels, kernel_size - 1].
    Sums are float32, from the oldest input to the newest, then the bias; they are rounded to the run dtype,
    as is their SiLU. Rows that no sequence has are undefined.
    """
    found = fresh.new_empty(len(fresh), weight.shape[0])
    _launch(fresh, weight, bias, kept, rows, None, found, dilation=1)
    return found


def add_convolved(
    output: Tensor, fresh: Tensor, weight: Tensor, kept: Tensor, rows: StateRows, added: Tensor, dilation: int
) -> None:
    """Add to `output` [m, channels] the sum of `added` [n, channels] and of `convolved` of `fresh` [n,
    channels], for the rows of sequences; the other rows stay.

    Taps are `dilation` tokens apart: `kept` is [num_states, channels, (kernel_size - 1) * dilation].
    """
    _launch(fresh, weight, None, kept, rows, added, output, dilation=dilation)


def _launch(
    fresh: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    rows: StateRows,
    added: Tensor | None,
    found: Tensor,
    *,
    dilation: int,
) -> None:
    assert rows.sequences is not None, "slices of torch's operators"
    num_channels, kernel_size = weight.shape[0], weight.shape[2]
    num_kept = (kernel_size - 1) * dilation
    tokens, channels = (_TILE if dilation == 1 else _DILATED_TILE)[rows.has_longer]
    constants = {
        "NUM_CHANNELS": num_channels,
        "KERNEL_SIZE": kernel_size,
        "DILATION": dilation,
        "KEPT": num_kept,
        "TAPS": padded(num_kept),
        "TOKENS": tokens,
        "CHANNELS": channels,
        "FIELDS": SEQUENCE_FIELDS,
    }
    grid = (len(rows.sequences), triton.cdiv(num_channels, channels))
    Launch(convolution_kernel, grid, constants, 4 if rows.has_longer else 2)(
        fresh, fresh.stride(0), weight, bias, kept, rows.sequences, added, found
    )
