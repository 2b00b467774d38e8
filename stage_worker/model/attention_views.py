"""Views of the keys that a step's queries attend to, for kernels that gather them or read them in place.

Masks are additive, 0 or -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint.block_indexer import BlockIndexer
from checkpoint.compressed import Compressor
from checkpoint.step_sizes import BLOCK_SCORES, FEWEST_QUERIES
from stage_worker.model.decode_rows import Column, DecodeRows
from stage_worker.model.kernels import AttentionMethod, Kernels
from stage_worker.validation import SliceLayout
from wire.errors import require

HostArray = NDArray[Any]
Place = Callable[[HostArray], Tensor]
"""Returns an array of the host where the stage computes; it has been copied there before."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class OnHost(Generic[T]):
    """A part of a step before it is on the device: the `arrays` that it needs there, and how it is made."""

    arrays: tuple[HostArray, ...]
    make: Callable[[Place], T]


_SHORT_TOKENS = 512
"""Minimum length for grouping one-token slices: padding shorter slices costs less than another call."""

_QUERIES_PER_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRules:
    """Rules for views: the run dtype, at most `max_keys` gathered keys beyond one sequence, and at most
    `queries_per_item` queries in an item of attention work. `compressors` are those of the stage's layers;
    their entries are in the block group without a window, of which no layer has keys then; the queries of
    these layers see keys through `key_window`. With `top_k`, Triton kernels choose that many of a query's
    tokens if it sees more; with `indexer`, they choose blocks.
    """

    block_size: int
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    max_keys: int
    queries_per_item: int = 16
    compressors: tuple[Compressor, ...] = ()
    key_window: int = 0
    top_k: int | None = None
    indexer: BlockIndexer | None = None

    def does_choose(self, end_position: int) -> bool:
        """Whether queries of a slice of several tokens that ends there choose among its tokens."""
        return self.top_k is not None and end_position > self.top_k

    @property
    def gathers_decodes(self) -> bool:
        """Whether attention of one-token slices copies their keys, and hides some of them by a mask."""
        return self.kernels.decode in (AttentionMethod.SDPA, AttentionMethod.PRODUCTS)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecodeView:
    """Keys of one-token slices of similar length, padded to the longest.

    `rows` int64 [b] are the slices' rows in the step, or None for all rows in order; `pages` is int64 [b,
    p], with the maximum `highest_page`. Gathered keys use `mask` [1, b, 1, p * block_size], which also
    hides the padding, or None where nothing is hidden. Keys read in place use `ranges` int64 [b, 2]: the
    visible keys of each slice, as (begin, end) from its first page.
    """

    rows: Tensor | None
    pages: Tensor
    highest_page: int
    mask: Tensor | None
    ranges: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryBlock:
    """Consecutive queries of a slice and the range of keys visible to any of them, as (begin, end).

    Only keys within `edges` can be hidden: (begin, mask [num_queries, num_keys]), from the block's first
    key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    edges: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrefillView:
    """Keys of one slice of several tokens.

    `pages` is int64 [1, p], or None for a slice without history, which uses the keys just computed.
    `num_keys` of the gathered keys are used. SDPA uses `mask` [num_tokens, num_keys], or None for plain
    causal; products use `blocks`, which cover all queries, and iterate over them several times.
    """

    pages: Tensor | None
    num_keys: int
    mask: Tensor | None
    blocks: Iterable[QueryBlock]


def decode_views(
    slices: DecodeRows, rows: Column, window: int | None, rules: ViewRules, *, are_all: bool
) -> list[OnHost[DecodeView]]:
    """The DecodeViews of one-token slices in `rows` int64 [n] of the step; `are_all` if it has no others.

    Padding at most doubles a slice's gathered keys, or extends them to twice `_SHORT_TOKENS`. Without
    groups, one long sequence would pad all others to its length.
    """
    if not len(slices):
        return []
    begin, end = slices.visible_blocks(rules.block_size, window)
    groups = [list(range(len(slices)))]
    if rules.gathers_decodes:
        groups = list(_gathered_together((end - begin).tolist(), rules))
    if len(groups) == 1:
        return [_decode_view(slices, None if are_all else rows, window, rules)]
    return [_decode_view(slices.take(group), rows[group], window, rules) for group in groups]


def _gathered_together(lengths: Sequence[int], rules: ViewRules) -> Iterator[list[int]]:
    """Groups of indexes into `lengths`, the slices' numbers of pages."""
    return in_groups(lengths, rules.max_keys // rules.block_size, -(-_SHORT_TOKENS // rules.block_size))


def in_groups(lengths: Sequence[int], most: int, shortest: int = _SHORT_TOKENS) -> Iterator[list[int]]:
    """Groups of indexes of similar `lengths`, each of which has `most` together, or is alone.

    Lengths below `shortest` count as that.
    """
    for group in _similar(lengths, shortest=shortest):
        size = max(1, most // max(lengths[index] for index in group))
        for begin in range(0, len(group), size):
            yield group[begin : begin + size]


def _similar(lengths: Sequence[int], *, shortest: int) -> list[list[int]]:
    """Groups of indexes of similar lengths, longest first; lengths below `shortest` count as that."""
    if 2 * max(min(lengths), shortest) >= max(lengths):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or 2 * max(lengths[index], shortest) < longest:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _decode_view(
    slices: DecodeRows, rows: Column | None, window: int | None, rules: ViewRules
) -> OnHost[DecodeView]:
    """Pad with the sequence's own first page: another's NaN times weight 0 would be NaN."""
    size = rules.block_size
    begin, end = slices.visible_blocks(size, window)
    columns = begin[:, None] + np.arange((end - begin).max())
    pages = np.take_along_axis(slices.pages, np.where(columns < end[:, None], columns, begin[:, None]), 1)
    require(int(pages.min()) >= 0, "a page before the first one of the stage's pool")
    first_key = (begin + slices.first_blocks) * size
    ranges = np.stack((slices.first_visible(window) - first_key, slices.positions + 1 - first_key), 1)
    highest_page = int(pages.max())

    def make(place: Place) -> DecodeView:
        return DecodeView(
            rows=None if rows is None else place(rows),
            pages=place(pages),
            highest_page=highest_page,
            mask=_decode_mask(ranges, pages.shape[1] * size, place, rules) if rules.gathers_decodes else None,
            ranges=None if rules.gathers_decodes else place(ranges),
        )

    return OnHost((pages, ranges) if rows is None else (rows, pages, ranges), make)


def _decode_mask(ranges: Column, num_keys: int, place: Place, rules: ViewRules) -> Tensor | None:
    """Hide the keys outside of each sequence's (begin, end)."""
    if (ranges[:, 0] == 0).all() and (ranges[:, 1] == num_keys).all():
        return None
    dtype = torch.float32 if rules.kernels.decode is AttentionMethod.PRODUCTS else rules.dtype
    if rules.device.type != "cpu":
        keys = torch.arange(num_keys, device=rules.device)
        begin, end = (bound[:, None] for bound in place(ranges).unbind(1))
        return _additive((keys < begin) | (keys >= end), dtype)[None, :, None]
    # numpy: a step's first calls of torch operators cost more than the rest of its layout.
    mask = np.zeros((1, len(ranges), 1, num_keys), np.float32)
    for row, (begin, end) in zip(mask[0, :, 0], ranges.tolist(), strict=True):
        row[:begin] = -np.inf
        row[end:] = -np.inf
    return torch.from_numpy(mask).to(dtype)


def prefill_view(item: SliceLayout, window: int | None, rules: ViewRules) -> OnHost[PrefillView]:
    """The PrefillView of one slice."""
    first_key, pages = 0, None
    if item.first_position:
        first, seen = item.visible_pages(rules.block_size, window)
        first_key, pages = first * rules.block_size, np.array([seen], np.int64)
    queries, keys = (item.first_position, item.end_position), (first_key, item.end_position)
    method = rules.kernels.prefill
    is_partly_hidden = item.first_position or (window is not None and window < item.num_tokens)
    has_mask = method is AttentionMethod.SDPA and is_partly_hidden
    has_blocks = method is AttentionMethod.PRODUCTS

    def make(place: Place) -> PrefillView:
        return PrefillView(
            pages=None if pages is None else place(pages),
            num_keys=item.end_position - first_key,
            mask=_causal(queries, keys, window, rules.dtype, rules.device) if has_mask else None,
            blocks=tuple(_query_blocks(item, first_key, window, rules.device)) if has_blocks else (),
        )

    return OnHost(() if pages is None else (pages,), make)


def _query_blocks(
    item: SliceLayout, first_key: int, window: int | None, device: torch.device
) -> Iterator[QueryBlock]:
    most_keys = item.end_position if window is None else min(item.end_position, window + _QUERIES_PER_BLOCK)
    size = max(FEWEST_QUERIES, min(_QUERIES_PER_BLOCK, BLOCK_SCORES // most_keys))
    for begin in range(item.first_position, item.end_position, size):
        end = min(begin + size, item.end_position)
        low = first_key if window is None else max(first_key, begin - window + 1)
        yield QueryBlock(
            queries=(begin - item.first_position, end - item.first_position),
            keys=(low - first_key, end - first_key),
            edges=tuple(_edges((begin, end), (low, end), window, device)),
        )


def _edges(
    queries: tuple[int, int], keys: tuple[int, int], window: int | None, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Masks for partly visible keys, which may overlap: after the first query, and outside the window."""
    first_query, low = queries[0], keys[0]
    if queries[1] - first_query > 1:
        begin = first_query + 1
        yield begin - low, _causal(queries, (begin, keys[1]), None, torch.float32, device)
    if window is not None and (end := queries[1] - window) > low:
        yield 0, _causal(queries, (low, end), window, torch.float32, device)


def _causal(
    queries: tuple[int, int],
    keys: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Additive mask [num_queries, num_keys] for positions given as (begin, end)."""
    query, key = torch.arange(*queries, device=device)[:, None], torch.arange(*keys, device=device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
