"""Which blocks of a `Use` entered the pool together, as the `Stored` events tell it."""

from collections.abc import Iterator

from kvcache.blocks import FullBlock, Use

Run = tuple[int | None, list[int], list[int]]
"""Parent, sequence hashes, block hashes."""


def stored_runs(use: Use, entered: list[bool]) -> Iterator[Run]:
    """The unbroken runs of full blocks that entered, each after the block that truly precedes it.

    `entered` says of each of `use.blocks` whether it did.
    """
    predecessor = use.parent
    run: Run | None = None
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
