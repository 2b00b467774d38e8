"""The proofs behind `check_integrity`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvcache.blocks import Block
from kvcache.errors import IntegrityBroken


def check_pages(
    num_blocks: int, *, free: Sequence[int], active: Sequence[int], inactive: Sequence[int]
) -> None:
    """Raises IntegrityBroken unless every page 0..num_blocks-1 is in exactly one of the three."""
    if sorted((*free, *active, *inactive)) != list(range(num_blocks)):
        raise IntegrityBroken(
            f"{len(free)} free + {len(active)} active + {len(inactive)} inactive pages do not make up "
            f"0..{num_blocks - 1}, each once"
        )


def check_owners(refcounts: Mapping[Block, int], owned: Iterable[Block] | None) -> None:
    """Raises IntegrityBroken unless each refcount is the number of times that `owned` names the block.

    With None for `owned`, refcounts need only be positive.
    """
    if any(count < 1 for count in refcounts.values()):
        raise IntegrityBroken("an active block has no owner")
    if owned is None:
        return
    owners = Counter(owned)
    wrong = [block for block in owners.keys() | refcounts.keys() if owners[block] != refcounts.get(block, 0)]
    if wrong:
        block = min(wrong, key=repr)
        raise IntegrityBroken(
            f"{len(wrong)} blocks have a refcount unlike their owners, such as {block}: "
            f"refcount {refcounts.get(block, 0)}, {owners[block]} owners"
        )
