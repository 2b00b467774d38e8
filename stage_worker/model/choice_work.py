"""Work of sparse attention on a GPU, made on the host: which queries choose among which tokens, and attend.

Queries are in groups of bounded memory, one after the other: all one-token slices of a step, if one of them
has more than `top_k` tokens, and longer slices that end after `top_k` tokens. A query of fewer tokens chooses
them all. What attends to a choice is a work list of `attention_work`, whose keys are places in the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from checkpoint.step_sizes import CHOICE_QUERIES, CHOICE_ROWS, CHOICE_SCORES, KEY_SPLIT
from stage_worker.model.attention_views import OnHost, Place
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChoiceGroup:
    """Queries that choose together, with int32 tensors.

    They are rows `span` of the step, as (begin, end), or `queries` int64 [r]. `blocks` is [b, BLOCK_FIELDS]:
    row of the first of consecutive queries in the step, their number (0: they are not scored), first page of
    their sequence in `attention.table`, position of the first, place of its scores, and their distance.
    `rows` is [r, ROW_FIELDS]: place of a query's scores, and the number of tokens that it sees, which is at
    most `longest`. `attention` has queries counted within the group, and keys within their choices.
    """

    span: tuple[int, int]
    queries: Tensor | None
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

    def on_device(self, array: Tensor, table: Tensor, queries: Tensor | None) -> ChoiceGroup:
        """The group, once `array`, the `table` of pages and the `queries` are on the device."""
        blocks, rows, items, merges = array.split_with_sizes(self.sizes)
        return ChoiceGroup(
            span=self.span,
            queries=queries,
            blocks=blocks.view(-1, BLOCK_FIELDS),
            rows=rows.view(-1, ROW_FIELDS),
            attention=AttentionWork(
                items=items.view(-1, ITEM_FIELDS),
                merges=merges.view(-1, MERGE_FIELDS),
                table=table,
                num_partial=self.num_partial,
                num_queries=1,
            ),
            num_scores=self.num_scores,
            longest=self.longest,
        )


def choice_groups(
    decodes: DecodeRows,
    rows: Column,
    slices: Sequence[SliceLayout],
    first_rows: Sequence[int],
    *,
    top_k: int,
    block_size: int,
) -> OnHost[tuple[ChoiceGroup, ...]]:
    """Groups of one-token slices in `rows` int64 [n] of the step, and of `slices` from `first_rows` on."""
    table, first_pages = page_table(decodes, slices, block_size)
    blocks = query_blocks(decodes, rows, slices, first_rows, first_pages, CHOICE_QUERIES)
    blocks = replace(blocks, splits=np.where(np.arange(len(blocks.rows)) < len(rows), KEY_SPLIT, UNSPLIT))
    assert not blocks.first_blocks.any(), "blocks of sequences without a window are never released"
    groups = [_host_group(blocks.take(own), top_k, block_size) for own in _grouped(blocks, len(rows))]
    array = np.concatenate([table, *(group.array for group in groups)])
    sizes = [len(table), *(len(group.array) for group in groups)]
    scattered = [group.queries for group in groups if group.queries is not None]

    def make(place: Place) -> tuple[ChoiceGroup, ...]:
        pages, *parts = place(array).split_with_sizes(sizes)
        return tuple(
            group.on_device(part, pages, None if group.queries is None else place(group.queries))
            for group, part in zip(groups, parts, strict=True)
        )

    return OnHost((array, *scattered), make)


def _strides(blocks: QueryBlocks) -> Column:
    """Distances of the scores of a block's queries."""
    found: Column = -(-(blocks.positions + blocks.counts) // _ALIGNED) * _ALIGNED
    return found


def _grouped(blocks: QueryBlocks, num_decodes: int) -> Iterator[slice]:
    """Groups of blocks, of which the first `num_decodes` are one-token slices: within the limits of a group,
    rows of longer slices without gaps.
    """
    counts, rows = blocks.counts.tolist(), blocks.rows.tolist()
    sizes = (blocks.counts * _strides(blocks)).tolist()
    begin = num_rows = num_scores = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        is_next = number < num_decodes or rows[number] == rows[number - 1] + counts[number - 1]
        is_full = num_rows + count > CHOICE_ROWS or num_scores + size > CHOICE_SCORES
        if number > begin and (is_full or not is_next or number == num_decodes):
            yield slice(begin, number)
            begin, num_rows, num_scores = number, 0, 0
        num_rows, num_scores = num_rows + count, num_scores + size
    yield slice(begin, len(counts))


def _host_group(blocks: QueryBlocks, top_k: int, block_size: int) -> _HostGroup:
    counts, strides = blocks.counts, _strides(blocks)
    ends = np.cumsum(counts * strides)
    places = ends - counts * strides
    of_row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(of_row)) - (np.cumsum(counts) - counts)[of_row]
    num_keys = (blocks.positions[of_row] + index) + 1
    scored = np.where(blocks.positions + counts > top_k, counts, 0)
    columns = (blocks.rows, scored, blocks.first_pages, blocks.positions, places, strides)
    every = replace(
        blocks.take(of_row),
        rows=np.arange(len(of_row)),
        counts=np.ones_like(of_row),
        positions=np.minimum(num_keys, top_k) - 1,
    )
    items, merges, num_partial = split_keys(every, None, block_size)
    in_rows = np.stack((places[of_row] + index * strides[of_row], num_keys), 1)
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
        longest=int(num_keys.max()),
    )
