"""What a step's queries attend to, as index and mask tensors; built once per step and distinct window.

Masks are additive, 0 or -inf in the run dtype: SDPA converts a boolean mask on every call, that is per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.slice_layout import SliceLayout

_SHORT_TOKENS = 512
"""One-token slices that see fewer tokens are grouped as if they saw so many: padding them costs less than one
call more."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """Keys of one-token slices of similar length, padded to the longest.

    `rows` int64 [b] are the slices' rows in the step, or None where they are all its rows in order; `pages`
    int64 [b, p]; `mask` [b, 1, 1, p * block_size], which also hides the padding.
    """

    rows: Tensor | None
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefillView:
    """Keys of one slice of several tokens.

    `pages` int64 [p], or None where the slice has no history: its keys are then those just computed.
    `num_keys` of the gathered keys are used. `mask` [num_tokens, num_keys], or None for plain causal.
    """

    pages: Tensor | None
    num_keys: int
    mask: Tensor | None


def decode_views(
    slices: Sequence[SliceLayout],
    rows: Sequence[int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> list[DecodeView]:
    """The DecodeViews of one-token slices in these rows of the step, on the CPU; `rows` is never None.

    Padding at most doubles what a slice gathers, or brings it to twice `_SHORT_TOKENS`: without groups, one
    long sequence would make every other gather as much as it does.
    """
    lengths = [len(item.visible_pages(block_size, window)[1]) for item in slices]
    groups = _similar(lengths, shortest=-(-_SHORT_TOKENS // block_size))
    return [
        _decode_view([slices[i] for i in group], [rows[i] for i in group], block_size, window, dtype)
        for group in groups
    ]


def _similar(lengths: Sequence[int], *, shortest: int) -> list[list[int]]:
    """Indexes into `lengths` in groups, longest first, within which none is below half of the longest.

    Those below `shortest` count as that long.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or 2 * max(lengths[index], shortest) < longest:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _decode_view(
    slices: Sequence[SliceLayout],
    rows: Sequence[int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> DecodeView:
    """One group, padded with the sequence's own first page, never with another sequence's: a hidden key still
    enters the product with weight 0, and 0 times a neighbour's NaN would be NaN.
    """
    visible = [item.visible_pages(block_size, window) for item in slices]
    width = max(len(pages) for _, pages in visible)
    padded = [[*pages, *([pages[0]] * (width - len(pages)))] for _, pages in visible]
    low = torch.tensor(
        [
            item.first_visible(window) - first * block_size
            for item, (first, _) in zip(slices, visible, strict=True)
        ]
    )
    high = torch.tensor(
        [item.first_position - first * block_size for item, (first, _) in zip(slices, visible, strict=True)]
    )
    offsets = torch.arange(width * block_size)
    hidden = (offsets < low[:, None]) | (offsets > high[:, None])
    mask = _additive(hidden, dtype)[:, None, None, :]
    return DecodeView(torch.tensor(rows), torch.tensor(padded), mask)


def prefill_view(item: SliceLayout, block_size: int, window: int | None, dtype: torch.dtype) -> PrefillView:
    """The PrefillView of one slice, on the CPU."""
    if item.first_position == 0:
        hides = window is not None and window < item.num_tokens
        mask = _causal(item, 0, item.num_tokens, window, dtype) if hides else None
        return PrefillView(None, item.num_tokens, mask)
    first, pages = item.visible_pages(block_size, window)
    num_keys = item.end_position - first * block_size
    mask = _causal(item, first * block_size, num_keys, window, dtype)
    return PrefillView(torch.tensor(pages), num_keys, mask)


def _causal(
    item: SliceLayout, first_key: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    queries = torch.arange(item.first_position, item.end_position)[:, None]
    keys = torch.arange(first_key, first_key + num_keys)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
