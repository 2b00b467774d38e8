"""Blocks, the signals that change their owners, and KV events.

Objects are hashable and never modified after construction. The classes are not declared frozen, because
constructing a frozen dataclass takes twice as long. Hashes and ids are unsigned 64-bit integers; `parent` is
the sequence hash of the previous block, None for the first block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, unsafe_hash=True)
class FullBlock:
    """A complete block, identified by its content and all content before it."""

    sequence_hash: int


@dataclass(slots=True, unsafe_hash=True)
class PartialBlock:
    """An incomplete block; its id is unique within an epoch and never shared."""

    id: int


Block = FullBlock | PartialBlock


@dataclass(slots=True, unsafe_hash=True)
class Use:
    """Adds one owner to each of `blocks`, in order; `block_hashes` belong to the full blocks among them.

    `first_block` is the index of the first of `blocks` for a sequence that begins after blocks outside of its
    window, else 0. It matters to block tables only.
    """

    blocks: tuple[Block, ...]
    block_hashes: tuple[int, ...] = ()
    parent: int | None = None
    first_block: int = 0


@dataclass(slots=True, unsafe_hash=True)
class Promote:
    """`partial` became full and is identified by its content from now on."""

    partial: PartialBlock
    sequence_hash: int
    parent: int | None
    block_hash: int


@dataclass(slots=True, unsafe_hash=True)
class Deref:
    """Removes one owner; a block without owners stays cached until eviction."""

    block: Block


@dataclass(slots=True, unsafe_hash=True)
class Destroy:
    """Removes one owner; without owners the page is freed and its content dropped at once."""

    block: Block


Signal = Use | Promote | Deref | Destroy


class Grow(NamedTuple):
    """A sequence completed a block that has a `parent`, and opened the next one; equals `signals`.

    `partial` and `new_partial` are ids of partial blocks.
    """

    partial: int
    sequence_hash: int
    parent: int
    block_hash: int
    new_partial: int

    @property
    def signals(self) -> tuple[Promote, Use]:
        """Signals with the same effect, digest and events, to be applied in this order."""
        promote = Promote(PartialBlock(self.partial), self.sequence_hash, self.parent, self.block_hash)
        return promote, Use((PartialBlock(self.new_partial),), (), self.sequence_hash)


@dataclass(slots=True, unsafe_hash=True)
class Stored:
    """Consecutive full blocks that entered the pool after the block `parent`."""

    parent: int | None
    sequence_hashes: tuple[int, ...]
    block_hashes: tuple[int, ...]
    event_id: int


@dataclass(slots=True, unsafe_hash=True)
class Removed:
    """Full blocks that left the pool, by sequence hash; the router dialect fixes the field's name."""

    block_hashes: tuple[int, ...]
    event_id: int


Event = Stored | Removed


_Run = tuple[int | None, list[int], list[int]]
"""Parent, sequence hashes, block hashes."""


def use_events(
    use: Use, *, entered: list[bool], evicted: list[int], new_event_id: Callable[[], int]
) -> tuple[Event, ...]:
    """Return an event for the evicted blocks, then events for the blocks that entered.

    `entered` has one entry per block of `use`.
    """
    events: list[Event] = [Removed(tuple(evicted), new_event_id())] if evicted else []
    for parent, names, block_hashes in _stored_runs(use, entered):
        events.append(Stored(parent, tuple(names), tuple(block_hashes), new_event_id()))
    return tuple(events)


def _stored_runs(use: Use, entered: list[bool]) -> Iterator[_Run]:
    """Yield each unbroken run of full blocks that entered, with its actual predecessor."""
    predecessor = use.parent
    run: _Run | None = None
    block_hashes = iter(use.block_hashes)
    for block, is_new in zip(use.blocks, entered, strict=True):
        if not isinstance(block, FullBlock):
            continue
        block_hash = next(block_hashes)
        if is_new:
            run = run or (predecessor, [], [])
            run[1].append(block.sequence_hash)
            run[2].append(block_hash)
        elif run:
            yield run
            run = None
        predecessor = block.sequence_hash
    if run:
        yield run
