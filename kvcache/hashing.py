"""Block hashes, sequence hashes, block chains and signal stream digests.

Hash functions and constants come from NVIDIA Dynamo's KV router (XXH3-64, salt 1337), so that such a
router can read the block hashes.

The stream digest covers each signal and its outcome: hit, reactivated or allocated, number of owners, and the
evicted blocks in order. Page numbers are left out, so each replica may place blocks freely.

    digest = XXH3-64(previous digest, kind of signal, its fields, its outcome; seed 1337)

Each item is one or more little-endian u64 words, in the order used in this file. Signals without effect (a
`Use` that failed) are skipped. The first digest is 0.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcache.blocks import Deref, Destroy, FullBlock, Grow, PartialBlock, Promote, Use
from kvcache.errors import InvalidSignal

DEFAULT_SALT = 1337
"""Default salt, and the seed that chains sequence hashes under every salt."""

MAX_TOKEN = 0xFFFF_FFFF
"""Token ids are hashed as unsigned 32-bit integers."""

NO_TOKENS = b""
"""Prefix digest of the empty prefix."""

_pack_pair = Struct("<QQ").pack


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack tokens as little-endian u32. Raises ValueError for a token outside 0..2**32-1."""
    try:
        packed = array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN}: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def packed_block_hash(packed_tokens: bytes, salt: int) -> int:
    """`block_hash` of packed tokens."""
    return xxh3_64_intdigest(packed_tokens, salt)


def block_hash(tokens: Iterable[int], salt: int = DEFAULT_SALT) -> int:
    """Return the 64-bit hash of one block's tokens alone. Raises ValueError for a token above u32."""
    return packed_block_hash(pack_tokens(tokens), salt)


def sequence_hash(parent: int | None, block_hash: int) -> int:
    """Hash a block and all before it; `parent` is the previous sequence hash, None for the first."""
    if parent is None:
        return block_hash
    return xxh3_64_intdigest(_pack_pair(parent, block_hash), DEFAULT_SALT)


def prefix_digest(before: bytes, packed_tokens: bytes) -> bytes:
    """SHA-256 of a block's tokens and of the digest `before` of all earlier blocks.

    For blocks of one size, equal digests mean equal tokens. Sequence hashes do not guarantee that: they are
    short and not resistant to constructed collisions.
    """
    return sha256(before + packed_tokens).digest()


def salt_of(cache_salt: str) -> int:
    """Return the salt for the text `cache_salt`; requests share blocks only under equal salts."""
    return xxh3_64_intdigest(cache_salt.encode(), 0)


Content = tuple[int | None, int, bytes, bytes]
"""Previous sequence hash, salt, tokens (little-endian u32) and `prefix_digest` of a full block's prefix.

The previous sequence hash alone does not identify the prefix: that block may have been evicted, and other
content with the same hash may have taken its place.
"""


class BlockChain:
    """Complete blocks of a sequence as parallel lists: `blocks`, `block_hashes` and `contents`.

    `salts` are the salt, and the number of first blocks that have the default salt instead. From block
    `private_from` on (None: never), names are unique private ids, which match no other content.
    """

    __slots__ = (
        "_block_size",
        "_new_id",
        "_num_public",
        "_salt",
        "block_hashes",
        "blocks",
        "contents",
        "private_from",
    )

    def __init__(
        self,
        *,
        block_size: int,
        salts: tuple[int, int],
        private_from: int | None,
        new_id: Callable[[], int],
    ) -> None:
        self.blocks: list[FullBlock] = []
        self.block_hashes: list[int] = []
        self.contents: list[Content] = []
        self.private_from = private_from
        self._block_size = block_size
        self._salt, self._num_public = salts
        self._new_id = new_id

    def __len__(self) -> int:
        return len(self.blocks)

    def name_before(self, block_index: int) -> int | None:
        return self.blocks[block_index - 1].sequence_hash if block_index else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the complete blocks of `tokens`, the sequence's tokens, that are not in the chain yet."""
        packed = pack_tokens(tokens[len(self.blocks) * self._block_size :])
        width = 4 * self._block_size
        for offset in range(0, len(packed) - width + 1, width):
            self.append(packed[offset : offset + width])

    def append(self, packed_tokens: bytes) -> None:
        """Add the next complete block, given its tokens as little-endian u32."""
        parent = self.name_before(len(self.blocks))
        salt = self._salt if len(self.blocks) >= self._num_public else DEFAULT_SALT
        if self.private_from is not None and len(self.blocks) >= self.private_from:
            name = block_hash = self._new_id()
        else:
            block_hash = packed_block_hash(packed_tokens, salt)
            name = sequence_hash(parent, block_hash)
        self.blocks.append(FullBlock(name))
        self.block_hashes.append(block_hash)
        self.contents.append((parent, salt, packed_tokens, self._digest_so_far()))

    def forget(self, first_block: int) -> None:
        del self.blocks[first_block:], self.block_hashes[first_block:], self.contents[first_block:]

    def contents_of(self, first_block: int, names: list[int]) -> list[Content]:
        """Return the contents from `first_block` on. Raises InvalidSignal if the names differ."""
        end = first_block + len(names)
        if names != [block.sequence_hash for block in self.blocks[first_block:end]]:
            raise InvalidSignal(f"blocks {first_block}..{end - 1} of the sequence do not match the signal")
        return self.contents[first_block:end]

    def make_private(self, first_block: int) -> None:
        """Rename the blocks from `first_block` on, and all later ones, to private ids."""
        packed = [content[2] for content in self.contents[first_block:]]
        self.forget(first_block)
        self.private_from = first_block
        for packed_tokens in packed:
            self.append(packed_tokens)

    def _digest_so_far(self) -> bytes:
        if not self.contents:
            return NO_TOKENS
        _, _, packed_tokens, before = self.contents[-1]
        return prefix_digest(before, packed_tokens)


_SEED = 1337


def combined_digest(digests: Sequence[int]) -> int:
    """Return one digest for the pools of all block groups; the pool's own if there is only one."""
    if len(digests) == 1:
        return digests[0]
    return xxh3_64_intdigest(_pack(tuple(digests)), _SEED)


# Common sizes: the outcome of one block has one word; `Promote` and a `Use` of one partial block have seven.
_pack_1 = struct.Struct("<Q").pack
_pack_7 = struct.Struct("<7Q").pack
# Either signal of a `Grow` has eight with its outcome.
_pack_8 = struct.Struct("<8Q").pack


_USE, _PROMOTE, _DEREF, _DESTROY = 1, 2, 3, 4


# The outcome word of a block is num_owners << 2 (its owners after the signal) with these flags. Without
# ENTERED, one owner means a reactivated block and several owners a hit on an active block.
ENTERED = 2  # the block took a page, or was promoted without a duplicate
FULL = 1

_ONE_OWNER = 1 << 2


class StreamDigest:
    """Order-sensitive digest of a stream of signals; `value` is an unsigned 64-bit integer.

    `begin_*` packs a signal and raises InvalidSignal for values out of range, before the pool changes.
    `finish` adds the pool's outcome, which is always in range.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def begin_use(self, use: Use, keys: list[int]) -> bytes:
        """`keys` are the sequence hash or id of each block; the outcome words distinguish them."""
        parent, hashes = use.parent, use.block_hashes
        head = (self.value, _USE, parent is not None, parent or 0, len(keys), len(hashes))
        return _pack((*head, *keys, *hashes))

    def begin_promote(self, promote: Promote) -> bytes:
        parent = promote.parent
        tail = (promote.partial.id, promote.sequence_hash, promote.block_hash)
        return _pack((self.value, _PROMOTE, parent is not None, parent or 0, *tail))

    def begin_release(self, signal: Deref | Destroy, key: int) -> bytes:
        kind = _DEREF if isinstance(signal, Deref) else _DESTROY
        return _pack((self.value, kind, isinstance(signal.block, PartialBlock), key))

    def begin_states(self, kind: int, fields: tuple[int, ...]) -> bytes:
        """A signal of recurrent states, see `kvcache.states`; its outcome is the snapshot that it evicts."""
        return _pack((self.value, kind, *fields))

    def add_grow(self, grow: Grow, evicted: int | None) -> None:
        """Add both signals of `grow`, whose blocks take pages of their own; the second one evicts `evicted`.

        Raises InvalidSignal for values out of range; nothing has changed then.
        """
        partial, name, parent, block_hash, opened = grow
        try:
            words = _pack_8(
                *(self.value, _PROMOTE, 1, parent, partial, name, block_hash), _ONE_OWNER | ENTERED | FULL
            )
            promoted = xxh3_64_intdigest(words, _SEED)
            words = _pack_8(promoted, _USE, 1, name, 1, 0, opened, _ONE_OWNER | ENTERED)
        except struct.error as error:
            raise _out_of_range(grow, error) from error
        self.value = xxh3_64_intdigest(words if evicted is None else words + _pack_1(evicted), _SEED)

    def finish(self, words: bytes, outcome: list[int]) -> None:
        """Add the outcome: one word per block, then the evicted sequence hashes."""
        tail = _pack_1(*outcome) if len(outcome) == 1 else struct.pack(f"<{len(outcome)}Q", *outcome)
        self.value = xxh3_64_intdigest(words + tail, _SEED)


def _pack(words: tuple[int, ...]) -> bytes:
    try:
        return _pack_7(*words) if len(words) == 7 else struct.pack(f"<{len(words)}Q", *words)
    except struct.error as error:
        raise _out_of_range(words, error) from error


def _out_of_range(words: tuple[int, ...], error: struct.error) -> InvalidSignal:
    return InvalidSignal(f"hashes and ids must be unsigned 64-bit integers, got {words}: {error}")
