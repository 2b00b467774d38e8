"""The names of a sequence's complete blocks: each follows from its tokens and the name before it."""

from collections.abc import Callable, Sequence

from kvcache.blocks import FullBlock
from kvcache.errors import InvalidSignal
from kvcache.hashing import NO_TOKENS, pack_tokens, packed_block_hash, prefix_digest, sequence_hash

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
