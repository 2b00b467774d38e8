"""The coordinator's side: a pool without storage that also knows what each block holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvcache.blocks import Block, Event, FullBlock, Promote, Removed, Signal, Stored, Use
from kvcache.chain import Content
from kvcache.errors import HashCollision, IntegrityBroken
from kvcache.hashing import packed_block_hash, sequence_hash
from kvcache.pool import BlockPool
from kvcache.sequence import ActiveSequence


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block that is in the cache, as `Stored` told of it."""

    sequence_hash: int
    block_hash: int
    parent: int | None


class Ledger:
    """The block accounting that decides admission, prefix hits and eviction.

    Beside its pool it keeps the content of every full block that is present (four bytes per token, and what
    tells all tokens before it), so that two contents with one hash are noticed before anything is shared,
    also when the blocks before have left the pool. `prepare` and `push` are the sequence's own, with such a
    block and all after it renamed to private ids; `apply` refuses a collision that is left.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        """`block_size` is that of every sequence that comes along."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._contents: dict[int, Content] = {}

    @property
    def digest(self) -> int:
        """The digest after everything applied so far: what a frame carries."""
        return self.pool.digest

    def num_cached_tokens(self, sequence: ActiveSequence) -> int:
        """Leading tokens that need no computation; never the last one, whose logits are wanted."""
        return max(0, min(self.pool.num_cached_blocks(sequence) * self.block_size, len(sequence) - 1))

    def prepare(self, sequence: ActiveSequence, num_tokens: int) -> Use | None:
        """`sequence.prepare(num_tokens)`, free of collisions."""
        while (use := sequence.prepare(num_tokens)) is not None:
            collision = self.collision(sequence, use)
            if collision is None:
                return use
            sequence.make_private(collision.block_index)
        return None

    def push(self, sequence: ActiveSequence, token: int) -> list[Signal]:
        """`sequence.push(token)`, free of collisions."""
        signals = sequence.push(token)
        return self.settle(sequence, signals) if signals else signals

    def settle(self, sequence: ActiveSequence, signals: list[Signal]) -> list[Signal]:
        """The signals of the sequence's last push, free of collisions."""
        while signals and isinstance(promote := signals[0], Promote):
            if promote.sequence_hash not in self._contents:
                break
            collision = self.collision(sequence, promote)
            if collision is None:
                break
            sequence.make_private(collision.block_index)
            signals = _renamed(promote, signals[1], sequence.blocks[collision.block_index])
        return signals

    def collision(self, sequence: ActiveSequence, signal: Use | Promote) -> HashCollision | None:
        """The first block of the sequence's next signal whose hash is known with other content, if any."""
        try:
            self._new_contents(sequence, signal)
        except HashCollision as collision:
            return collision
        return None

    def apply(self, sequence: ActiveSequence, signal: Signal) -> tuple[Event, ...]:
        """Applies one signal of the sequence to the pool; a `Use` before the sequence commits it.

        Raises what `BlockPool.apply` raises, HashCollision, or InvalidSignal for a signal that is not the
        sequence's next; then nothing has changed.
        """
        entering: dict[int, Content] = {}
        if isinstance(signal, Promote) and signal.sequence_hash not in self._contents:
            entering[signal.sequence_hash] = sequence.newest_content(signal)
        elif isinstance(signal, Promote) or (isinstance(signal, Use) and signal.block_hashes):
            entering = self._new_contents(sequence, signal)
        events = self.pool.apply(signal)
        for event in events:
            if isinstance(event, Removed):
                for name in event.block_hashes:
                    del self._contents[name]
            else:
                self._keep(event, entering)
        return events

    def cached_blocks(self) -> Iterator[CachedBlock]:
        """All full blocks, active and inactive. Hashes each one's tokens again, so it is not for every
        step.
        """
        for name, (parent, salt, packed_tokens, _) in self._contents.items():
            block_hash = packed_block_hash(packed_tokens, salt)
            # A private name is no hash, and stands for the block hash too.
            is_private = sequence_hash(parent, block_hash) != name
            yield CachedBlock(name, name if is_private else block_hash, parent)

    def check_integrity(self, sequences: Iterable[ActiveSequence] | None = None) -> None:
        """Proves the pool sound and contents kept for exactly its full blocks. Raises IntegrityBroken.

        Given all live sequences, it proves the refcounts too.
        """
        owned = None if sequences is None else [block for each in sequences for block in each.held_blocks]
        self.pool.check_integrity(owned)
        present = self.pool.full_blocks
        if present != self._contents.keys():
            raise IntegrityBroken(f"contents of {len(self._contents)} blocks for {len(present)} full blocks")

    def _new_contents(self, sequence: ActiveSequence, signal: Use | Promote) -> dict[int, Content]:
        """Contents of the blocks that may enter, by sequence hash. Raises HashCollision."""
        if sequence.block_size != self.block_size:
            raise ValueError(
                f"a sequence of {sequence.block_size}-token blocks in a ledger of {self.block_size}"
            )
        first, names, contents = sequence.contents_of(signal)
        entering: dict[int, Content] = {}
        for offset, (name, content) in enumerate(zip(names, contents, strict=True)):
            known = self._contents.get(name)
            if known is None:
                known = entering.setdefault(name, content)
            if known != content:
                raise HashCollision(first + offset, name)
        return entering

    def _keep(self, stored: Stored, entering: dict[int, Content]) -> None:
        for name in stored.sequence_hashes:
            self._contents[name] = entering[name]


def _renamed(promote: Promote, use: Signal, block: Block) -> list[Signal]:
    assert isinstance(use, Use)
    assert isinstance(block, FullBlock)
    name = block.sequence_hash
    return [replace(promote, sequence_hash=name, block_hash=name), replace(use, parent=name)]
