"""Block tables of a stage: the pages of each sequence, updated by the signals that update the pool."""

from collections.abc import Hashable
from typing import NamedTuple

from kvcache.blocks import Block, Deref, Destroy, Event, FullBlock, Grow, PartialBlock, Promote, Signal, Use
from kvcache.errors import (
    BlockNotHeld,
    BlockShared,
    IntegrityBroken,
    InvalidSignal,
    SequenceHoldsBlocks,
    UnknownSequence,
)
from kvcache.pool import BlockPool


class BlockTable:
    """Blocks and pages of one sequence from block index `first_block` on, and which were cache hits.

    `version` grows with every change of `pages` or `first_block`.
    """

    __slots__ = ("blocks", "first_block", "later_hits", "num_leading_hits", "pages", "version")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.pages: list[int] = []
        self.first_block = 0
        self.num_leading_hits = 0
        self.later_hits: set[int] = set()
        self.version = 0

    def append(self, block: Block, page: int, *, is_hit: bool) -> None:
        index = self.first_block + len(self.blocks)
        self.blocks.append(block)
        self.pages.append(page)
        self.version += 1
        if is_hit and index == self.num_leading_hits:
            self.num_leading_hits += 1
        elif is_hit:
            self.later_hits.add(index)

    def begin_at(self, first_block: int) -> None:
        """Begin an empty table after blocks outside of the window, which count as hits."""
        self.first_block = self.num_leading_hits = first_block

    def replace_last(self, block: Block, page: int) -> None:
        self.blocks[-1], self.pages[-1] = block, page
        self.version += 1

    def remove(self, position: int) -> None:
        """Remove the block at `position`, 0 or the last; an empty table starts over at block 0."""
        del self.blocks[position], self.pages[position]
        self.version += 1
        if not self.blocks:
            self.first_block = self.num_leading_hits = 0
            self.later_hits.clear()
        elif position == 0:
            self.first_block += 1
        else:
            end = self.first_block + len(self.blocks)
            self.num_leading_hits = min(self.num_leading_hits, end)
            self.later_hits.discard(end)

    def is_hit(self, block_index: int) -> bool:
        return block_index < self.num_leading_hits or block_index in self.later_hits


class Placed(NamedTuple):
    """Location of a slice, see `BlockTables`; `writable_runs` is None unless the whole slice is held."""

    pages: list[int]
    first_block: int
    valid_until: int
    writable_runs: list[tuple[int, int]] | None


class BlockTables:
    """The block pool of one stage and a page table per sequence.

    Keys identify sequences and may be any hashable. The first `Use` of a sequence creates its table, `drop`
    deletes it; in between it may become empty (preemption) and start over. A method that raises changes
    nothing. `num_wanted_blocks` counts the full blocks named by all counted `Use`s so far, `num_hit_blocks`
    those that were in the cache.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_wanted_blocks = 0
        self.num_hit_blocks = 0
        self._tables: dict[Hashable, BlockTable] = {}

    @property
    def digest(self) -> int:
        """Compared with the digest in a frame after all signals of that frame."""
        return self.pool.digest

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def apply(self, key: Hashable, signal: Signal, *, is_counted: bool = True) -> tuple[Event, ...]:
        """Apply one signal to the pool and to the table of sequence `key`; return the KV events.

        If `is_counted` is false, a `Use` leaves `num_wanted_blocks` and `num_hit_blocks` unchanged. Raises
        like `BlockPool.apply`, and UnknownSequence, BlockNotHeld (the released block is at neither end of the
        table) or BlockShared (another sequence holds the partial block).
        """
        if isinstance(signal, Use):
            return self._use(key, signal, is_counted=is_counted)
        table = self.table(key)
        if isinstance(signal, Promote):
            return self._promote(key, table, signal)
        return self._release(key, table, signal)

    def grow(self, key: Hashable, grow: Grow) -> tuple[Event, ...]:
        """Apply `grow.signals` to the pool and to the table of sequence `key`. Raises like `apply`."""
        table = self.table(key)
        full, opened = FullBlock(grow.sequence_hash), PartialBlock(grow.new_partial)
        last = table.blocks[-1] if table.blocks else None
        if not isinstance(last, PartialBlock) or last.id != grow.partial:
            raise _not_last(key, PartialBlock(grow.partial))
        if opened in self.pool:
            raise _owned(key, opened)
        events = self.pool.grow(grow)
        full_page, opened_page = self.pool.pages_of((full, opened))
        table.replace_last(full, full_page)
        table.append(opened, opened_page, is_hit=False)
        return events

    def table(self, key: Hashable) -> BlockTable:
        """Return a sequence's table, read only, the same until `drop`. Raises UnknownSequence."""
        table = self._tables.get(key)
        if table is None:
            raise UnknownSequence(f"sequence {key!r} has no block table")
        return table

    def placed(self, key: Hashable, start: int, end: int) -> Placed:
        """Return the location of tokens start..end-1; empty for a sequence without a table."""
        table = self._tables.get(key)
        if table is None:
            return Placed([], 0, 0, None)
        size = self.block_size
        is_held = table.first_block * size <= start <= end <= (table.first_block + len(table.blocks)) * size
        runs = self._writable_runs(table, start, end) if is_held else None
        return Placed(table.pages.copy(), table.first_block, table.num_leading_hits * size, runs)

    def pages(self, key: Hashable) -> list[int]:
        """Return a copy of the sequence's pages from block `first_block(key)` on. Raises UnknownSequence."""
        return self.table(key).pages.copy()

    def first_block(self, key: Hashable) -> int:
        """Absolute index of the first block held: block i is on `pages(key)[i - first_block(key)]`."""
        return self.table(key).first_block

    def valid_until(self, key: Hashable) -> int:
        """Number of leading tokens that were cache hits; their slots must not be written."""
        return self.table(key).num_leading_hits * self.block_size

    def writable_runs(self, key: Hashable, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of tokens start..end-1 whose slots must be written, as (start, end) in order.

        Blocks that were cache hits are left out, because an earlier frame or slice computes them; also hits
        after a block that was evicted. Raises UnknownSequence, and BlockNotHeld for a token outside the
        blocks held.
        """
        table = self.table(key)
        held_from = table.first_block * self.block_size
        held_to = held_from + len(table.blocks) * self.block_size
        if not held_from <= start <= end <= held_to:
            raise BlockNotHeld(
                f"sequence {key!r} holds tokens {held_from}..{held_to - 1}, not all of {start}..{end - 1}"
            )
        return self._writable_runs(table, start, end)

    def _writable_runs(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
        position = max(start, table.num_leading_hits * self.block_size)
        if not table.later_hits:
            return [(position, end)] if position < end else []
        runs: list[tuple[int, int]] = []
        while position < end:
            block_end = min(end, (position // self.block_size + 1) * self.block_size)
            if table.is_hit(position // self.block_size):
                pass
            elif runs and runs[-1][1] == position:
                runs[-1] = (runs[-1][0], block_end)
            else:
                runs.append((position, block_end))
            position = block_end
        return runs

    def drop(self, key: Hashable) -> None:
        """Delete the table of an ended sequence. Raises UnknownSequence or SequenceHoldsBlocks."""
        table = self.table(key)
        if table.blocks:
            raise SequenceHoldsBlocks(key, len(table.blocks))
        del self._tables[key]

    def check_integrity(self) -> None:
        """Check refcounts against owners and table entries against pages. Raises IntegrityBroken."""
        self.pool.check_integrity(block for table in self._tables.values() for block in table.blocks)
        for key, table in self._tables.items():
            pages = self.pool.pages_of(table.blocks)
            if pages != table.pages:
                raise IntegrityBroken(f"sequence {key!r} has pages {table.pages}, its blocks are on {pages}")

    def _use(self, key: Hashable, use: Use, *, is_counted: bool) -> tuple[Event, ...]:
        hits = [block in self.pool for block in use.blocks]
        for block, is_hit in zip(use.blocks, hits, strict=True):
            if is_hit and isinstance(block, PartialBlock):
                raise _owned(key, block)
        table = self._tables.get(key)
        if use.first_block and table is not None and table.blocks:
            raise InvalidSignal(
                f"a signal begins at block {use.first_block} of sequence {key!r}, which holds "
                f"{len(table.blocks)} blocks"
            )
        events = self.pool.apply(use)
        if table is None:
            table = self._tables[key] = BlockTable()
        if use.first_block:
            table.begin_at(use.first_block)
        for block, is_hit in zip(use.blocks, hits, strict=True):
            table.append(block, self.pool.page_of(block), is_hit=is_hit)
        if is_counted:
            self.num_wanted_blocks += len(use.block_hashes)
            self.num_hit_blocks += sum(hits)
        return events

    def _promote(self, key: Hashable, table: BlockTable, promote: Promote) -> tuple[Event, ...]:
        if not table.blocks or table.blocks[-1] != promote.partial:
            raise _not_last(key, promote.partial)
        events = self.pool.apply(promote)
        block = FullBlock(promote.sequence_hash)
        table.replace_last(block, self.pool.page_of(block))
        return events

    def _release(self, key: Hashable, table: BlockTable, signal: Deref | Destroy) -> tuple[Event, ...]:
        if not table.blocks or signal.block not in (table.blocks[0], table.blocks[-1]):
            raise BlockNotHeld(
                f"{signal}: the table of sequence {key!r} neither starts nor ends with that block"
            )
        events = self.pool.apply(signal)
        last = len(table.blocks) - 1
        table.remove(last if table.blocks[-1] == signal.block else 0)
        return events


def _not_last(key: Hashable, partial: PartialBlock) -> BlockNotHeld:
    return BlockNotHeld(f"sequence {key!r} does not end in {partial}")


def _owned(key: Hashable, partial: PartialBlock) -> BlockShared:
    return BlockShared(f"{partial} of sequence {key!r} already has an owner")
