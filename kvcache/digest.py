"""The digest that proves two pools have lived through the same history.

Each signal is folded together with what it did: whether a block was hit, reactivated or allocated, how many
owners it has now, which blocks were evicted and in which order. Page numbers are left out, so a replica is
free to place blocks.

    digest = XXH3-64(the digest before, the kind of signal, its fields, its outcome; seed 1337)

where each of these is one or more little-endian u64 words, in the order in which this file lists them.

A signal without effect (a `Use` that failed) is not folded. The first digest is 0.
"""

import struct

from xxhash import xxh3_64_intdigest

from kvcache.blocks import Deref, Destroy, PartialBlock, Promote, Use
from kvcache.errors import InvalidSignal

_SEED = 1337

# A signal of one block has one word of outcome; a promotion, or the use of a partial block, has seven words.
_pack_1 = struct.Struct("<Q").pack
_pack_7 = struct.Struct("<7Q").pack


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

    def begin_use(self, use: Use, keys: list[int]) -> bytes:
        """`keys`: the sequence hash or id of each block; which of the two follows from the outcome words."""
        parent, hashes = use.parent, use.block_hashes
        head = (self.value, _USE, parent is not None, parent or 0, len(keys), len(hashes))
        return _pack((*head, *keys, *hashes))

    def begin_promote(self, promote: Promote) -> bytes:
        """Packs the four fields."""
        parent = promote.parent
        tail = (promote.partial.id, promote.sequence_hash, promote.block_hash)
        return _pack((self.value, _PROMOTE, parent is not None, parent or 0, *tail))

    def begin_release(self, signal: Deref | Destroy, key: int) -> bytes:
        """Packs a `Deref` or `Destroy` of the block with this sequence hash or id."""
        kind = _DEREF if isinstance(signal, Deref) else _DESTROY
        return _pack((self.value, kind, isinstance(signal.block, PartialBlock), key))

    def finish(self, words: bytes, outcome: list[int]) -> None:
        """Folds the outcome: one word for each block, then the sequence hashes that were evicted."""
        tail = _pack_1(*outcome) if len(outcome) == 1 else struct.pack(f"<{len(outcome)}Q", *outcome)
        self.value = xxh3_64_intdigest(words + tail, _SEED)


def _pack(words: tuple[int, ...]) -> bytes:
    try:
        return _pack_7(*words) if len(words) == 7 else struct.pack(f"<{len(words)}Q", *words)
    except struct.error as error:
        raise InvalidSignal(
            f"hashes and ids must be unsigned 64-bit integers, got {words}: {error}"
        ) from error
