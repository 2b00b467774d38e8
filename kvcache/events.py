"""The events of a `Use`, as the router dialect tells them."""

from collections.abc import Callable, Iterator

from kvcache.blocks import Event, FullBlock, Removed, Stored, Use

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
