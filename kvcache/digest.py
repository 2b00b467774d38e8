"""The digest that proves two pools have lived through the same history.

Each signal is folded together with what it did: whether a block was hit, reactivated or allocated, how many
owners it has now, which blocks were evicted and in which order. Page numbers are left out, so a replica is
free to place blocks.

    digest = XXH3-64(the digest before, the kind of signal, its fields, its outcome; seed 1337)

where each of these is one or more little-endian u64 words, in the order in which this file lists them.

A signal without effect (a `Use` that failed) is not folded. The first digest is 0.
"""

import sys
from array import array

from xxhash import xxh3_64_intdigest

from kvcache.blocks import Deref, Destroy, PartialBlock, Promote, Use
from kvcache.errors import InvalidSignal

_SEED = 1337


_USE, _PROMOTE, _DEREF, _DESTROY = 1, 2, 3, 4


# The outcome for one block is the word num_owners << 2 (the owners it has afterwards) with these flags. One
# owner and not entered means reactivated; more owners, a hit on an active block.
ENTERED = 2  # the block took a page, or became a full block on its own
FULL = 1


class StreamDigest:
    """Order-sensitive digest of a stream of signals; `value` is an unsigned 64-bit integer.

    Folding goes in two halves: `begin_*` packs the signal and refuses what does not fit (InvalidSignal)
    before the pool has changed; `finish` adds the outcome, which the pool has made and which always fits.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def begin_use(self, use: Use, keys: list[int]) -> "array[int]":
        """`keys`: the sequence hash or id of each block; which of the two follows from the outcome words."""
        parent, hashes = use.parent, use.block_hashes
        head = (self.value, _USE, parent is not None, parent or 0, len(keys), len(hashes))
        return _pack((*head, *keys, *hashes))

    def begin_promote(self, promote: Promote) -> "array[int]":
        """Packs the four fields."""
        parent = promote.parent
        tail = (promote.partial.id, promote.sequence_hash, promote.block_hash)
        return _pack((self.value, _PROMOTE, parent is not None, parent or 0, *tail))

    def begin_release(self, signal: Deref | Destroy, key: int) -> "array[int]":
        """Packs a `Deref` or `Destroy` of the block with this sequence hash or id."""
        kind = _DEREF if isinstance(signal, Deref) else _DESTROY
        return _pack((self.value, kind, isinstance(signal.block, PartialBlock), key))

    def finish(self, words: "array[int]", outcome: list[int]) -> None:
        """Folds the outcome: one word for each block, then the sequence hashes that were evicted."""
        words.extend(outcome)
        if sys.byteorder == "big":
            words.byteswap()
        self.value = xxh3_64_intdigest(words, _SEED)


def _pack(words: tuple[int, ...]) -> "array[int]":
    try:
        return array("Q", words)
    except (OverflowError, TypeError) as error:
        raise InvalidSignal(
            f"hashes and ids must be unsigned 64-bit integers, got {words}: {error}"
        ) from error
