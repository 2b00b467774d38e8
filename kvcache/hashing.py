"""Block and sequence hashes.

The functions and constants are those of NVIDIA Dynamo's KV router (XXH3-64, salt 1337), so that a router that
speaks its dialect can read our block hashes.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from struct import Struct

from xxhash import xxh3_64_intdigest

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
