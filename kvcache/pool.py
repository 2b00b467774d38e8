"""The block pool: which blocks exist, their owners, and the page of each block."""

from collections import OrderedDict
from collections.abc import Iterable, Set
from typing import assert_never

from kvcache.blocks import (
    Block,
    Deref,
    Destroy,
    Event,
    FullBlock,
    Grow,
    PartialBlock,
    Promote,
    Removed,
    Signal,
    Stored,
    Use,
    use_events,
)
from kvcache.errors import BlockNotActive, BlockShared, IntegrityBroken, InvalidSignal, OutOfBlocks
from kvcache.hashing import ENTERED, FULL, StreamDigest
from kvcache.integrity import check_owners, check_pages
from kvcache.sequence import ActiveSequence


class _Page:
    """A physical page: its number, and the number of sequences that own its block."""

    __slots__ = ("num_owners", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_owners = 0


class BlockPool:
    """`num_blocks` pages and the blocks on them.

    A block is *active* (has owners), *inactive* (cached without owners, in order of last use) or absent.
    Pools that apply the same signals in the same order stay equal, pages included; `digest` proves it. An
    `apply` that raises has changed nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, got {num_blocks}")
        self.num_blocks = num_blocks
        # Freed pages are reused first, the most recently freed one (likely still in a processor's cache)
        # before others; unused pages follow in the order 0, 1, 2, ...
        self._freed: list[_Page] = []
        self._num_made = 0
        self._full: dict[int, _Page] = {}
        self._partial: dict[int, _Page] = {}
        self._inactive: OrderedDict[int, _Page] = OrderedDict()
        self._digest = StreamDigest()
        self._num_events = 0

    @property
    def num_active(self) -> int:
        """Blocks with at least one owner."""
        return len(self._full) + len(self._partial)

    @property
    def num_inactive(self) -> int:
        """Cached blocks without an owner; all can be evicted."""
        return len(self._inactive)

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_blocks - self._num_made

    @property
    def num_full(self) -> int:
        """Full blocks, active and inactive."""
        return len(self._full) + len(self._inactive)

    @property
    def inactive(self) -> tuple[int, ...]:
        """Sequence hashes of the inactive blocks, least recently used first."""
        return tuple(self._inactive)

    @property
    def digest(self) -> int:
        """64-bit digest of all signals applied so far and their outcomes (see `kvcache.hashing`)."""
        return self._digest.value

    def __contains__(self, block: Block) -> bool:
        return self._find(block) is not None

    def refcount(self, block: Block) -> int:
        """Number of owners; 0 for an inactive or absent block."""
        page = self._find(block)
        return 0 if page is None else page.num_owners

    def page_of(self, block: Block) -> int:
        """Return the page, 0..num_blocks-1, of a present block. Raises BlockNotActive if it is absent."""
        page = self._find(block)
        if page is None:
            raise BlockNotActive(f"{block} is not in the pool")
        return page.number

    def pages_of(self, blocks: Iterable[Block]) -> list[int]:
        """Return the pages of active blocks, -1 for a block that is not active."""
        full, partial = self._full, self._partial
        pages = [
            full.get(block.sequence_hash) if isinstance(block, FullBlock) else partial.get(block.id)
            for block in blocks
        ]
        return [-1 if page is None else page.number for page in pages]

    def num_cached_blocks(self, sequence: ActiveSequence) -> int:
        """Return how many leading full blocks of the sequence are in the pool, active or inactive."""
        count = 0
        for block in sequence.blocks:
            if not isinstance(block, FullBlock) or block not in self:
                break
            count += 1
        return count

    def apply(self, signal: Signal) -> tuple[Event, ...]:
        """Apply a signal and return the events that it caused.

        Raises OutOfBlocks (Use), BlockNotActive (the other three), BlockShared (Promote) or InvalidSignal.
        """
        match signal:
            case Use():
                return self._use(signal)
            case Promote():
                return self._promote(signal)
            case Deref():
                return self._deref(signal)
            case Destroy():
                return self._destroy(signal)
        assert_never(signal)

    def check_room(self, use: Use) -> None:
        """Check that `apply(use)` would find its blocks. Raises OutOfBlocks or InvalidSignal."""
        self._admit(use)

    def grow(self, grow: Grow) -> tuple[Event, ...]:
        """Apply `grow.signals`, and return their events. Raises like them; nothing has changed then."""
        partial, name, parent, block_hash, opened = grow
        page = self._partial.get(partial)
        oldest = None if self.num_free else next(iter(self._inactive), None)
        if (
            page is None
            or page.num_owners != 1
            or name in self._full
            or name in self._inactive
            or opened in self._partial
            or (oldest is None and not self.num_free)
        ):
            return self._grow_in_two(grow)
        self._digest.add_grow(grow, oldest)
        del self._partial[partial]
        self._full[name] = page
        evicted: list[int] = []
        new_page = self._partial[opened] = self._take_page(evicted)
        new_page.num_owners = 1
        stored = Stored(parent, (name,), (block_hash,), self._new_event_id())
        return (stored, Removed(tuple(evicted), self._new_event_id())) if evicted else (stored,)

    def _grow_in_two(self, grow: Grow) -> tuple[Event, ...]:
        """`grow` with a merged block or an error."""
        promote, use = grow.signals
        self._check_promote(promote)
        self._digest.begin_promote(promote)
        self._digest.begin_use(use, [grow.new_partial])
        is_merged = FullBlock(grow.sequence_hash) in self
        is_open = grow.new_partial != grow.partial and grow.new_partial in self._partial
        if not (is_merged or is_open or self.num_free or self._inactive):
            raise OutOfBlocks(1, 0)
        return self._promote(promote) + self._use(use)

    def check_integrity(self, owned: Iterable[Block] | None = None) -> None:
        """Check that every page is in exactly one state and that refcounts match owners.

        `owned` has every block once per owner; None checks only that refcounts are positive. Raises
        IntegrityBroken.
        """
        check_pages(
            self.num_blocks,
            unused=self.num_blocks - self._num_made,
            freed=[page.number for page in self._freed],
            active=[page.number for pages in (self._full, self._partial) for page in pages.values()],
            inactive=[page.number for page in self._inactive.values()],
        )
        if both := self._full.keys() & self._inactive.keys():
            raise IntegrityBroken(f"{len(both)} blocks are both active and inactive")
        if any(page.num_owners for pages in (self._freed, self._inactive.values()) for page in pages):
            raise IntegrityBroken("a free or inactive page has owners")
        check_owners(
            {key: page.num_owners for key, page in self._full.items()},
            {key: page.num_owners for key, page in self._partial.items()},
            owned,
        )

    def has_full_blocks(self, names: Set[int]) -> bool:
        """Whether `names` are exactly the sequence hashes of all full blocks, active and inactive."""
        full, inactive = self._full.keys(), self._inactive.keys()
        return len(names) == len(full) + len(inactive) and full <= names and inactive <= names

    def _find(self, block: Block) -> _Page | None:
        if isinstance(block, FullBlock):
            return self._full.get(block.sequence_hash) or self._inactive.get(block.sequence_hash)
        return self._partial.get(block.id)

    def _use_partial(self, use: Use, partial: PartialBlock) -> tuple[Event, ...]:
        """Fast path of `_use` for the one partial block that a decoding sequence opens."""
        words = self._digest.begin_use(use, [partial.id])
        evicted: list[int] = []
        page = self._partial.get(partial.id)
        entered = 0
        if page is None:
            if not self.num_free and not self._inactive:
                raise OutOfBlocks(1, 0)
            page, entered = self._take_page(evicted), ENTERED
            self._partial[partial.id] = page
        page.num_owners += 1
        self._digest.finish(words, [page.num_owners << 2 | entered, *evicted])
        return (Removed(tuple(evicted), self._new_event_id()),) if evicted else ()

    def _use(self, use: Use) -> tuple[Event, ...]:
        if len(use.blocks) == 1 and not use.block_hashes and isinstance(use.blocks[0], PartialBlock):
            return self._use_partial(use, use.blocks[0])
        keys = [block.sequence_hash if isinstance(block, FullBlock) else block.id for block in use.blocks]
        words = self._digest.begin_use(use, keys)
        revived = self._admit(use)
        # Revive these first: otherwise an earlier block of the signal could evict them.
        for key in revived:
            self._full[key] = self._inactive.pop(key)
        outcome: list[int] = []
        evicted: list[int] = []
        for block, key in zip(use.blocks, keys, strict=True):
            is_full = isinstance(block, FullBlock)
            active = self._full if is_full else self._partial
            page = active.get(key)
            entered = 0
            if page is None:
                page, entered = self._take_page(evicted), ENTERED
                active[key] = page
            page.num_owners += 1
            outcome.append(page.num_owners << 2 | entered | (FULL if is_full else 0))
        self._digest.finish(words, outcome + evicted)
        if not use.block_hashes and not evicted:
            return ()
        entries = [word & ENTERED != 0 for word in outcome]
        return use_events(use, entered=entries, evicted=evicted, new_event_id=self._new_event_id)

    def _new_event_id(self) -> int:
        # No itertools.count: it can be copied up to Python 3.13 only, with a warning since 3.12.
        event_id = self._num_events
        self._num_events += 1
        return event_id

    def _admit(self, use: Use) -> set[int]:
        """Return the inactive blocks that the signal names. Raises OutOfBlocks or InvalidSignal."""
        full = [block.sequence_hash for block in use.blocks if isinstance(block, FullBlock)]
        if len(full) != len(use.block_hashes):
            raise InvalidSignal(f"signal has {len(use.block_hashes)} block hashes, {len(full)} full blocks")
        revived = {key for key in full if key in self._inactive} if full else set()
        if len(use.blocks) > self.num_free:
            needed = len({block for block in use.blocks if block not in self})
            available = self.num_free + len(self._inactive) - len(revived)
            if needed > available:
                raise OutOfBlocks(needed, available)
        return revived

    def _take_page(self, evicted: list[int]) -> _Page:
        if self._freed:
            return self._freed.pop()
        if self._num_made < self.num_blocks:
            self._num_made += 1
            return _Page(self._num_made - 1)
        sequence_hash, page = self._inactive.popitem(last=False)
        evicted.append(sequence_hash)
        return page

    def _promote(self, promote: Promote) -> tuple[Event, ...]:
        page = self._check_promote(promote)
        words = self._digest.begin_promote(promote)
        key = promote.sequence_hash
        twin = self._full.get(key) or self._inactive.pop(key, None)
        del self._partial[promote.partial.id]
        if twin is not None:
            page.num_owners = 0
            self._freed.append(page)
            self._full[key] = twin
            twin.num_owners += 1
            self._digest.finish(words, [twin.num_owners << 2 | FULL])
            return ()
        self._full[key] = page
        self._digest.finish(words, [page.num_owners << 2 | ENTERED | FULL])
        return (Stored(promote.parent, (key,), (promote.block_hash,), self._new_event_id()),)

    def _check_promote(self, promote: Promote) -> _Page:
        page = self._partial.get(promote.partial.id)
        if page is None:
            raise BlockNotActive(f"{promote}: the block has no owner")
        if page.num_owners != 1:
            raise BlockShared(f"{promote}: the block has {page.num_owners} owners, expected 1")
        return page

    def _deref(self, deref: Deref) -> tuple[Event, ...]:
        block = deref.block
        if isinstance(block, PartialBlock):
            raise InvalidSignal(f"{deref}: a partial block cannot be cached, only destroyed")
        key = block.sequence_hash
        page = self._full.get(key)
        if page is None:
            raise BlockNotActive(f"{deref}: the block has no owner")
        words = self._digest.begin_release(deref, key)
        page.num_owners -= 1
        if page.num_owners == 0:
            self._inactive[key] = self._full.pop(key)
        self._digest.finish(words, [page.num_owners])
        return ()

    def _destroy(self, destroy: Destroy) -> tuple[Event, ...]:
        block = destroy.block
        if isinstance(block, FullBlock):
            active, key = self._full, block.sequence_hash
        else:
            active, key = self._partial, block.id
        page = active.get(key)
        if page is None:
            raise BlockNotActive(f"{destroy}: the block has no owner")
        words = self._digest.begin_release(destroy, key)
        page.num_owners -= 1
        self._digest.finish(words, [page.num_owners])
        if page.num_owners:
            return ()
        self._freed.append(active.pop(key))
        return (Removed((key,), self._new_event_id()),) if isinstance(block, FullBlock) else ()
