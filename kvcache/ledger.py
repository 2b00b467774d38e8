"""The coordinator's block accounting: a pool without storage that also tracks the content of each block."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvcache.blocks import Block, Event, FullBlock, Grow, Promote, Removed, Signal, Stored, Use
from kvcache.errors import HashCollision, IntegrityBroken
from kvcache.hashing import Content, packed_block_hash
from kvcache.pool import BlockPool
from kvcache.sequence import ActiveSequence


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block in the cache, as announced by `Stored`; its tokens are little-endian u32."""

    sequence_hash: int
    block_hash: int
    parent: int | None
    packed_tokens: bytes = field(default=b"", compare=False, repr=False)


class Announced(NamedTuple):
    """An event, and the tokens of all blocks that it stores, as little-endian u32."""

    event: Event
    packed_tokens: bytes


class Ledger:
    """The block accounting that decides admission, prefix hits and eviction.

    It keeps the content of every full block in the pool: four bytes per token and a digest of all tokens
    before. So it detects two contents with one hash before anything is shared, even after eviction of earlier
    blocks. `prepare`, `push` and `seal` call the sequence's methods and rename the colliding block and all
    later ones to private ids; `apply` raises HashCollision for a remaining collision.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._contents: dict[int, Content] = {}
        # Unannounced full blocks (private ids, and blocks of sequences without `is_announced`), and those of
        # them that the last signal removed.
        self._unannounced: set[int] = set()
        self._unannounced_removed: set[int] = set()

    @property
    def digest(self) -> int:
        """Digest of all signals applied so far; sent with each frame."""
        return self.pool.digest

    def num_cached_tokens(self, sequence: ActiveSequence) -> int:
        """Leading tokens that need no computation; never the last token, whose logits are needed."""
        return max(0, min(self.pool.num_cached_blocks(sequence) * self.block_size, len(sequence) - 1))

    def cached_flags(self, sequence: ActiveSequence) -> list[bool]:
        """Whether each full block of the sequence is in the pool, with its content."""
        contents = self._contents
        return [contents.get(name) == content for name, content in sequence.full_blocks]

    def prepare(self, sequence: ActiveSequence, num_tokens: int) -> Use | None:
        """`sequence.prepare(num_tokens)` without collisions."""
        while (use := sequence.prepare(num_tokens)) is not None:
            collision = self.collision(sequence, use)
            if collision is None:
                return use
            sequence.make_private(collision.block_index)
        return None

    def push(self, sequence: ActiveSequence, token: int) -> list[Signal]:
        """`sequence.push(token)` without collisions."""
        signals = sequence.push(token)
        return self.settle(sequence, signals) if signals else signals

    def seal(self, sequence: ActiveSequence) -> list[Signal]:
        """`sequence.seal()` without collisions."""
        return self.settle(sequence, sequence.seal())

    def settle(self, sequence: ActiveSequence, signals: list[Signal]) -> list[Signal]:
        """Remove collisions from the signals of the sequence's last push or seal."""
        while signals and isinstance(promote := signals[0], Promote):
            if promote.sequence_hash not in self._contents:
                break
            collision = self.collision(sequence, promote)
            if collision is None:
                break
            sequence.make_private(collision.block_index)
            signals = _renamed(promote, signals[1:], sequence.blocks[collision.block_index])
        return signals

    def collision(self, sequence: ActiveSequence, signal: Use | Promote) -> HashCollision | None:
        """Return the first block of the sequence's next signal whose hash has other content, if any."""
        try:
            self._new_contents(sequence, signal)
        except HashCollision as collision:
            return collision
        return None

    def apply(self, sequence: ActiveSequence, signal: Signal) -> tuple[Event, ...]:
        """Apply one signal of the sequence to the pool; a `Use` before the sequence commits it.

        Raises HashCollision, InvalidSignal for a signal other than the sequence's next, and the errors of
        `BlockPool.apply`; nothing has changed then.
        """
        entering: dict[int, Content] = {}
        if isinstance(signal, Promote) and signal.sequence_hash not in self._contents:
            entering[signal.sequence_hash] = sequence.newest_content(signal)
        elif isinstance(signal, Promote) or (isinstance(signal, Use) and signal.block_hashes):
            entering = self._new_contents(sequence, signal)
        events = self.pool.apply(signal)
        if self._unannounced_removed:
            self._unannounced_removed = set()
        if entering and not sequence.is_announced:
            self._unannounced.update(entering)
        elif entering and sequence.first_private_block is not None:
            self._unannounced.update(_private_names(sequence, signal) & entering.keys())
        for event in events:
            if isinstance(event, Stored):
                self._keep(event, entering)
            else:
                self._forget(event)
        return events

    def grow(self, sequence: ActiveSequence, token: int, announced: list[Announced]) -> Grow | None:
        """`push(token)` and `apply` of its signals, if it completes a block that has a parent.

        Adds the events for subscribers to `announced`. None if nothing has changed: the push has other
        signals or none, or no block is free or evictable.
        """
        pool = self.pool
        if not (pool.num_free or pool.num_inactive) or (grow := sequence.grow(token)) is None:
            return None
        if grow.sequence_hash in self._contents:
            return self._grow_known(sequence, grow, announced)
        content = sequence.newest_content(grow)
        events = pool.grow(grow)
        self._contents[grow.sequence_hash] = content
        if sequence.is_announced and sequence.first_private_block is None:
            announced.append(Announced(events[0], content[2]))
        else:
            self._unannounced.add(grow.sequence_hash)
        if len(events) > 1:
            removed = events[1]
            assert isinstance(removed, Removed)
            self._unannounced_removed = set()
            self._forget(removed)
            announced += self.announced((removed,))
        return grow

    def _grow_known(self, sequence: ActiveSequence, grow: Grow, announced: list[Announced]) -> Grow:
        """`grow`, whose hash a block in the pool has: the same content, or a collision."""
        signals = self.settle(sequence, list(grow.signals))
        for signal in signals:
            announced += self.announced(self.apply(sequence, signal))
        promote = signals[0]
        assert isinstance(promote, Promote)
        return grow._replace(sequence_hash=promote.sequence_hash, block_hash=promote.block_hash)

    def announced(self, events: tuple[Event, ...]) -> list[Announced]:
        """Return `events` of the last signal as sent to subscribers.

        Private blocks, which no other sequence can use, and blocks of unannounced sequences are left out.
        Event ids stay, so a left-out event leaves a gap.
        """
        shared: Iterable[Event] = events
        if self._unannounced or self._unannounced_removed:
            shared = [kept for event in events if (kept := self._without_unannounced(event)) is not None]
        return [Announced(event, self._tokens_of(event)) for event in shared]

    def _without_unannounced(self, event: Event) -> Event | None:
        if isinstance(event, Removed):
            names = tuple(name for name in event.block_hashes if name not in self._unannounced_removed)
            return replace(event, block_hashes=names) if names else None
        # Unannounced blocks are the last ones of a sequence, or all of them.
        count = sum(name not in self._unannounced for name in event.sequence_hashes)
        names, hashes = event.sequence_hashes[:count], event.block_hashes[:count]
        return replace(event, sequence_hashes=names, block_hashes=hashes) if count else None

    def _tokens_of(self, event: Event) -> bytes:
        if isinstance(event, Removed):
            return b""
        names = event.sequence_hashes
        if len(names) == 1:
            return self._contents[names[0]][2]
        return b"".join([self._contents[name][2] for name in names])

    def cached_blocks(self) -> Iterator[CachedBlock]:
        """Yield all announced full blocks, active and inactive. Slow: rehashes all tokens."""
        for name, (parent, salt, packed_tokens, _) in self._contents.items():
            if name not in self._unannounced:
                yield CachedBlock(name, packed_block_hash(packed_tokens, salt), parent, packed_tokens)

    def check_integrity(self, sequences: Iterable[ActiveSequence] | None = None) -> None:
        """Check the pool and the contents; with all running `sequences`, also the refcounts.

        Raises IntegrityBroken.
        """
        owned = None
        if sequences is not None:
            owned = [block for sequence in sequences for block in sequence.held_blocks]
        self.pool.check_integrity(owned)
        if not self.pool.has_full_blocks(self._contents.keys()):
            raise IntegrityBroken(
                f"contents of {len(self._contents)} blocks, the pool has {self.pool.num_full} full blocks"
            )
        if not self._unannounced <= self._contents.keys():
            num_absent = len(self._unannounced - self._contents.keys())
            raise IntegrityBroken(f"{num_absent} unannounced blocks are not in the pool")

    def _new_contents(self, sequence: ActiveSequence, signal: Use | Promote) -> dict[int, Content]:
        """Return contents of blocks that may enter, by sequence hash. Raises HashCollision."""
        if sequence.block_size != self.block_size:
            raise ValueError(
                f"sequence has {sequence.block_size}-token blocks, the ledger {self.block_size}-token blocks"
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

    def _forget(self, removed: Removed) -> None:
        for name in removed.block_hashes:
            del self._contents[name]
            if name in self._unannounced:
                self._unannounced.remove(name)
                self._unannounced_removed.add(name)

    def _keep(self, stored: Stored, entering: dict[int, Content]) -> None:
        for name in stored.sequence_hashes:
            self._contents[name] = entering[name]


def _private_names(sequence: ActiveSequence, signal: Signal) -> set[int]:
    """Return the private ids among the names in the sequence's next signal."""
    private_from = sequence.first_private_block
    assert private_from is not None
    assert isinstance(signal, Use | Promote)
    first, names, _ = sequence.contents_of(signal)
    return set(names[max(0, private_from - first) :])


def _renamed(promote: Promote, others: list[Signal], block: Block) -> list[Signal]:
    """Return `promote` and the signals after it with the private name of `block`."""
    assert isinstance(block, FullBlock)
    name = block.sequence_hash
    signals: list[Signal] = [replace(promote, sequence_hash=name, block_hash=name)]
    for use in others:
        assert isinstance(use, Use)
        signals.append(replace(use, parent=name))
    return signals
