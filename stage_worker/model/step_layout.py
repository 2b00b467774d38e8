"""Data of a step that all layers share: KV writes and attention views. Masks are additive, 0 or -inf."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoint import Attention, Mixer, RopeConfig
from checkpoint.blueprint import QueryGrowth
from stage_worker.model.decode_rows import NO_DECODES, Column, DecodeRows
from stage_worker.model.kernels import AttentionMethod, Kernels
from stage_worker.model.rope import Rope
from stage_worker.validation import SliceLayout
from wire.errors import require


class PagedLayers(Protocol):
    """Pages of a stage's layers: layer i has layer `places[i][1]` of `groups[places[i][0]]`."""

    @property
    def groups(self) -> Sequence[PagedKv]:
        """Pages of each block group of the stage, widest window first."""

    @property
    def places(self) -> Sequence[tuple[int, int]]: ...


class PagedKv(Protocol):
    """Keys and values of a stage's layers, counted from 0, in pages of `block_size` slots.

    They are 2 parts of a page; latents, which are both, are the only part (see `PageShape`).
    """

    @property
    def num_slots(self) -> int: ...

    def write(self, layer: int, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> None:
        """Store `rows` int64 [n] (None: all) of `tokens` [m, parts * kv_heads, head_dim] (keys, values) in
        `slots` int64 [n]. If the pages are less exact, round all tokens in place to what a gather returns.
        """

    def store(self, layer: int) -> Tensor:
        """All pages, [num_blocks, parts, kv_heads, block_size, head_dim]."""

    def scales(self, layer: int) -> Tensor | None:
        """Scale of each row of `store`, [num_blocks, parts, kv_heads, block_size]; None without scales."""

    def clear(self, pages: Tensor) -> None:
        """Set `pages` int64 [p] to zero in all layers."""

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, or latents, of `pages` int64 [b, p], [kv_heads, b, p * block_size, head_dim] each,
        until the next gather.
        """


_SHORT_TOKENS = 512
"""Minimum length for grouping one-token slices: padding shorter slices costs less than another call."""

_QUERIES_PER_BLOCK = 128
_SCORES_PER_BLOCK = 128 * 512
"""Queries times keys of a block: 3 MB in float32 with 12 heads, about a cache's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRules:
    """Rules for views: the run dtype, and at most `max_keys` gathered keys beyond one sequence."""

    block_size: int
    dtype: torch.dtype
    kernels: Kernels
    max_keys: int


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

    def to(self, device: torch.device) -> DecodeView:
        """This view on `device`."""
        if device.type == "cpu":
            return self
        return replace(
            self, rows=_on(self.rows, device), pages=self.pages.to(device), mask=_on(self.mask, device)
        )


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
    causal; products use `blocks`, which cover all queries.
    """

    pages: Tensor | None
    num_keys: int
    mask: Tensor | None
    blocks: tuple[QueryBlock, ...]

    def to(self, device: torch.device) -> PrefillView:
        """This view on `device`."""
        if device.type == "cpu":
            return self
        blocks = tuple(
            replace(block, edges=tuple((begin, mask.to(device)) for begin, mask in block.edges))
            for block in self.blocks
        )
        return replace(self, pages=_on(self.pages, device), mask=_on(self.mask, device), blocks=blocks)


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def decode_views(slices: DecodeRows, rows: Column, window: int | None, rules: ViewRules) -> list[DecodeView]:
    """The DecodeViews of one-token slices in `rows` int64 [n] of the step, on the CPU; `rows` is never None.

    Padding at most doubles a slice's gathered keys, or extends them to twice `_SHORT_TOKENS`. Without
    groups, one long sequence would pad all others to its length.
    """
    if not len(slices):
        return []
    if rules.kernels.decode is AttentionMethod.IN_PLACE:
        return [_decode_view(slices, rows, window, rules)]
    begin, end = slices.visible_blocks(rules.block_size, window)
    return [
        _decode_view(slices, rows, window, rules)
        if len(group) == len(slices)
        else _decode_view(slices.take(group), rows[group], window, rules)
        for group in _gathered_together((end - begin).tolist(), rules)
    ]


def _gathered_together(lengths: Sequence[int], rules: ViewRules) -> Iterator[list[int]]:
    """Groups of indexes into `lengths`, the slices' numbers of pages."""
    for group in _similar(lengths, shortest=-(-_SHORT_TOKENS // rules.block_size)):
        size = max(1, rules.max_keys // (max(lengths[index] for index in group) * rules.block_size))
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


def _decode_view(slices: DecodeRows, rows: Column, window: int | None, rules: ViewRules) -> DecodeView:
    """Pad with the sequence's own first page: another's NaN times weight 0 would be NaN."""
    size = rules.block_size
    begin, end = slices.visible_blocks(size, window)
    columns = begin[:, None] + np.arange((end - begin).max())
    pages = np.take_along_axis(slices.pages, np.where(columns < end[:, None], columns, begin[:, None]), 1)
    require(int(pages.min()) >= 0, "a page before the first one of the stage's pool")
    first_key = (begin + slices.first_blocks) * size
    ranges = np.stack((slices.first_visible(window) - first_key, slices.positions + 1 - first_key), 1)
    is_in_place = rules.kernels.decode is AttentionMethod.IN_PLACE
    return DecodeView(
        rows=torch.from_numpy(rows),
        pages=torch.from_numpy(pages),
        highest_page=int(pages.max()),
        mask=None if is_in_place else _decode_mask(ranges.tolist(), pages.shape[1] * size, rules),
        ranges=torch.from_numpy(ranges) if is_in_place else None,
    )


def _decode_mask(ranges: Sequence[Sequence[int]], num_keys: int, rules: ViewRules) -> Tensor | None:
    """Hide the keys outside of each sequence's (begin, end)."""
    if all(begin == 0 and end == num_keys for begin, end in ranges):
        return None
    # numpy: a step's first calls of torch operators cost more than the rest of its layout.
    mask = np.zeros((1, len(ranges), 1, num_keys), np.float32)
    for row, (begin, end) in zip(mask[0, :, 0], ranges, strict=True):
        row[:begin] = -np.inf
        row[end:] = -np.inf
    found = torch.from_numpy(mask)
    return found if rules.kernels.decode is AttentionMethod.PRODUCTS else found.to(rules.dtype)


def prefill_view(item: SliceLayout, window: int | None, rules: ViewRules) -> PrefillView:
    """The PrefillView of one slice, on the CPU."""
    if item.first_position == 0:
        first_key, pages = 0, None
    else:
        first, seen = item.visible_pages(rules.block_size, window)
        first_key, pages = first * rules.block_size, torch.tensor([seen])
    num_keys = item.end_position - first_key
    mask: Tensor | None = None
    blocks: tuple[QueryBlock, ...] = ()
    if rules.kernels.prefill is AttentionMethod.PRODUCTS:
        blocks = tuple(_query_blocks(item, first_key, window))
    elif rules.kernels.prefill is AttentionMethod.SDPA and (
        item.first_position or (window is not None and window < item.num_tokens)
    ):
        queries = (item.first_position, item.end_position)
        mask = _causal(queries, (first_key, item.end_position), window, rules.dtype)
    return PrefillView(pages=pages, num_keys=num_keys, mask=mask, blocks=blocks)


def _query_blocks(item: SliceLayout, first_key: int, window: int | None) -> Iterator[QueryBlock]:
    most_keys = item.end_position if window is None else min(item.end_position, window + _QUERIES_PER_BLOCK)
    size = max(16, min(_QUERIES_PER_BLOCK, _SCORES_PER_BLOCK // most_keys))
    for begin in range(item.first_position, item.end_position, size):
        end = min(begin + size, item.end_position)
        low = first_key if window is None else max(first_key, begin - window + 1)
        yield QueryBlock(
            queries=(begin - item.first_position, end - item.first_position),
            keys=(low - first_key, end - first_key),
            edges=tuple(_edges((begin, end), (low, end), window)),
        )


def _edges(
    queries: tuple[int, int], keys: tuple[int, int], window: int | None
) -> Iterator[tuple[int, Tensor]]:
    """Masks for partly visible keys, which may overlap: after the first query, and outside the window."""
    first_query, low = queries[0], keys[0]
    if queries[1] - first_query > 1:
        begin = first_query + 1
        yield begin - low, _causal(queries, (begin, keys[1]), None, torch.float32)
    if window is not None and (end := queries[1] - window) > low:
        yield 0, _causal(queries, (low, end), window, torch.float32)


def _causal(
    queries: tuple[int, int], keys: tuple[int, int], window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive mask [num_queries, num_keys] for positions given as (begin, end)."""
    query, key = torch.arange(*queries)[:, None], torch.arange(*keys)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KvWrites:
    """Assignment of the step's keys and values to slots (page * block_size + offset).

    `rows` is int64 [w], or None for all rows in order; `slots` is int64 [w]; `by_row` int64 [num_tokens]
    has each row's slot, -1 if not written; `highest_slot` is -1 without slots. `begun` int64 [c] are the
    partly filled new pages, or None: they are zeroed first, because a reused page may hold the NaN of a
    failed sequence, which no mask can hide (0 * NaN is NaN).
    """

    rows: Tensor | None
    slots: Tensor
    by_row: Tensor
    highest_slot: int
    begun: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionViews:
    """Keys visible to the step's queries through one window.

    `decodes` covers one-token slices (in either phase: one query is computed alike), `prefills` the
    others, in the order of `StepLayout.prefill_rows`.
    """

    decodes: tuple[DecodeView, ...]
    prefills: tuple[PrefillView, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RotaryTable:
    """`cos` and `sin` of a step's tokens, [num_tokens, 1, head_dim], see `Rope.cos_sin`.

    Rotated queries are multiplied by `query_scale` [num_tokens, 1, 1]; None for 1.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rotary:
    """What the tables of a mixer depend on. Layers look one up in each step: the hash is kept."""

    rope: RopeConfig | None
    head_dim: int
    growth: QueryGrowth | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.rope, self.head_dim, self.growth)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, mixer: Mixer) -> Rotary:
        width = mixer.head_dim if isinstance(mixer, Attention) else mixer.rope_dim
        return cls(mixer.rope, width, mixer.query_growth)


def _rotary_table(key: Rotary, rope: Rope, positions: Sequence[int]) -> RotaryTable:
    cos, sin = rope.cos_sin(positions)
    return RotaryTable(cos=cos, sin=sin, query_scale=_query_scale(key.growth, positions, cos))


def _query_scale(growth: QueryGrowth | None, positions: Sequence[int], like: Tensor) -> Tensor | None:
    if growth is None or max(positions) < growth.original_length:
        return None
    turns = torch.tensor(positions) // growth.original_length
    scale = 1 + growth.beta * torch.log1p(turns.to(torch.float32))
    return scale.to(like)[:, None, None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepLayout:
    """A step of `num_tokens` rows, the concatenated tokens of its slices, for a stage with `kernels`.

    `rotary` has an entry for each distinct `Rotary` of the stage's layers. `prefill_rows` are the row
    ranges of slices of several tokens. `views` has an entry for each distinct window of the layers. A stage
    with layers of several block groups has one layout per group, from the second group on in `others`.
    """

    num_tokens: int
    kernels: Kernels
    rotary: Mapping[Rotary, RotaryTable]
    writes: KvWrites
    prefill_rows: tuple[tuple[int, int], ...]
    views: Mapping[int | None, AttentionViews]
    others: tuple[StepLayout, ...] = ()

    @property
    def groups(self) -> tuple[StepLayout, ...]:
        """The layout of each block group of the stage, this one first."""
        return (self, *self.others)

    @classmethod
    def build(
        cls,
        slices: Sequence[SliceLayout],
        *,
        decodes: DecodeRows = NO_DECODES,
        windows: Collection[int | None],
        ropes: Mapping[Rotary, Rope],
        rules: ViewRules,
        device: torch.device,
    ) -> StepLayout:
        """Build the layout of `decodes`, which write their positions, and of the `slices` after them.

        Rows are consecutive in this order.

        `windows` are the distinct windows of the layers. Raises ValueError if a slice's pages lack positions
        that it writes or sees, or without slices.
        """
        if not slices and not len(decodes):
            raise ValueError("a step layout needs at least one slice")
        for window in windows:
            decodes.check(rules.block_size, window)
            for item in slices:
                item.check(rules.block_size, window)
        ranges = _row_ranges(slices, len(decodes))
        positions = decodes.positions.tolist()
        for item in slices:
            positions.extend(range(item.first_position, item.end_position))
        return cls(
            num_tokens=len(positions),
            kernels=rules.kernels,
            rotary={key: _rotary_table(key, rope, positions) for key, rope in ropes.items()},
            writes=_kv_writes(decodes, slices, ranges, rules.block_size, device),
            prefill_rows=tuple((begin, end) for begin, end in ranges if end - begin > 1),
            views={window: _views(decodes, slices, ranges, window, rules, device) for window in windows},
        )


@dataclass(slots=True, eq=False)
class LayerKv:
    """Keys and values of one layer in a step: where the layer writes them, and where it reads them.

    `layer` is the index into `pages`, from the stage's first. Made for every layer of a step: a frozen one
    takes three times as long.
    """

    step: StepLayout
    pages: PagedKv
    layer: int

    @property
    def kernels(self) -> Kernels:
        return self.step.kernels

    @property
    def writes(self) -> KvWrites:
        return self.step.writes

    @property
    def store(self) -> Tensor:
        """All pages of the layer, see `PagedKv.store`."""
        return self.pages.store(self.layer)

    @property
    def scales(self) -> Tensor | None:
        """Scales of the layer's pages, see `PagedKv.scales`."""
        return self.pages.scales(self.layer)

    def write(self, fresh: Tensor) -> None:
        """Store the step's keys and values `fresh` [num_tokens, parts * kv_heads, head_dim] in its slots.

        Afterwards `fresh` has what the pages hold.
        """
        writes = self.writes
        self.pages.write(self.layer, fresh, writes.slots, writes.rows)

    def gather(self, pages: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, or latents, of `pages`, see `PagedKv.gather`."""
        return self.pages.gather(self.layer, pages)


def _views(
    decodes: DecodeRows,
    slices: Sequence[SliceLayout],
    ranges: Sequence[tuple[int, int]],
    window: int | None,
    rules: ViewRules,
    device: torch.device,
) -> AttentionViews:
    """Views of `decodes`, and of `slices` in rows `ranges`, through one window."""
    singles = [item for item in slices if item.num_tokens == 1]
    longer = [item for item in slices if item.num_tokens > 1]
    rows = np.arange(len(decodes), dtype=np.int64)
    if singles:
        single_rows = [begin for begin, end in ranges if end - begin == 1]
        rows = np.concatenate((rows, np.array(single_rows, np.int64)))
        decodes = decodes + DecodeRows.of(singles)
    views = decode_views(decodes, rows, window, rules)
    prefills = [prefill_view(item, window, rules) for item in longer]
    if len(views) == 1 and not longer:
        views = [replace(views[0], rows=None)]
    return AttentionViews(
        decodes=tuple(view.to(device) for view in views),
        prefills=tuple(view.to(device) for view in prefills),
    )


def _row_ranges(slices: Sequence[SliceLayout], begin: int) -> list[tuple[int, int]]:
    ranges = []
    for item in slices:
        ranges.append((begin, begin + item.num_tokens))
        begin += item.num_tokens
    return ranges


def _kv_writes(
    decodes: DecodeRows,
    slices: Sequence[SliceLayout],
    ranges: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device,
) -> KvWrites:
    decode_slots = decodes.slots(block_size)
    begun = (decode_slots[decode_slots % block_size == 0] // block_size).tolist() if block_size > 1 else []
    rows = list(range(len(decodes)))
    slots = decode_slots.tolist()
    for item, (row_begin, _) in zip(slices, ranges, strict=True):
        for begin, end in item.written_runs():
            rows.extend(range(row_begin + begin - item.first_position, row_begin + end - item.first_position))
        for page, begin, end in item.written_blocks(block_size):
            base = page * block_size
            slots.extend(range(base + begin, base + end))
            if begin == 0 and end < block_size:
                begun.append(page)
    num_rows = ranges[-1][1] if ranges else len(decodes)
    where = _indices(slots, device)
    if len(rows) == num_rows:
        every, by_row = None, where
    else:
        every = _indices(rows, device)
        by_row = torch.full((num_rows,), -1, device=device).index_copy_(0, every, where)
    return KvWrites(
        rows=every,
        slots=where,
        by_row=by_row,
        highest_slot=max(slots, default=-1),
        begun=_indices(begun, device) if begun else None,
    )


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64)).to(device)
