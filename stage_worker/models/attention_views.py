"""What a step's queries attend to, as index and mask tensors; built once per step and distinct window.

Masks are additive, 0 or -inf in the run dtype: SDPA converts a boolean mask on every call, that is per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.models.slice_layout import SliceLayout


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """Keys of all one-token slices of a step, padded to the longest.

    `pages` int64 [b, p]; `mask` [b, 1, 1, p * block_size], which also hides the padding.
    """

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


def decode_view(
    slices: Sequence[SliceLayout], block_size: int, window: int | None, dtype: torch.dtype
) -> DecodeView:
    """The DecodeView of one-token slices, on the CPU.

    Rows are padded with the sequence's own first page, never with another sequence's: a hidden key still
    enters the product with weight 0, and 0 times a neighbour's NaN would be NaN.
    """
    visible = [item.visible_pages(block_size, window) for item in slices]
    width = max(len(pages) for _, pages in visible)
    rows = [[*pages, *([pages[0]] * (width - len(pages)))] for _, pages in visible]
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
    return DecodeView(torch.tensor(rows), _additive(hidden, dtype)[:, None, None, :])


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
