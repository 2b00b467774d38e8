"""Work list of paged attention, made on the host: which program attends from which queries to which keys.

Keys of one query are split at multiples of `KEY_SPLIT` positions, and a second kernel merges the parts in
order. So a query's result depends on its position alone, not on other sequences of the step. Slices of few
queries are split at multiples of `CHUNK_SPLIT`; longer ones have enough query blocks to fill a GPU, and one
program reads all keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from checkpoint.step_sizes import CHUNK_SPLIT, KEY_SPLIT, SHORT_CHUNK
from stage_worker.model.decode_rows import Column, DecodeRows
from stage_worker.validation import SliceLayout

UNSPLIT = 1 << 40

_TILE_ROWS = 128
"""Queries times heads of one program, for rows of up to 128 elements of 2 bytes in pages."""
MOST_HEADS = 8
"""Heads of one program with several queries."""

Int32s = NDArray[np.int32]

ITEM_FIELDS = 7
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionWork:
    """One step's attention through one window, with int32 tensors.

    `items` is [i, ITEM_FIELDS]: first row of the queries, their number (0: nothing to do), first page in
    `table`, first and last + 1 key, key of the first query, and its row of partial results (-1: the item has
    all keys of its queries, and writes their output). `table` [p] has the pages of all sequences, one
    sequence after the other; keys count from the first page of theirs. `merges` is [m, MERGE_FIELDS]: row of
    a query, first of its partial results, their number (0: nothing to do), and the distance between them.
    `num_partial` partial results have a row each. Items have at most `num_queries` queries.
    """

    items: Tensor
    table: Tensor
    merges: Tensor
    num_partial: int
    num_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRoom:
    """Sizes that a work list is padded to: entries of its parts, partial results, and queries of an item."""

    num_items: int
    num_merges: int
    num_pages: int
    num_partial: int
    num_queries: int


@dataclass(frozen=True, slots=True, eq=False)
class HostWork:
    """An `AttentionWork` before it is on the device, as one `array` int32: items, merges, table."""

    array: Int32s
    num_items: int
    num_merges: int
    num_partial: int
    num_queries: int

    @classmethod
    def of(
        cls,
        decodes: DecodeRows,
        rows: Column,
        slices: Sequence[SliceLayout] = (),
        first_rows: Sequence[int] = (),
        *,
        window: int | None,
        block_size: int,
        queries_per_item: int,
    ) -> HostWork:
        """Work of one-token slices in `rows` int64 [n] of the step, and of `slices` from `first_rows` on.

        An item of the latter has at most `queries_per_item` queries.
        """
        table, first_pages = page_table(decodes, slices, block_size)
        queries = query_blocks(decodes, rows, slices, first_rows, first_pages, queries_per_item)
        items, merges, num_partial = split_keys(queries, window, block_size)
        return cls._packed(items, merges, table, num_partial, queries_per_item if slices else 1)

    @classmethod
    def empty(cls) -> HostWork:
        """Work of a step without rows."""
        items, merges = np.zeros((0, ITEM_FIELDS), np.int32), np.zeros((0, MERGE_FIELDS), np.int32)
        return cls._packed(items, merges, np.zeros(0, np.int32), 0, 1)

    def padded(self, room: WorkRoom, padding: range) -> HostWork | None:
        """The same work, for a step with `padding` rows after its own; None if there is too little room.

        Items without keys write zeros as their output.
        """
        items_end, merges_end = self._ends
        num_pages = len(self.array) - merges_end
        firsts = np.arange(padding.start, padding.stop, room.num_queries)
        if (
            self.num_items + len(firsts) > room.num_items
            or self.num_merges > room.num_merges
            or num_pages > room.num_pages
            or self.num_partial > room.num_partial
            or self.num_queries > room.num_queries
        ):
            return None
        items, merges = np.zeros((room.num_items, ITEM_FIELDS), np.int32), room.num_merges * MERGE_FIELDS
        items[: self.num_items] = self.array[:items_end].reshape(-1, ITEM_FIELDS)
        of_padding = items[self.num_items : self.num_items + len(firsts)]
        of_padding[:, 0], of_padding[:, -1] = firsts, -1
        of_padding[:, 1] = np.minimum(room.num_queries, padding.stop - firsts)
        array = np.zeros(items.size + merges + room.num_pages, np.int32)
        array[: items.size] = items.ravel()
        array[items.size :][: merges_end - items_end] = self.array[items_end:merges_end]
        array[items.size + merges :][:num_pages] = self.array[merges_end:]
        return HostWork(array, room.num_items, room.num_merges, room.num_partial, room.num_queries)

    @classmethod
    def _packed(
        cls, items: Int32s, merges: Int32s, table: Int32s, num_partial: int, num_queries: int
    ) -> HostWork:
        array: Int32s = np.concatenate([part.ravel() for part in (items, merges, table)])
        return cls(array, len(items), len(merges), num_partial, num_queries)

    def on_device(self, array: Tensor) -> AttentionWork:
        """The work, once `array` is on the device."""
        merges, table = self._ends
        return AttentionWork(
            items=array[:merges].view(-1, ITEM_FIELDS),
            merges=array[merges:table].view(-1, MERGE_FIELDS),
            table=array[table:],
            num_partial=self.num_partial,
            num_queries=self.num_queries,
        )

    @property
    def _ends(self) -> tuple[int, int]:
        """End of the items, and of the merges, in `array`."""
        end = self.num_items * ITEM_FIELDS
        return end, end + self.num_merges * MERGE_FIELDS


def page_table(
    decodes: DecodeRows, slices: Sequence[SliceLayout], block_size: int, *, step: int = 1
) -> tuple[Int32s, Column]:
    """Pages of all sequences up to their last position, and the place of each one's first page.

    Of the blocks of a sequence, which are held from the first one on if `step` is above 1, it has each
    `step`-th.
    """
    counts = (decodes.positions // block_size + 1 - decodes.first_blocks) // step
    columns = decodes.pages[:, step - 1 :: step]
    are_held = np.arange(columns.shape[1]) < counts[:, None]
    parts = [columns[are_held], *(_pages_of(item, block_size)[step - 1 :: step] for item in slices)]
    sizes = np.array([*counts, *(len(pages) for pages in parts[1:])], np.int64)
    return np.concatenate(parts).astype(np.int32), np.cumsum(sizes) - sizes


def _pages_of(item: SliceLayout, block_size: int) -> Column:
    return np.array(item.pages[: (item.end_position - 1) // block_size + 1 - item.first_block], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlocks:
    """Blocks of consecutive queries, one per entry; `splits` are the key positions between parts.

    `first_pages` are the places of their sequences' first pages in the table.
    """

    rows: Column
    counts: Column
    first_pages: Column
    positions: Column
    first_blocks: Column
    splits: Column

    def take(self, index: Column | slice) -> QueryBlocks:
        """The blocks at `index`."""
        parts = (self.rows, self.counts, self.first_pages, self.positions, self.first_blocks, self.splits)
        return QueryBlocks(*(part[index] for part in parts))


def query_blocks(
    decodes: DecodeRows,
    rows: Column,
    slices: Sequence[SliceLayout],
    first_rows: Sequence[int],
    first_pages: Column,
    queries_per_item: int,
) -> QueryBlocks:
    """Blocks of one query of each decode, and of up to `queries_per_item` queries of `slices`."""
    num = len(decodes)
    ones = np.ones(num, np.int64)
    parts: list[tuple[Column, ...]] = [
        (rows, ones, first_pages[:num], decodes.positions, decodes.first_blocks, KEY_SPLIT * ones)
    ]
    for item, row, first_page in zip(slices, first_rows, first_pages[num:], strict=True):
        begins = np.arange(0, item.num_tokens, queries_per_item)
        size = len(begins)
        split = CHUNK_SPLIT if item.num_tokens <= SHORT_CHUNK else UNSPLIT
        counts = np.minimum(queries_per_item, item.num_tokens - begins)
        same = (np.full(size, number, np.int64) for number in (first_page, item.first_block, split))
        pages, first_blocks, splits = same
        positions = item.first_position + begins
        parts.append((row + begins, counts, pages, positions, first_blocks, splits))
    return QueryBlocks(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def split_keys(blocks: QueryBlocks, window: int | None, block_size: int) -> tuple[Int32s, Int32s, int]:
    """Items, merges, and the number of rows of partial results."""
    end = blocks.positions + blocks.counts
    begin = np.zeros_like(end) if window is None else np.maximum(0, blocks.positions - window + 1)
    first = begin // blocks.splits
    num_parts = (end - 1) // blocks.splits + 1 - first
    of_part = np.repeat(np.arange(len(end)), num_parts)
    starts = np.cumsum(num_parts) - num_parts
    number = np.arange(len(of_part)) - starts[of_part]
    splits = blocks.splits[of_part]
    low = np.maximum(begin[of_part], (first[of_part] + number) * splits)
    high = np.minimum(end[of_part], (first[of_part] + number + 1) * splits)
    is_partial = num_parts > 1
    partial_rows = np.where(is_partial, num_parts * blocks.counts, 0)
    first_partial = np.cumsum(partial_rows) - partial_rows
    base = blocks.first_blocks * block_size
    partial = np.where(is_partial[of_part], first_partial[of_part] + number * blocks.counts[of_part], -1)
    columns = [column[of_part] for column in (blocks.rows, blocks.counts, blocks.first_pages)]
    columns += [low - base[of_part], high - base[of_part], (blocks.positions - base)[of_part], partial]
    merges = _merges(blocks, num_parts, first_partial)
    return _table(columns), merges, int(partial_rows.sum())


def _table(columns: Sequence[Column]) -> Int32s:
    """int32 [entries, columns]."""
    found: Int32s = np.stack(columns, 1).astype(np.int32)
    return found


def _merges(blocks: QueryBlocks, num_parts: Column, first_partial: Column) -> Int32s:
    """One entry for each query of a block with several parts."""
    chosen = np.flatnonzero(num_parts > 1)
    counts = blocks.counts[chosen]
    of_query = np.repeat(chosen, counts)
    index = np.arange(len(of_query)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = first_partial[of_query] + index
    return _table([blocks.rows[of_query] + index, first, num_parts[of_query], blocks.counts[of_query]])


def most_parts(num_keys: int) -> int:
    """Parts of the keys of a decode, at most."""
    return -(-num_keys // KEY_SPLIT)


def most_pages(block_size: int) -> int:
    """Pages of the keys of one part, at most."""
    return -(-KEY_SPLIT // block_size) + 1


def queries_per_item(group: int, row_width: int, element_bytes: int) -> int:
    """Queries of an item, for `group` heads that share a key, and rows of `row_width` elements in pages."""
    heads = min(1 << (group - 1).bit_length(), MOST_HEADS)
    wide_elements = max(1, row_width // 128) * (element_bytes // 2) ** 2
    return max(1, _TILE_ROWS // wide_elements // heads)
