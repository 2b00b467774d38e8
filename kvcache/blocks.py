"""Blocks, the signals that move them, and KV events.

Everything is frozen and hashable. All hashes and ids are unsigned 64-bit integers; a `parent` is the sequence
hash of the block before, or None where there is none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block whose tokens are all known, named by its content and everything before it."""

    sequence_hash: int


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A block that is still being filled; its id is unique within an epoch and never shared."""

    id: int


Block = FullBlock | PartialBlock


@dataclass(frozen=True, slots=True)
class Use:
    """One more owner for each of `blocks`, in order; `block_hashes` are those of the full ones among them."""

    blocks: tuple[Block, ...]
    block_hashes: tuple[int, ...] = ()
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Promote:
    """`partial` has become full and is from now on known by its content."""

    partial: PartialBlock
    sequence_hash: int
    parent: int | None
    block_hash: int


@dataclass(frozen=True, slots=True)
class Deref:
    """One owner less; without owners the block stays cached until it is evicted."""

    block: Block


@dataclass(frozen=True, slots=True)
class Destroy:
    """One owner less; without owners the page is free at once and the content is forgotten."""

    block: Block


Signal = Use | Promote | Deref | Destroy


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of full blocks that has entered the pool, following the block `parent`."""

    parent: int | None
    sequence_hashes: tuple[int, ...]
    block_hashes: tuple[int, ...]
    event_id: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Full blocks that have left the pool. The router dialect fixes the name: these are sequence hashes."""

    block_hashes: tuple[int, ...]
    event_id: int


Event = Stored | Removed


_Run = tuple[int | None, list[int], list[int]]
"""Parent, sequence hashes, block hashes."""


def use_events(
    use: Use, *, entered: list[bool], evicted: list[int], new_event_id: Callable[[], int]
) -> tuple[Event, ...]:
    """First what was evicted, in order, then what entered: `entered` has one entry per block of `use`."""
    events: list[Event] = [Removed(tuple(evicted), new_event_id())] if evicted else []
    for parent, names, block_hashes in _stored_runs(use, entered):
        events.append(Stored(parent, tuple(names), tuple(block_hashes), new_event_id()))
    return tuple(events)


def _stored_runs(use: Use, entered: list[bool]) -> Iterator[_Run]:
    """The unbroken runs of full blocks that entered, each after the block that truly precedes it."""
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
