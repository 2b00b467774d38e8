"""The proofs behind `check_integrity`.

They run while a cluster serves, so they use what is fast in Python: comprehensions, sets and dicts of ints.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvcache.blocks import Block, FullBlock, PartialBlock
from kvcache.errors import IntegrityBroken


def check_pages(
    num_blocks: int, *, free: Sequence[int], active: Sequence[int], inactive: Sequence[int]
) -> None:
    """Raises IntegrityBroken unless every page 0..num_blocks-1 is in exactly one of the three."""
    pages = {*free, *active, *inactive}
    count = len(free) + len(active) + len(inactive)
    is_range = not pages or (min(pages), max(pages)) == (0, num_blocks - 1)
    if not (count == len(pages) == num_blocks and is_range):
        raise IntegrityBroken(
            f"{len(free)} free + {len(active)} active + {len(inactive)} inactive pages do not make up "
            f"0..{num_blocks - 1}, each once"
        )


def check_owners(full: Mapping[int, int], partial: Mapping[int, int], owned: Iterable[Block] | None) -> None:
    """Raises IntegrityBroken unless each refcount is the number of times that `owned` names the block.

    `full` are refcounts by sequence hash, `partial` by id. With None for `owned`, refcounts need only be
    positive.
    """
    if min(full.values(), default=1) < 1 or min(partial.values(), default=1) < 1:
        raise IntegrityBroken("an active block has no owner")
    if owned is None:
        return
    blocks = list(owned)
    full_owners = Counter([block.sequence_hash for block in blocks if isinstance(block, FullBlock)])
    partial_owners = Counter([block.id for block in blocks if isinstance(block, PartialBlock)])
    wrong: list[tuple[Block, int, int]] = [
        (FullBlock(key), full.get(key, 0), full_owners[key]) for key in _differing(full, full_owners)
    ]
    wrong += [
        (PartialBlock(key), partial.get(key, 0), partial_owners[key])
        for key in _differing(partial, partial_owners)
    ]
    if wrong:
        block, refcount, num_owners = min(wrong, key=repr)
        raise IntegrityBroken(
            f"{len(wrong)} blocks have a refcount unlike their owners, such as {block}: "
            f"refcount {refcount}, {num_owners} owners"
        )


def _differing(refcounts: Mapping[int, int], owners: Mapping[int, int]) -> list[int]:
    if refcounts == dict(owners):
        return []
    return [key for key in refcounts.keys() | owners.keys() if refcounts.get(key, 0) != owners.get(key, 0)]
