"""The stage's side: which pages each sequence lies on, kept by the same signals that move the pool."""

from collections.abc import Hashable
from typing import NamedTuple

from kvcache.blocks import Block, Deref, Destroy, Event, FullBlock, PartialBlock, Promote, Signal, Use
from kvcache.errors import BlockNotHeld, BlockShared, IntegrityBroken, SequenceHoldsBlocks, UnknownSequence
from kvcache.pool import BlockPool


class _Table:
    """Blocks and pages of one sequence, from absolute block index `first_block` on, and which were hits."""

    __slots__ = ("blocks", "first_block", "later_hits", "num_leading_hits", "pages")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.pages: list[int] = []
        self.first_block = 0
        self.num_leading_hits = 0
        self.later_hits: set[int] = set()

    def append(self, block: Block, page: int, *, is_hit: bool) -> None:
        index = self.first_block + len(self.blocks)
        self.blocks.append(block)
        self.pages.append(page)
        if is_hit and index == self.num_leading_hits:
            self.num_leading_hits += 1
        elif is_hit:
            self.later_hits.add(index)

    def remove(self, position: int) -> None:
        """`position` is 0 or the last. Empty, the table starts over: no window releases the newest block."""
        del self.blocks[position], self.pages[position]
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
    """Where a slice lies: see `BlockTables.pages`, `first_block`, `valid_until` and `writable_runs`; the last
    is None where the table does not hold all of the slice.
    """

    pages: list[int]
    first_block: int
    valid_until: int
    writable_runs: list[tuple[int, int]] | None


class BlockTables:
    """The pool of one stage and a table of pages for each sequence.

    Keys name sequences and may be any hashable. A table opens with the sequence's first `Use` and closes with
    `drop`; between the two it may become empty (preemption) and start over. An error means that nothing has
    changed. `num_wanted_blocks` counts the full blocks that all counted `Use`s so far named, `num_hit_blocks`
    those of them that were there already.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        """`num_blocks` pages of `block_size` tokens. Raises ValueError for a block size below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_wanted_blocks = 0
        self.num_hit_blocks = 0
        self._tables: dict[Hashable, _Table] = {}

    @property
    def digest(self) -> int:
        """To be compared with the digest that the frame carries, after all its signals."""
        return self.pool.digest

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def apply(self, key: Hashable, signal: Signal, *, is_counted: bool = True) -> tuple[Event, ...]:
        """Applies one signal of the sequence `key` to the pool and to the sequence's table. Without
        `is_counted`, a `Use` leaves `num_wanted_blocks` and `num_hit_blocks` as they are.

        Raises what `BlockPool.apply` raises, UnknownSequence, BlockNotHeld (for frees: the block is at
        neither end of the table) or BlockShared (a partial block that another sequence holds).
        """
        if isinstance(signal, Use):
            return self._use(key, signal, is_counted=is_counted)
        table = self._table(key)
        if isinstance(signal, Promote):
            return self._promote(key, table, signal)
        return self._release(key, table, signal)

    def placed(self, key: Hashable, start: int, end: int) -> Placed:
        """All that is known of tokens start..end-1; a sequence without a table holds nothing."""
        table = self._tables.get(key)
        if table is None:
            return Placed([], 0, 0, None)
        size = self.block_size
        is_held = table.first_block * size <= start <= end <= (table.first_block + len(table.blocks)) * size
        runs = self._writable_runs(table, start, end) if is_held else None
        return Placed(table.pages.copy(), table.first_block, table.num_leading_hits * size, runs)

    def pages(self, key: Hashable) -> list[int]:
        """A copy of the sequence's pages, in order from block `first_block(key)` on, or UnknownSequence."""
        return self._table(key).pages.copy()

    def first_block(self, key: Hashable) -> int:
        """Absolute index of the first block held: block i lies on `pages(key)[i - first_block(key)]`."""
        return self._table(key).first_block

    def valid_until(self, key: Hashable) -> int:
        """Number of leading tokens that the sequence found in the cache: their slots are not written."""
        return self._table(key).num_leading_hits * self.block_size

    def writable_runs(self, key: Hashable, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of tokens start..end-1 whose slots are to be written, as (start, end) pairs in order.

        Left out is every block that was a hit: an earlier frame, or an earlier slice of this step, computes
        it. Hits behind a block that was not cached (its beginning was evicted first) are left out too. Raises
        UnknownSequence, and BlockNotHeld if a token lies outside the blocks held.
        """
        table = self._table(key)
        held_from = table.first_block * self.block_size
        held_to = held_from + len(table.blocks) * self.block_size
        if not held_from <= start <= end <= held_to:
            raise BlockNotHeld(
                f"tokens {start}..{end - 1} of sequence {key!r}, which holds {held_from}..{held_to - 1}"
            )
        return self._writable_runs(table, start, end)

    def _writable_runs(self, table: _Table, start: int, end: int) -> list[tuple[int, int]]:
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
        """Forgets a sequence that has ended. Raises UnknownSequence, or SequenceHoldsBlocks if it does."""
        table = self._table(key)
        if table.blocks:
            raise SequenceHoldsBlocks(key, len(table.blocks))
        del self._tables[key]

    def check_integrity(self) -> None:
        """Proves that every refcount has its owners and every entry its page. Raises IntegrityBroken."""
        self.pool.check_integrity(block for table in self._tables.values() for block in table.blocks)
        for key, table in self._tables.items():
            pages = self.pool.pages_of(table.blocks)
            if pages != table.pages:
                raise IntegrityBroken(f"sequence {key!r} has pages {table.pages}, its blocks lie on {pages}")

    def _table(self, key: Hashable) -> _Table:
        table = self._tables.get(key)
        if table is None:
            raise UnknownSequence(f"no block table for sequence {key!r}")
        return table

    def _use(self, key: Hashable, use: Use, *, is_counted: bool) -> tuple[Event, ...]:
        hits = [block in self.pool for block in use.blocks]
        for block, is_hit in zip(use.blocks, hits, strict=True):
            if is_hit and isinstance(block, PartialBlock):
                raise BlockShared(f"{block} of sequence {key!r} is in use already")
        events = self.pool.apply(use)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _Table()
        for block, is_hit in zip(use.blocks, hits, strict=True):
            table.append(block, self.pool.page_of(block), is_hit=is_hit)
        if is_counted:
            self.num_wanted_blocks += len(use.block_hashes)
            self.num_hit_blocks += sum(hits)
        return events

    def _promote(self, key: Hashable, table: _Table, promote: Promote) -> tuple[Event, ...]:
        if not table.blocks or table.blocks[-1] != promote.partial:
            raise BlockNotHeld(f"sequence {key!r} does not end in {promote.partial}")
        events = self.pool.apply(promote)
        block = FullBlock(promote.sequence_hash)
        table.blocks[-1], table.pages[-1] = block, self.pool.page_of(block)
        return events

    def _release(self, key: Hashable, table: _Table, signal: Deref | Destroy) -> tuple[Event, ...]:
        if not table.blocks or signal.block not in (table.blocks[0], table.blocks[-1]):
            raise BlockNotHeld(
                f"{signal}: the table of sequence {key!r} neither starts nor ends with that block"
            )
        events = self.pool.apply(signal)
        last = len(table.blocks) - 1
        table.remove(last if table.blocks[-1] == signal.block else 0)
        return events
