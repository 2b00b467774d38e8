"""Work of compressed attention on a GPU, made on the host: which program attends from which queries to which
keys of the window and to which entries.

A query's keys in the window and its entries are one list, the keys first. Lists of decodes are split at
multiples of `KEY_SPLIT` places, those of longer slices as in `attention_work`, so that a query's result
depends neither on other sequences of the step nor on the pages. A program goes over its part of the list in
one softmax.

Keys and entries have pages of different block groups, whose layouts know nothing of each other. Work is made
in the group that keeps entries, of positions alone; it names sequences by their numbers: one-token slices
first, then longer ones. Each group has the pages of these sequences (`SequencePages`), and programs look
them up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from checkpoint.compressed import Compressor
from stage_worker.model.attention_views import OnHost, Place, ViewRules
from stage_worker.model.attention_work import (
    MERGE_FIELDS,
    Int32s,
    QueryBlocks,
    page_table,
    query_blocks,
    split_keys,
)
from stage_worker.model.choice_work import ChoiceGroup, choice_groups
from stage_worker.model.decode_rows import NO_DECODES, Column, SliceRows

JOINED_FIELDS = 10


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequencePages:
    """Pages of a step's sequences in one block group, int32: `table` [p], one sequence after the other.

    `firsts` [s, 2] has the place of each sequence's first page in the table, and the number of the first
    key or entry there.
    """

    table: Tensor
    firsts: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JoinedWork:
    """Attention to keys and entries, with int32 tensors.

    `items` is [i, JOINED_FIELDS]: first row of the queries, their number, number of their sequence, position
    of the first query, first and last + 1 key, first and last + 1 entry, the query's row in the choice (0
    without a choice), and its row of partial results (-1: none). Keys are positions. Entries are numbers, or
    places in a query's choice. `merges`, `num_partial` and `num_queries` are those of `AttentionWork`.
    `has_longer`: queries of longer slices are among them.
    """

    items: Tensor
    merges: Tensor
    num_partial: int
    num_queries: int
    has_longer: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryWork:
    """Work of a step for the layers of one compressor.

    Queries of `whole` attend to all entries that they see, those of `chosen` to the ones that `groups`
    choose: rows of the choice are those of all groups, one after the other. There may be none of either.
    """

    pages: SequencePages
    whole: JoinedWork
    chosen: JoinedWork
    groups: tuple[ChoiceGroup, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _HostJoined:
    """A `JoinedWork` before it is on the device, as one `array` int32: items, merges."""

    array: Int32s
    num_items: int
    num_partial: int
    num_queries: int
    has_longer: bool

    def on_device(self, array: Tensor) -> JoinedWork:
        """The work, once `array` is on the device."""
        end = self.num_items * JOINED_FIELDS
        return JoinedWork(
            items=array[:end].view(-1, JOINED_FIELDS),
            merges=array[end:].view(-1, MERGE_FIELDS),
            num_partial=self.num_partial,
            num_queries=self.num_queries,
            has_longer=self.has_longer,
        )


def sequence_pages(rows: SliceRows, block_size: int, *, step: int = 1) -> OnHost[SequencePages]:
    """Pages of blocks of `block_size` tokens; each `step`-th one, if only these have entries."""
    table, first_pages = page_table(rows.singles, rows.longer, block_size, step=step)
    first_blocks = [*rows.singles.first_blocks, *(item.first_block for item in rows.longer)]
    firsts = np.stack((first_pages, np.array(first_blocks, np.int64) * block_size), 1)
    array = np.concatenate((firsts.ravel(), table)).astype(np.int32)
    end = firsts.size

    def make(place: Place) -> SequencePages:
        placed = place(array)
        return SequencePages(table=placed[end:], firsts=placed[:end].view(-1, 2))

    return OnHost((array,), make)


def entry_work(rows: SliceRows, compressor: Compressor, rules: ViewRules) -> OnHost[EntryWork]:
    """Work of the step's `rows`."""
    window, size = rules.key_window, rules.block_size
    ratio, top_k = compressor.ratio, compressor.num_chosen
    pages = sequence_pages(rows, size, step=max(1, ratio // size))
    choosing, others = _by_choice(rows, ratio, top_k)
    whole = _joined(others, rules.queries_per_item, ratio, window, None)
    chosen = _joined(choosing, 1, ratio, window, top_k)
    groups = None
    if top_k is not None and len(choosing.sequences):
        own = choosing.rows
        groups = choice_groups(
            *(own.singles, own.single_rows, own.longer, own.begins),
            top_k=top_k,
            block_size=size,
            ratio=ratio,
            split=_no_attention,
        )

    def make(place: Place) -> EntryWork:
        return EntryWork(
            pages=pages.make(place),
            whole=whole.on_device(place(whole.array)),
            chosen=chosen.on_device(place(chosen.array)),
            groups=() if groups is None else groups.make(place),
        )

    arrays = (*pages.arrays, whole.array, chosen.array, *(() if groups is None else groups.arrays))
    return OnHost(arrays, make)


@dataclass(frozen=True, slots=True, eq=False)
class _Numbered:
    """Some rows of a step, and the numbers of their sequences."""

    rows: SliceRows
    sequences: Column

    def blocks(self, num_queries: int) -> QueryBlocks:
        """Blocks of up to `num_queries` queries, whose `first_pages` are the numbers of their sequences."""
        own = self.rows
        return query_blocks(own.singles, own.single_rows, own.longer, own.begins, self.sequences, num_queries)


def _by_choice(rows: SliceRows, ratio: int, top_k: int | None) -> tuple[_Numbered, _Numbered]:
    """Rows of which queries choose, and the others: one-token slices together, if one of them sees more than
    `top_k` entries, and each longer slice.
    """
    most = float("inf") if top_k is None else top_k
    num_singles = len(rows.singles)
    do_singles = num_singles > 0 and (int(rows.singles.positions.max()) + 1) // ratio > most
    do_longer = [item.end_position // ratio > most for item in rows.longer]
    found = []
    for chooses in (True, False):
        is_own = [does is chooses for does in do_longer]
        has_singles = do_singles is chooses
        numbers = np.arange(num_singles if has_singles else 0)
        own = SliceRows(
            singles=rows.singles if has_singles else NO_DECODES,
            single_rows=rows.single_rows[: len(numbers)],
            longer=list(itertools.compress(rows.longer, is_own)),
            begins=list(itertools.compress(rows.begins, is_own)),
        )
        found.append(_Numbered(own, np.concatenate((numbers, num_singles + np.flatnonzero(is_own)))))
    return found[0], found[1]


def _joined(
    queries: _Numbered, queries_per_item: int, ratio: int, window: int, top_k: int | None
) -> _HostJoined:
    """Work of `queries`, each an item of its own if they choose `top_k` entries."""
    blocks = queries.blocks(queries_per_item)
    end = blocks.positions + blocks.counts
    begin = np.maximum(0, blocks.positions - window + 1)
    num_keys, num_entries = end - begin, end // ratio
    if top_k is not None:
        num_entries = np.minimum(num_entries, top_k)
    # Splits a list that begins at 0, and keeps the number of the block.
    joined = replace(
        blocks,
        first_pages=np.arange(len(end)),
        positions=num_keys + num_entries - blocks.counts,
        first_blocks=np.zeros_like(end),
    )
    parts, merges, num_partial = split_keys(joined, None, 1)
    rows, counts, of_part, low, high, _, partial = parts.astype(np.int64).T
    keys = [begin[of_part] + np.minimum(place, num_keys[of_part]) for place in (low, high)]
    entries = [np.maximum(0, place - num_keys[of_part]) for place in (low, high)]
    sequences, positions = blocks.first_pages[of_part], blocks.positions[of_part]
    choices = np.zeros_like(of_part) if top_k is None else of_part
    items = np.stack((rows, counts, sequences, positions, *keys, *entries, choices, partial), 1)
    array = np.concatenate((items.ravel(), merges.ravel())).astype(np.int32)
    has_longer = len(queries.rows.longer) > 0
    return _HostJoined(array, len(items), num_partial, queries_per_item if has_longer else 1, has_longer)


def _no_attention(queries: QueryBlocks, num_chosen: Column) -> tuple[Int32s, Int32s, int]:
    """Groups that only choose: attention of all of them is one list."""
    return split_keys(queries.take(slice(0, 0)), None, 1)
