"""Work of sparse attention on a GPU, made on the host: which queries choose among which units, and attend.

Units are tokens, or entries or blocks of `ratio` tokens each: a query at position p sees the first
(p + 1) // ratio of its sequence. Queries are in groups of bounded memory, one after the other: all one-token
slices of a step, if one of them has more than `top_k` units, and longer slices that end after `top_k` units.
A query of fewer units chooses them all. What attends to a choice is a work list of `attention_work`, whose
keys are places in the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from checkpoint.step_sizes import CHOICE_QUERIES, CHOICE_ROWS, CHOICE_SCORES, KEY_SPLIT
from stage_worker.model.attention_views import HostArray, OnHost, Place
from stage_worker.model.attention_work import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    UNSPLIT,
    AttentionWork,
    Int32s,
    QueryBlocks,
    page_table,
    query_blocks,
    split_keys,
)
from stage_worker.model.decode_rows import Column, DecodeRows
from stage_worker.validation import SliceLayout

BLOCK_FIELDS = 6
ROW_FIELDS = 2
_ALIGNED = 16
"""Scores between the beginnings of two queries' scores are a multiple of it."""

SplitChoice = Callable[[QueryBlocks, Column], tuple[Int32s, Int32s, int]]
"""Items, merges and the number of partial results that attend to the choices of a group.

Arguments are a block for each query, with the row counted within the group, and the number of its choices.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChoiceGroup:
    """Queries that choose together, with int32 tensors.

    They are rows `span` of the step, as (begin, end), or `queries` int64 [r]. `table` [p] has the pages of
    units of all sequences, one sequence after the other; without it, pages are in this order themselves.
    `blocks` is [b, BLOCK_FIELDS]: row of the first of consecutive queries in the step, their number (0: they
    are not scored), first page of their sequence in `table`, position of the first in tokens, place of its
    scores, and their distance. `rows` is [r, ROW_FIELDS]: place of a query's scores, and the number of units
    that it sees, which is at most `longest`. `attention` has queries counted within the group, and keys
    within their choices; a query that sees no unit has no item.
    """

    span: tuple[int, int]
    queries: Tensor | None
    table: Tensor | None
    blocks: Tensor
    rows: Tensor
    attention: AttentionWork
    num_scores: int
    longest: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _HostGroup:
    """A `ChoiceGroup` before it is on the device, as `array` int32: blocks, rows, items, merges."""

    span: tuple[int, int]
    queries: Column | None
    array: Int32s
    sizes: tuple[int, int, int, int]
    num_partial: int
    num_scores: int
    longest: int

    def on_device(
        self, array: Tensor, table: Tensor | None, pages: Tensor, queries: Tensor | None
    ) -> ChoiceGroup:
        """The group, once `array`, its `table`, the table of `pages`, and the `queries` are on the device."""
        blocks, rows, items, merges = array.split_with_sizes(self.sizes)
        return ChoiceGroup(
            span=self.span,
            queries=queries,
            table=table,
            blocks=blocks.view(-1, BLOCK_FIELDS),
            rows=rows.view(-1, ROW_FIELDS),
            attention=AttentionWork(
                items=items.view(-1, ITEM_FIELDS),
                merges=merges.view(-1, MERGE_FIELDS),
                table=pages,
                num_partial=self.num_partial,
                num_queries=1,
            ),
            num_scores=self.num_scores,
            longest=self.longest,
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostGroups:
    """All `groups` of a step before they are on the device, as one `array` int32."""

    groups: tuple[_HostGroup, ...]
    array: Int32s

    @classmethod
    def of(
        cls,
        decodes: DecodeRows,
        rows: Column,
        slices: Sequence[SliceLayout],
        first_rows: Sequence[int],
        first_pages: Column,
        *,
        top_k: int,
        ratio: int,
        split: SplitChoice,
    ) -> HostGroups:
        """See `choice_groups`; the units of each sequence begin at one of `first_pages`."""
        blocks = query_blocks(decodes, rows, slices, first_rows, first_pages, CHOICE_QUERIES)
        splits = np.where(np.arange(len(blocks.rows)) < len(rows), KEY_SPLIT, UNSPLIT)
        blocks = replace(blocks, splits=splits)
        assert not blocks.first_blocks.any(), "blocks of sequences without a window are never released"
        spans = _grouped(blocks, len(rows), ratio)
        groups = tuple(_host_group(blocks.take(own), top_k, ratio, split) for own in spans)
        return cls(groups, np.concatenate([group.array for group in groups]))

    @property
    def arrays(self) -> tuple[HostArray, ...]:
        """What `on_device` needs on the device."""
        return self.array, *(group.queries for group in self.groups if group.queries is not None)

    def on_device(self, place: Place, table: Tensor | None, pages: Tensor) -> tuple[ChoiceGroup, ...]:
        """The groups, with a `table` of units (None: these lie in order), and the table `pages` of tokens."""
        parts = place(self.array).split_with_sizes([len(group.array) for group in self.groups])
        return tuple(
            group.on_device(part, table, pages, None if group.queries is None else place(group.queries))
            for group, part in zip(self.groups, parts, strict=True)
        )


def split_places(queries: QueryBlocks, num_chosen: Column) -> tuple[Int32s, Int32s, int]:
    """The `SplitChoice` of paged attention to a choice: keys are places in it."""
    places = replace(queries, positions=num_chosen - 1)
    return split_keys(places, None, 1)


def choice_groups(
    decodes: DecodeRows,
    rows: Column,
    slices: Sequence[SliceLayout],
    first_rows: Sequence[int],
    *,
    top_k: int,
    block_size: int,
    ratio: int = 1,
    split: SplitChoice = split_places,
) -> OnHost[tuple[ChoiceGroup, ...]]:
    """Groups of one-token slices in `rows` int64 [n] of the step, and of `slices` from `first_rows` on.

    Blocks have `block_size` tokens. Units of `ratio` tokens lie in the block of their last token, one of
    `block_size` tokens has max(1, block_size // ratio) of them; `ratio` divides `block_size`, or the other
    way round. `split` is called for each group, in order.
    """
    table, first_pages = page_table(decodes, slices, block_size, step=max(1, ratio // block_size))
    groups = HostGroups.of(
        decodes, rows, slices, first_rows, first_pages, top_k=top_k, ratio=ratio, split=split
    )

    def make(place: Place) -> tuple[ChoiceGroup, ...]:
        pages = place(table)
        return groups.on_device(place, pages, pages)

    return OnHost((table, *groups.arrays), make)


def _strides(blocks: QueryBlocks, ratio: int) -> Column:
    """Distances of the scores of a block's queries."""
    units = (blocks.positions + blocks.counts) // ratio
    found: Column = -(-units // _ALIGNED) * _ALIGNED
    return found


def _grouped(blocks: QueryBlocks, num_decodes: int, ratio: int) -> Iterator[slice]:
    """Groups of blocks, of which the first `num_decodes` are one-token slices: within the limits of a group,
    rows of longer slices without gaps.
    """
    counts, rows = blocks.counts.tolist(), blocks.rows.tolist()
    sizes = (blocks.counts * _strides(blocks, ratio)).tolist()
    begin = num_rows = num_scores = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        is_next = number < num_decodes or rows[number] == rows[number - 1] + counts[number - 1]
        is_full = num_rows + count > CHOICE_ROWS or num_scores + size > CHOICE_SCORES
        if number > begin and (is_full or not is_next or number == num_decodes):
            yield slice(begin, number)
            begin, num_rows, num_scores = number, 0, 0
        num_rows, num_scores = num_rows + count, num_scores + size
    yield slice(begin, len(counts))


def _host_group(blocks: QueryBlocks, top_k: int, ratio: int, split: SplitChoice) -> _HostGroup:
    counts, strides = blocks.counts, _strides(blocks, ratio)
    ends = np.cumsum(counts * strides)
    places = ends - counts * strides
    of_row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(of_row)) - (np.cumsum(counts) - counts)[of_row]
    positions = blocks.positions[of_row] + index
    num_units = (positions + 1) // ratio
    scored = np.where((blocks.positions + counts) // ratio > top_k, counts, 0)
    columns = (blocks.rows, scored, blocks.first_pages, blocks.positions, places, strides)
    ones, own = np.ones_like(of_row), np.arange(len(of_row))
    every = replace(blocks.take(of_row), rows=own, counts=ones, positions=positions)
    items, merges, num_partial = split(every, np.minimum(num_units, top_k))
    in_rows = np.stack((places[of_row] + index * strides[of_row], num_units), 1)
    parts = [np.stack(columns, 1), in_rows, items, merges]
    queries = blocks.rows[of_row] + index
    begin, end = int(queries[0]), int(queries[-1]) + 1
    return _HostGroup(
        span=(begin, end),
        queries=None if (np.diff(queries) == 1).all() else queries,
        array=np.concatenate([part.astype(np.int32).ravel() for part in parts]),
        sizes=(parts[0].size, parts[1].size, items.size, merges.size),
        num_partial=num_partial,
        num_scores=int(ends[-1]),
        longest=max(1, int(num_units.max())),
    )
