"""Pages and positions of one-token slices as arrays, so that a decode step builds no object per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache import BlockTable
from stage_worker.validation import SliceLayout

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """One-token slices at absolute `positions` int64 [n].

    The first `num_pages` int64 [n] entries of each row of `pages` int64 [n, p] are the pages of the
    consecutive blocks from `first_blocks` int64 [n] on.
    """

    positions: Column
    pages: Column
    first_blocks: Column
    num_pages: Column

    @classmethod
    def of(cls, slices: Sequence[SliceLayout]) -> DecodeRows:
        num_pages = [len(item.pages) for item in slices]
        pages = np.zeros((len(slices), max(num_pages, default=0)), np.int64)
        for row, item in zip(pages, slices, strict=True):
            row[: len(item.pages)] = item.pages
        positions, first_blocks = [
            np.array([getattr(item, name) for item in slices], np.int64)
            for name in ("first_position", "first_block")
        ]
        return cls(positions, pages, first_blocks, np.array(num_pages, np.int64))

    def __len__(self) -> int:
        return len(self.positions)

    def __add__(self, other: DecodeRows) -> DecodeRows:
        width = max(self.pages.shape[1], other.pages.shape[1])
        padded = [np.pad(rows.pages, ((0, 0), (0, width - rows.pages.shape[1]))) for rows in (self, other)]
        return DecodeRows(
            np.concatenate((self.positions, other.positions)),
            np.concatenate(padded),
            np.concatenate((self.first_blocks, other.first_blocks)),
            np.concatenate((self.num_pages, other.num_pages)),
        )

    def take(self, rows: Sequence[int]) -> DecodeRows:
        index = np.array(rows, np.int64)
        return DecodeRows(*(part[index] for part in self._parts))

    def check(self, block_size: int, window: int | None) -> None:
        """Raises ValueError if the pages of a row lack positions that it needs, see `SliceLayout.check`."""
        begin, end = self.visible_blocks(block_size, window)
        for row in np.flatnonzero((end > self.num_pages) | (begin < 0)):
            self._layout(int(row)).check(block_size, window)

    def first_visible(self, window: int | None) -> Column:
        """Earliest visible positions [n], see `SliceLayout.first_visible`."""
        if window is None:
            return np.zeros_like(self.positions)
        return np.maximum(0, self.positions - window + 1)

    def visible_blocks(self, block_size: int, window: int | None) -> tuple[Column, Column]:
        """Begin and end [n] of the visible blocks, as columns of `pages`."""
        begin = self.first_visible(window) // block_size - self.first_blocks
        return begin, self.positions // block_size + 1 - self.first_blocks

    def slots(self, block_size: int) -> Column:
        """Slots [n] of the positions: page * block_size + offset."""
        blocks, offsets = np.divmod(self.positions, block_size)
        pages: Column = self.pages[np.arange(len(self)), blocks - self.first_blocks]
        return pages * block_size + offsets

    @property
    def _parts(self) -> tuple[Column, Column, Column, Column]:
        return self.positions, self.pages, self.first_blocks, self.num_pages

    def _layout(self, row: int) -> SliceLayout:
        position, pages, first_block, num_pages = (part[row] for part in self._parts)
        return SliceLayout(
            first_position=int(position),
            num_tokens=1,
            pages=pages[:num_pages].tolist(),
            first_block=int(first_block),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SliceRows:
    """Slices of a step by their lengths.

    One-token slices `singles` are in rows `single_rows` int64 [n], `longer` ones from `begins` on.
    """

    singles: DecodeRows
    single_rows: Column
    longer: Sequence[SliceLayout]
    begins: Sequence[int]

    @classmethod
    def of(cls, decodes: DecodeRows, slices: Sequence[SliceLayout]) -> SliceRows:
        """Rows of `decodes`, and of the `slices` after them."""
        singles, longer = [], []
        single_rows, begins = list(range(len(decodes))), []
        row = len(decodes)
        for item in slices:
            if item.num_tokens == 1:
                singles.append(item)
                single_rows.append(row)
            else:
                longer.append(item)
                begins.append(row)
            row += item.num_tokens
        return cls(
            singles=decodes + DecodeRows.of(singles) if singles else decodes,
            single_rows=np.array(single_rows, np.int64),
            longer=longer,
            begins=begins,
        )


class PageMatrix:
    """Pages of sequences that decode together; a row is copied when its block table has changed."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self._tables = tables
        self._versions = [-1] * len(tables)
        self._pages = np.zeros((len(tables), 1), np.int64)
        self._first_blocks = np.zeros(len(tables), np.int64)
        self._num_pages = np.zeros(len(tables), np.int64)

    def rows(self, positions: Sequence[int]) -> DecodeRows:
        """Rows at `positions`, with the pages of now; valid until the next call."""
        versions = [table.version for table in self._tables]
        if versions != self._versions:
            for row, table in enumerate(self._tables):
                if versions[row] != self._versions[row]:
                    self._copy(row, table)
            self._versions = versions
        return DecodeRows(np.array(positions, np.int64), self._pages, self._first_blocks, self._num_pages)

    def _copy(self, row: int, table: BlockTable) -> None:
        num_pages = len(table.pages)
        missing = num_pages - self._pages.shape[1]
        if missing > 0:
            # Room for more, so that growing sequences seldom copy the matrix.
            self._pages = np.pad(self._pages, ((0, 0), (0, missing + num_pages // 2)))
        self._pages[row, :num_pages] = table.pages
        self._first_blocks[row], self._num_pages[row] = table.first_block, num_pages


NO_DECODES = DecodeRows.of(())
