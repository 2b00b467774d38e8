"""Work of attention to chosen blocks on a GPU, made on the host: whose blocks get keys, and who chooses them.

A query attends to the tokens of the blocks that it chooses, then to those after its last whole block. Keys of
its work are places among these tokens, of which the last ones count as one more block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from checkpoint.block_indexer import BlockIndexer
from stage_worker.model.attention_views import OnHost, Place
from stage_worker.model.attention_work import Int32s, QueryBlocks, page_table, split_keys
from stage_worker.model.choice_work import ChoiceGroup, HostGroups
from stage_worker.model.decode_rows import Column, DecodeRows
from stage_worker.validation import SliceLayout

SEQUENCE_FIELDS = 3


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceBlocks:
    """Whole blocks of the sequences whose queries choose, with int32 tensors.

    `sequences` is [s, SEQUENCE_FIELDS]: first page in `table`, number of whole blocks, at most `longest`, and
    the place of the first among all. `table` [p] has the pages of all sequences, one after the other. All
    together have `num_blocks` places.
    """

    sequences: Tensor
    table: Tensor
    num_blocks: int
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockChoices:
    """Blocks that get keys, and groups of queries that choose among them."""

    blocks: SequenceBlocks
    groups: tuple[ChoiceGroup, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """First pages, numbers of whole blocks, and places of the first blocks, one entry for each sequence."""

    first_pages: Column
    num_blocks: Column
    places: Column
    size: int

    @classmethod
    def of(
        cls, decodes: DecodeRows, slices: Sequence[SliceLayout], first_pages: Column, size: int
    ) -> _Sequences:
        ends = np.concatenate((decodes.positions + 1, np.array([s.end_position for s in slices], np.int64)))
        room = np.maximum(ends // size, 1)  # places differ, so that they stand for their sequences
        return cls(first_pages, ends // size, np.cumsum(room) - room, size)

    @property
    def num_places(self) -> int:
        return int(self.places[-1] + max(1, self.num_blocks[-1]))

    def split(self, queries: QueryBlocks, num_chosen: Column) -> tuple[Int32s, Int32s, int]:
        """The `SplitChoice` of queries whose `first_pages` are places of blocks."""
        number = np.searchsorted(self.places, queries.first_pages)
        num_tokens = queries.positions + 1
        last = (num_chosen * self.size + num_tokens % self.size) - 1
        own = replace(queries, first_pages=self.first_pages[number], positions=last)
        return split_keys(own, None, 1)


def block_choices(
    decodes: DecodeRows,
    rows: Column,
    slices: Sequence[SliceLayout],
    first_rows: Sequence[int],
    *,
    indexer: BlockIndexer,
    block_size: int,
) -> OnHost[BlockChoices]:
    """Choices of one-token slices in `rows` int64 [n] of the step, and of `slices` from `first_rows` on."""
    table, first_pages = page_table(decodes, slices, block_size)
    sequences = _Sequences.of(decodes, slices, first_pages, indexer.block_size)
    columns = (sequences.first_pages, sequences.num_blocks, sequences.places)
    of_blocks = np.stack(columns, 1).astype(np.int32)
    groups = HostGroups.of(
        *(decodes, rows, slices, first_rows, sequences.places),
        top_k=indexer.top_blocks,
        ratio=indexer.block_size,
        split=sequences.split,
    )

    def make(place: Place) -> BlockChoices:
        pages = place(table)
        blocks = SequenceBlocks(
            sequences=place(of_blocks),
            table=pages,
            num_blocks=sequences.num_places,
            longest=int(sequences.num_blocks.max()),
        )
        return BlockChoices(blocks, groups.on_device(place, None, pages))

    return OnHost((table, of_blocks, *groups.arrays), make)
