"""Entries of compressors in a step: which are pooled, of which tokens, and which a query sees.

An entry stands for the `ratio` tokens up to the one at position p with (p + 1) % ratio = 0, and lies in the
block of that token; entry number e of a sequence is row e of its blocks' rows one after the other, if blocks
without any entry's last token are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from checkpoint.compressed import Compressor
from stage_worker.model.attention_views import HostArray, OnHost, Place, ViewRules, in_groups
from stage_worker.model.compressed_work import EntryWork, entry_work
from stage_worker.model.decode_rows import Column, DecodeRows, SliceRows
from stage_worker.model.kernels import AttentionMethod
from stage_worker.model.rope import Rope, Rotary, RotaryTable, rotary_table
from stage_worker.validation import SliceLayout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryView:
    """Entries that some queries of a step see.

    Queries are `rows` int64 [q] of the step, or those in the range `rows` (begin, end). The first `counts`
    int64 [q, 1] entries of a query are visible, `most` at most. `pages` int64 [b, p] are the blocks with
    entries: of each query, or of all of them if there is one row.
    """

    rows: Tensor | slice
    counts: Tensor
    most: int
    pages: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryStep:
    """Entries of one compressor in a step, in the block group that keeps entries.

    Of the entries whose last token is in the step, `kept` int64 [c] (None: all) are written to `slots` int64
    [c], the others are valid already. `rotary` has the tables of their first tokens. There may be none.
    Queries attend to entries by `views`, or with Triton kernels by `work`.
    """

    kept: Tensor | None
    slots: Tensor
    rotary: Mapping[Rotary, RotaryTable]
    views: tuple[EntryView, ...]
    work: EntryWork | None = None

    @property
    def may_choose(self) -> bool:
        """Whether queries choose entries, if there is an indexer."""
        return self.work is None or len(self.work.groups) > 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryArrays:
    """An EntryStep on the host; `firsts` int64 [c] are the first positions of written entries."""

    kept: Column | None
    slots: Column
    firsts: Column
    views: tuple[OnHost[EntryView], ...]
    work: OnHost[EntryWork] | None

    @property
    def arrays(self) -> Iterator[HostArray]:
        """What `make` needs on the device."""
        yield self.slots
        yield self.firsts
        if self.kept is not None:
            yield self.kept
        for view in self.views:
            yield from view.arrays
        if self.work is not None:
            yield from self.work.arrays

    def make(self, ropes: Mapping[Rotary, Rope], place: Place) -> EntryStep:
        """The step, once `arrays` are on the device; of `ropes`, layers with entries use their own."""
        rotary = {}
        if len(self.firsts):
            firsts, end = place(self.firsts), int(self.firsts.max()) + 1
            rotary = {key: rotary_table(key, rope, firsts, end=end) for key, rope in ropes.items()}
        return EntryStep(
            kept=None if self.kept is None else place(self.kept),
            slots=place(self.slots),
            rotary=rotary,
            views=tuple(view.make(place) for view in self.views),
            work=None if self.work is None else self.work.make(place),
        )


def source_slots(
    decodes: DecodeRows, slices: Sequence[SliceLayout], compressor: Compressor, block_size: int
) -> Column:
    """Slots int64 [c, span] of the tokens of the entries that end in a step; -1 before the first position."""
    found = [_slots_before(decodes, compressor, block_size)]
    for item in slices:
        ends = _last_positions(item, compressor.ratio)
        if len(ends):
            pages = np.array([item.pages], np.int64).repeat(len(ends), 0)
            first_blocks = np.full(len(ends), item.first_block, np.int64)
            rows = DecodeRows(ends, pages, first_blocks, np.full(len(ends), pages.shape[1], np.int64))
            found.append(_slots_before(rows, compressor, block_size))
    return np.concatenate(found)


def _last_positions(item: SliceLayout, ratio: int) -> Column:
    """Positions of a slice at which entries end."""
    first = item.first_position + (-item.first_position - 1) % ratio
    return np.arange(first, item.end_position, ratio, dtype=np.int64)


def _slots_before(rows: DecodeRows, compressor: Compressor, block_size: int) -> Column:
    """Slots of the last `span` tokens of each of `rows` at which an entry ends."""
    chosen = np.flatnonzero((rows.positions + 1) % compressor.ratio == 0)
    positions = rows.positions[chosen, None] + np.arange(1 - compressor.span, 1)
    blocks = np.maximum(positions, 0) // block_size - rows.first_blocks[chosen, None]
    if not len(chosen):
        return np.zeros((0, compressor.span), np.int64)
    pages = np.take_along_axis(rows.pages[chosen], np.maximum(blocks, 0), 1)
    slots: Column = np.where(positions < 0, -1, pages * block_size + positions % block_size)
    return slots


def entry_arrays(
    decodes: DecodeRows,
    slices: Sequence[SliceLayout],
    positions: Column,
    by_row: Column,
    compressor: Compressor,
    rules: ViewRules,
) -> EntryArrays:
    """Entries of rows at `positions` int64 [n], of `decodes` and then `slices`.

    `by_row` int64 [n] are the rows' slots in pages, -1 for those that are not written.
    """
    ratio, size = compressor.ratio, rules.block_size
    ending = np.flatnonzero((positions + 1) % ratio == 0)
    slots = by_row[ending]
    kept = np.flatnonzero(slots >= 0)
    pages, offsets = np.divmod(slots[kept], size)
    rows_per_block = compressor.rows_per_block(size)
    work = None
    if rules.kernels.decode is AttentionMethod.TRITON:
        work = entry_work(SliceRows.of(decodes, slices), compressor, rules)
    return EntryArrays(
        kept=None if len(kept) == len(ending) else kept,
        slots=pages * rows_per_block + (offsets // ratio if size >= ratio else 0),
        firsts=positions[ending][kept] + 1 - ratio,
        views=tuple(_views(decodes, slices, ratio, rules)) if work is None else (),
        work=work,
    )


def _views(
    decodes: DecodeRows, slices: Sequence[SliceLayout], ratio: int, rules: ViewRules
) -> Iterator[OnHost[EntryView]]:
    """Views of queries that see an entry: of one-token slices of similar length, and of each longer slice."""
    rows, row = [np.arange(len(decodes), dtype=np.int64)], len(decodes)
    singles = []
    for item in slices:
        if item.num_tokens == 1:
            singles.append(item)
            rows.append(np.array([row], np.int64))
        elif item.end_position >= ratio:
            yield _view_of_slice(item, row, ratio, rules.block_size)
        row += item.num_tokens
    together = decodes + DecodeRows.of(singles) if singles else decodes
    counts = (together.positions + 1) // ratio
    seeing = np.flatnonzero(counts)
    if len(seeing):
        own = together.take(seeing.tolist())
        where = np.concatenate(rows)[seeing]
        for group in in_groups(counts[seeing].tolist(), rules.max_keys):
            yield _view_of_decodes(own.take(group), where[group], ratio, rules.block_size)


def _entry_columns(num_entries: int, ratio: int, block_size: int) -> slice:
    """Blocks of a sequence that have its first `num_entries` entries."""
    step = max(1, ratio // block_size)
    end = -(-num_entries * ratio // block_size)
    return slice(step - 1, end, step)


def _view_of_decodes(rows: DecodeRows, where: Column, ratio: int, block_size: int) -> OnHost[EntryView]:
    """Pages after a sequence's last entry repeat another of its pages; their entries are not visible."""
    counts: Column = (rows.positions + 1) // ratio
    most = int(counts.max())
    pages = rows.pages[:, _entry_columns(most, ratio, block_size)]
    held = -(-counts * ratio // block_size) // max(1, ratio // block_size)
    columns = np.minimum(np.arange(pages.shape[1]), held[:, None] - 1)
    pages = np.take_along_axis(pages, columns, 1)
    column = counts[:, None]

    def make(place: Place) -> EntryView:
        return EntryView(rows=place(where), counts=place(column), most=most, pages=place(pages))

    return OnHost((where, column, pages), make)


def _view_of_slice(item: SliceLayout, row: int, ratio: int, block_size: int) -> OnHost[EntryView]:
    assert item.first_block == 0, "blocks with entries are never released"
    counts = (np.arange(item.first_position, item.end_position, dtype=np.int64)[:, None] + 1) // ratio
    most = int(counts[-1, 0])
    pages = np.array([item.pages[_entry_columns(most, ratio, block_size)]], np.int64)

    def make(place: Place) -> EntryView:
        rows = slice(row, row + item.num_tokens)
        return EntryView(rows=rows, counts=place(counts), most=most, pages=place(pages))

    return OnHost((counts, pages), make)
