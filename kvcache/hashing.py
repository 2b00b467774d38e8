"""Block and sequence hashes, block chains and stream digests.

The functions and constants are those of NVIDIA Dynamo's KV router (XXH3-64, salt 1337), so that a router that
speaks its dialect can read our block hashes.

Each signal is folded together with what it did: whether a block was hit, reactivated or allocated, how many
owners it has now, which blocks were evicted and in which order. Page numbers are left out, so a replica is
free to place blocks.

    digest = XXH3-64(the digest before, the kind of signal, its fields, its outcome; seed 1337)

where each of these is one or more little-endian u64 words, in the order in which this file lists them.

A signal without effect (a `Use` that failed) is not folded. The first digest is 0.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcache.blocks import Deref, Destroy, FullBlock, PartialBlock, Promote, Use
from kvcache.errors import InvalidSignal

DEFAULT_SALT = 1337
"""Salt of a request that names none, and the seed that chains sequence hashes, whatever the salt."""

MAX_TOKEN = 0xFFFF_FFFF
"""Token ids are hashed as unsigned 32-bit integers."""

NO_TOKENS = b""
"""The prefix digest of nothing."""

_pack_pair = Struct("<QQ").pack


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """The tokens as little-endian u32, four bytes each. Raises ValueError for a token outside 0..2**32-1."""
    try:
        packed = array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN}: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def packed_block_hash(packed_tokens: bytes, salt: int) -> int:
    """`block_hash` of tokens that are packed already."""
    return xxh3_64_intdigest(packed_tokens, salt)


def block_hash(tokens: Iterable[int], salt: int = DEFAULT_SALT) -> int:
    """Hash of one block's tokens alone, unsigned 64 bits. Raises ValueError for a token above u32."""
    return packed_block_hash(pack_tokens(tokens), salt)


def sequence_hash(parent: int | None, block_hash: int) -> int:
    """Hash of a block and all before it; `parent`: sequence hash of the block before, None for the first."""
    if parent is None:
        return block_hash
    return xxh3_64_intdigest(_pack_pair(parent, block_hash), DEFAULT_SALT)


def prefix_digest(before: bytes, packed_tokens: bytes) -> bytes:
    """Digest (SHA-256) of the tokens of a block and of all blocks before it, whose digest is `before`.

    Among blocks of one size equal digests mean equal tokens. Sequence hashes do not promise that: they are
    short, and made so that others can compute them, not so that nobody finds two prefixes with the same one.
    """
    return sha256(before + packed_tokens).digest()


def salt_of(cache_salt: str) -> int:
    """The salt of requests that carry the text `cache_salt`: they share blocks only with each other."""
    return xxh3_64_intdigest(cache_salt.encode(), 0)


Content = tuple[int | None, int, bytes, bytes]
"""What a full block's name stands for: the name before it, the salt, its tokens as little-endian u32, and the
`prefix_digest` of all tokens before them.

The name before it alone would not tell what came before: that block may have left the pool since, and its
name may have gone to other content with the same hash.
"""


class BlockChain:
    """Three parallel lists over the complete blocks: `blocks`, their `block_hashes`, and their `contents`.

    From block `private_from` on (None: nowhere) names and block hashes are fresh ids, which match nobody's
    content.
    """

    __slots__ = ("_block_size", "_new_id", "_salt", "block_hashes", "blocks", "contents", "private_from")

    def __init__(
        self, *, block_size: int, salt: int, private_from: int | None, new_id: Callable[[], int]
    ) -> None:
        self.blocks: list[FullBlock] = []
        self.block_hashes: list[int] = []
        self.contents: list[Content] = []
        self.private_from = private_from
        self._block_size = block_size
        self._salt = salt
        self._new_id = new_id

    def __len__(self) -> int:
        return len(self.blocks)

    def name_before(self, block_index: int) -> int | None:
        """Sequence hash of the block before `block_index`, None before the first."""
        return self.blocks[block_index - 1].sequence_hash if block_index else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Names the blocks that the sequence's tokens complete beyond those named already."""
        packed = pack_tokens(tokens[len(self.blocks) * self._block_size :])
        width = 4 * self._block_size
        for offset in range(0, len(packed) - width + 1, width):
            self.append(packed[offset : offset + width])

    def append(self, packed_tokens: bytes) -> None:
        """Names the next complete block, given its tokens as little-endian u32."""
        parent = self.name_before(len(self.blocks))
        if self.private_from is not None and len(self.blocks) >= self.private_from:
            name = block_hash = self._new_id()
        else:
            block_hash = packed_block_hash(packed_tokens, self._salt)
            name = sequence_hash(parent, block_hash)
        self.blocks.append(FullBlock(name))
        self.block_hashes.append(block_hash)
        self.contents.append((parent, self._salt, packed_tokens, self._digest_so_far()))

    def forget(self, first_block: int) -> None:
        """Drops the blocks from `first_block` on."""
        del self.blocks[first_block:], self.block_hashes[first_block:], self.contents[first_block:]

    def contents_of(self, first_block: int, names: list[int]) -> list[Content]:
        """Contents of the blocks from `first_block` on. Raises InvalidSignal if they have other names."""
        end = first_block + len(names)
        if names != [block.sequence_hash for block in self.blocks[first_block:end]]:
            raise InvalidSignal(
                f"blocks {first_block}..{end - 1} of the sequence are not those of the signal"
            )
        return self.contents[first_block:end]

    def make_private(self, first_block: int) -> None:
        """Renames the blocks from `first_block` on; later ones will be private as well."""
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
