"""Data of a step that all layers share: KV writes and attention views.

All of it is computed on the host, in numpy, and may be checked there (`StepArrays`). Its arrays then reach
the device in one copy, with the step's other data; only masks and rotary tables are computed there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from checkpoint.compressed import Compressor
from kvcache.layer_rows import LayerRows, RowKind
from kvcache.pages import IndexKeys
from kvcache.state_store import StateStore
from stage_worker.model.attention_views import HostArray, OnHost, Place, ViewRules
from stage_worker.model.attention_work import HostWork, WorkRoom
from stage_worker.model.compressed_work import SequencePages, sequence_pages
from stage_worker.model.decode_rows import NO_DECODES, Column, DecodeRows, SliceRows
from stage_worker.model.entry_layout import EntryArrays, EntryStep, entry_arrays, source_slots
from stage_worker.model.kernels import AttentionMethod, Kernels
from stage_worker.model.rope import Rope, Rotary, RotaryTable, rotary_table
from stage_worker.model.state_rows import HostStates, StateRows
from stage_worker.model.window_views import AttentionViews, prefill_rows, view_of, window_views
from stage_worker.validation import SliceLayout


class PagedLayers(Protocol):
    """Pages of a stage's layers: layer i has layer `places[i][1]` of `groups[places[i][0]]`."""

    @property
    def groups(self) -> Sequence[PagedKv]:
        """Pages of each block group of the stage, widest window first."""

    @property
    def states(self) -> StateStore | None:
        """Recurrent states of the stage's recurrent layers, which have no group; None without such layers."""

    @property
    def places(self) -> Sequence[tuple[int | None, int]]: ...


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

    def gather_latents(self, layer: int, slots: Tensor) -> Tensor:
        """Latents [..., width] of the tokens in `slots` int64 [...]."""

    @property
    def index(self) -> IndexKeys | None:
        """Keys of indexers, of the layers that have one."""

    @property
    def rows(self) -> Mapping[RowKind, LayerRows]:
        """Rows beside the pages, of the layers that have some."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KvWrites:
    """Assignment of the step's keys and values to slots (page * block_size + offset).

    `rows` is int64 [w], or None for all rows in order; `slots` is int64 [w]; `by_row` int64 [num_tokens]
    has each row's slot, -1 if not written; `highest_slot` is -1 without slots. `begun` int64 [c] are the
    partly filled new pages, or None: they are zeroed first, because a reused page may hold the NaN of a
    failed sequence, which no mask can hide (0 * NaN is NaN). Triton kernels read no hidden keys.
    """

    rows: Tensor | None
    slots: Tensor
    by_row: Tensor
    highest_slot: int
    begun: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepLayout:
    """A step of `num_tokens` rows, the concatenated tokens of its slices, for a stage with `kernels`.

    `positions` int64 [num_tokens] are the places of the rows in their sequences.
    `rotary` has an entry for each distinct `Rotary` of the stage's layers. `prefill_rows` are the row
    ranges of slices of several tokens. `views` has an entry for each distinct window of the layers. A stage
    with layers of several block groups has one layout per group, from the second group on in `others`.
    `states` is None on a stage without recurrent layers. `entries` are those of compressors, in the group
    that keeps them; `sources` int64 [c, span] are the slots of the tokens of which they are pooled, in the
    groups of layers with keys. Those groups have `key_pages` for the work of entries. `token_ids` int64
    [num_tokens] are known on stages with layers that need them.
    """

    num_tokens: int
    positions: Tensor
    kernels: Kernels
    rotary: Mapping[Rotary, RotaryTable]
    writes: KvWrites
    prefill_rows: tuple[tuple[int, int], ...]
    views: Mapping[int | None, AttentionViews]
    others: tuple[StepLayout, ...] = ()
    states: StateRows | None = None
    entries: Mapping[Compressor, EntryStep] = field(default_factory=dict)
    sources: Mapping[Compressor, Tensor] = field(default_factory=dict)
    key_pages: SequencePages | None = None
    token_ids: Tensor | None = None

    @property
    def groups(self) -> tuple[StepLayout, ...]:
        """The layout of each block group of the stage, this one first."""
        return (self, *self.others)

    def with_tokens(self, token_ids: Tensor) -> StepLayout:
        """The layout with the step's `token_ids`, in all block groups."""
        others = tuple(replace(other, token_ids=token_ids) for other in self.others)
        return replace(self, token_ids=token_ids, others=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoom:
    """Sizes that a step is padded to: rows, sequences, and attention work through each window.

    Sequences have several rows only if `has_longer`. Padding rows write the page of slots from `spare_slot`
    on, which no sequence has. Positions are below `end_position`.
    """

    num_tokens: int
    num_sequences: int
    has_longer: bool
    work: WorkRoom
    spare_slot: int
    end_position: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepArrays:
    """A StepLayout on the host, where it can be checked: positions int64 [num_tokens] below `end_position`,
    writes and views.

    `by_row` int64 [num_tokens] has each row's slot, -1 if not written. `works` are the work lists of the
    windows, empty unless they cover all queries. `states` are those of the stage's first block group, None
    without recurrent layers.
    """

    rules: ViewRules
    positions: Column
    end_position: int
    slots: Column
    by_row: Column
    writes: OnHost[KvWrites]
    prefill_rows: tuple[tuple[int, int], ...]
    views: Mapping[int | None, OnHost[AttentionViews]]
    works: Mapping[int | None, HostWork]
    states: HostStates | None = None
    entries: Mapping[Compressor, EntryArrays] = field(default_factory=dict)
    sources: Mapping[Compressor, Column] = field(default_factory=dict)
    key_pages: OnHost[SequencePages] | None = None

    @classmethod
    def build(
        cls,
        slices: Sequence[SliceLayout],
        *,
        decodes: DecodeRows = NO_DECODES,
        windows: Collection[int | None],
        rules: ViewRules,
    ) -> StepArrays:
        """Build the layout of `decodes`, which write their positions, and of the `slices` after them.

        Rows are consecutive in this order.

        `windows` are the distinct windows of the layers. Raises ValueError if a slice's pages lack positions
        that it writes or sees, or without slices.
        """
        _check(decodes, slices, windows, rules.block_size)
        ranges = _row_ranges(slices, len(decodes))
        positions = decodes.positions.tolist()
        for item in slices:
            positions.extend(range(item.first_position, item.end_position))
        slots, by_row, writes = _kv_writes(decodes, slices, ranges, rules)
        rows, compressors = np.array(positions, np.int64), rules.compressors
        has_entries = bool(compressors) and None in windows
        of_entries, of_keys, seen = (compressors, (), ()) if has_entries else ((), compressors, windows)
        views = {window: window_views(decodes, slices, window, rules) for window in seen}
        works = {window: found.work for window, found in views.items() if found.work is not None}
        return cls(
            rules=rules,
            positions=rows,
            end_position=max(positions) + 1,
            slots=slots,
            by_row=by_row,
            writes=writes,
            prefill_rows=prefill_rows(slices, ranges, rules),
            views={window: found.views for window, found in views.items()},
            works=works,
            entries={one: entry_arrays(decodes, slices, rows, by_row, one, rules) for one in of_entries},
            sources={one: source_slots(decodes, slices, one, rules.block_size) for one in of_keys},
            key_pages=_key_pages(decodes, slices, rules) if of_keys else None,
        )

    @classmethod
    def empty(cls, windows: Collection[int | None], rules: ViewRules) -> StepArrays:
        """A step without rows, to be padded, for Triton kernels."""
        nothing: Column = np.zeros(0, np.int64)
        return _of_works(rules, nothing, 0, nothing, {window: HostWork.empty() for window in windows})

    def padded(self, room: StepRoom) -> StepArrays | None:
        """The same step with `room`; None if it has too little, or if queries are not in work lists.

        All rows write: the padding, and those whose slot is valid already, to the spare page.
        """
        num_tokens = len(self.positions)
        padding = range(num_tokens, room.num_tokens)
        found = {window: work.padded(room.work, padding) for window, work in self.works.items()}
        works = {window: work for window, work in found.items() if work is not None}
        states = self.states and self.states.padded(room.num_sequences, has_longer=room.has_longer)
        is_longer = num_tokens > room.num_tokens or self.end_position > room.end_position
        if is_longer or len(works) < len(self.views) or (states is None) != (self.states is None):
            return None
        positions = np.zeros(room.num_tokens, np.int64)
        positions[:num_tokens] = self.positions
        slots: Column = room.spare_slot + np.arange(room.num_tokens) % self.rules.block_size
        np.copyto(slots[:num_tokens], self.by_row, where=self.by_row >= 0)
        return replace(_of_works(self.rules, positions, room.end_position, slots, works), states=states)

    @property
    def arrays(self) -> Iterator[HostArray]:
        """What `layout` needs on the device."""
        yield self.positions
        yield from self.writes.arrays
        for views in self.views.values():
            yield from views.arrays
        if self.states is not None:
            yield from self.states.rows.arrays
        for entries in self.entries.values():
            yield from entries.arrays
        yield from self.sources.values()
        if self.key_pages is not None:
            yield from self.key_pages.arrays

    def rotary(self, ropes: Mapping[Rotary, Rope], place: Place) -> dict[Rotary, RotaryTable]:
        """The tables of a step, the same for all block groups, once `arrays` are on the device."""
        positions, end = place(self.positions), self.end_position
        return {key: rotary_table(key, rope, positions, end=end) for key, rope in ropes.items()}

    def layout(
        self, rotary: Mapping[Rotary, RotaryTable], place: Place, ropes: Mapping[Rotary, Rope] | None = None
    ) -> StepLayout:
        """The layout, once `arrays` are on the device; `ropes` are those that rotate entries."""
        return StepLayout(
            num_tokens=len(self.positions),
            positions=place(self.positions),
            kernels=self.rules.kernels,
            rotary=rotary,
            writes=self.writes.make(place),
            prefill_rows=self.prefill_rows,
            views={window: views.make(place) for window, views in self.views.items()},
            states=None if self.states is None else self.states.rows.make(place),
            entries={one: entries.make(ropes or {}, place) for one, entries in self.entries.items()},
            sources={one: place(slots) for one, slots in self.sources.items()},
            key_pages=None if self.key_pages is None else self.key_pages.make(place),
        )


@dataclass(slots=True, eq=False)
class Selection:
    """Tokens that queries of a step attend to, chosen by the last layer with an indexer.

    `tokens` has, for each decode view by its number, and for each query block of a prefill view by both
    numbers, int32 [num_queries, top_k]: ascending indexes of gathered keys. Views and blocks with at most
    `top_k` keys are missing. With Triton kernels, it has those of each of `AttentionViews.choices`, by its
    number: indexes of tokens of the sequence.
    """

    tokens: dict[tuple[int, ...], Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LayerEntries:
    """Entries of one layer in a step: `layer` is its number in `rows`, by kind."""

    step: StepLayout
    rows: Mapping[RowKind, LayerRows]
    layer: int


@dataclass(slots=True, eq=False)
class LayerKv:
    """Keys and values of one layer in a step: where the layer writes them, and where it reads them.

    `layer` is the index into `pages`, from the stage's first. All layers of a step share `selection`.
    `entries` are those of a compressor. Made for every layer of a step: a frozen one takes three times as
    long.
    """

    step: StepLayout
    pages: PagedKv
    layer: int
    selection: Selection = field(default_factory=Selection)
    entries: LayerEntries | None = None

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

    def gather_latents(self, slots: Tensor) -> Tensor:
        """Latents of single tokens, see `PagedKv.gather_latents`."""
        return self.pages.gather_latents(self.layer, slots)

    @property
    def index(self) -> IndexKeys:
        """Where the layer's indexer keeps its keys."""
        assert self.pages.index is not None, "pages without keys of indexers"
        return self.pages.index

    def write_index(self, keys: Tensor) -> None:
        """Store the step's keys of the indexer [num_tokens, width] in its slots."""
        self.index.write(self.layer, keys, self.writes.slots, self.writes.rows)

    def gather_index(self, pages: Tensor) -> Tensor:
        """Keys of the indexer of `pages`, see `IndexKeys.gather`."""
        return self.index.gather(self.layer, pages)


@dataclass(slots=True, eq=False)
class LayerStates:
    """Recurrent states of one layer in a step: `parts` of all slots, see `StateStore.layer`."""

    step: StepLayout
    parts: list[Tensor]

    @property
    def rows(self) -> StateRows:
        """The step's slices and their slots."""
        assert self.step.states is not None, "a layout without states"
        return self.step.states

    @property
    def conv(self) -> Tensor:
        """Last inputs of the convolution, [num_states, channels, kernel_size - 1]."""
        return self.parts[0]

    @property
    def recurrent(self) -> Tensor:
        """What sums over all tokens, float32 [num_states, ...], see `StatePart`."""
        return self.parts[1]


@dataclass(slots=True, eq=False)
class NoMemory:
    """A layer without a mixer in a step."""

    step: StepLayout


LayerMemory = LayerKv | LayerStates | NoMemory
"""What a layer's mixer remembers, by its kind."""


def _of_works(
    rules: ViewRules,
    positions: Column,
    end_position: int,
    slots: Column,
    works: Mapping[int | None, HostWork],
) -> StepArrays:
    """A step whose rows all write, and whose queries are all in `works`."""
    return StepArrays(
        rules=rules,
        positions=positions,
        end_position=end_position,
        slots=slots,
        by_row=slots,
        writes=_writes_to(slots, slots, [], []),
        prefill_rows=(),
        views={window: view_of(work) for window, work in works.items()},
        works=works,
    )


def _check(
    decodes: DecodeRows, slices: Sequence[SliceLayout], windows: Collection[int | None], block_size: int
) -> None:
    """Raises ValueError, see `StepArrays.build`."""
    if not slices and not len(decodes):
        raise ValueError("a step layout needs at least one slice")
    for window in windows:
        decodes.check(block_size, window)
        for item in slices:
            item.check(block_size, window)


def _key_pages(
    decodes: DecodeRows, slices: Sequence[SliceLayout], rules: ViewRules
) -> OnHost[SequencePages] | None:
    """What the work of entries needs of a group with keys; None without Triton kernels."""
    if rules.kernels.decode is not AttentionMethod.TRITON:
        return None
    return sequence_pages(SliceRows.of(decodes, slices), rules.block_size)


def _row_ranges(slices: Sequence[SliceLayout], begin: int) -> list[tuple[int, int]]:
    ranges = []
    for item in slices:
        ranges.append((begin, begin + item.num_tokens))
        begin += item.num_tokens
    return ranges


def _kv_writes(
    decodes: DecodeRows, slices: Sequence[SliceLayout], ranges: Sequence[tuple[int, int]], rules: ViewRules
) -> tuple[Column, Column, OnHost[KvWrites]]:
    """Slots, the slot of each row (-1: none), and the writes to them."""
    block_size, is_cleared = rules.block_size, rules.kernels.decode is not AttentionMethod.TRITON
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
    where = np.array(slots, np.int64)
    by_row = where
    if len(rows) < num_rows:
        by_row = np.full(num_rows, -1, np.int64)
        by_row[rows] = where
    return where, by_row, _writes_to(where, by_row, rows, begun if is_cleared else [])


def _writes_to(slots: Column, by_row: Column, rows: list[int], begun: list[int]) -> OnHost[KvWrites]:
    """Writes to `slots`, which are `by_row`; of `rows` alone if some have none. The pages `begun` are cleared
    first.
    """
    every = None if by_row is slots else np.array(rows, np.int64)
    cleared = np.array(begun, np.int64) if begun else None

    def make(place: Place) -> KvWrites:
        return KvWrites(
            rows=None if every is None else place(every),
            slots=place(slots),
            by_row=place(by_row),
            highest_slot=int(slots.max(initial=-1)),
            begun=None if cleared is None else place(cleared),
        )

    arrays = (slots, None if every is None else by_row, every, cleared)
    return OnHost(tuple(array for array in arrays if array is not None), make)
