"""The KV ledger of one epoch, and its signals that were not sent yet. Pure.

All changes of the ledger go through this module, so frames carry signals in the order of the ledger.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from coordinator.scheduler.sequence import Sequence
from kvcache import (
    DEFAULT_SALT,
    ActiveSequence,
    Announced,
    CachedBlock,
    FullBlock,
    KvWindow,
    Ledger,
    OutOfBlocks,
    Signal,
    salt_of,
)
from wire.ids import SequenceKey
from wire.steps import NO_GROWS, Grows, SequenceSignal, pack_grow

WATERMARK_FRACTION = 0.01
"""Share of the blocks that an admission leaves free for running sequences to grow."""


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Requirements of a queued sequence: at most `num_new_blocks` free or evictable blocks."""

    active: ActiveSequence
    num_cached_tokens: int
    num_new_blocks: int


class _Planned(NamedTuple):
    """The last planned start of a sequence."""

    sequence: Sequence
    restart_count: int
    active: ActiveSequence


class KvCacheManager:
    """Allocates KV blocks and collects the signals for the next step."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        window: KvWindow | None = None,
    ) -> None:
        """With a `window`, sequences release blocks that no later query can see."""
        self._ledger = Ledger(num_blocks, block_size=block_size)
        self._pool = self._ledger.pool
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._window = window
        self._watermark = int(num_blocks * WATERMARK_FRACTION)
        self._ids = count(1)
        self._pending: list[SequenceSignal] = []
        self._grows = NO_GROWS
        self._events: list[Announced] = []
        self._planned: _Planned | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def digest(self) -> int:
        """Digest of all applied signals."""
        return self._ledger.digest

    @property
    def has_pending(self) -> bool:
        return bool(self._pending or self._grows)

    @property
    def num_available(self) -> int:
        """Free and evictable blocks."""
        return self._pool.num_free + self._pool.num_inactive

    @property
    def num_active(self) -> int:
        return self._pool.num_active

    @property
    def num_inactive(self) -> int:
        return self._pool.num_inactive

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def take_pending(self) -> tuple[SequenceSignal, ...]:
        """Take the signals since the last call, in the order of the ledger; see also `take_grows`."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def take_grows(self) -> Grows:
        """Take the grows since the last call, which belong among the signals of `take_pending`."""
        grows, self._grows = self._grows, NO_GROWS
        return grows

    def take_events(self) -> list[Announced]:
        """Take the KV events since the last call, in order.

        Private blocks and blocks of `new_sequence` have no events.
        """
        events, self._events = self._events, []
        return events

    def cached_blocks(self) -> Iterator[CachedBlock]:
        """All cached full blocks that have events."""
        return self._ledger.cached_blocks()

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """Compute the requirements of starting `sequence` now. Does not modify the cache.

        A repeated call for the same start only looks up cached blocks again.
        """
        active = self._active_sequence(sequence)
        # Rename blocks with a hash collision before hits are counted.
        self._ledger.prepare(active, len(active))
        pool = self._ledger.pool
        blocks = active.blocks
        # Using a cached block without an owner makes it unevictable, so only owned blocks cost nothing.
        num_owned = sum(isinstance(block, FullBlock) and pool.refcount(block) > 0 for block in blocks)
        # Scored tokens are computed even if cached; cached blocks are not written again.
        num_cached_tokens = 0 if sequence.needs_scoring else self._ledger.num_cached_tokens(active)
        num_new_blocks = len(blocks) - num_owned
        if self._window is not None:
            # It first holds all cached blocks, then at most the window and one chunk, which `allocate`
            # cuts to the available blocks.
            needed = self._window.admission_blocks(self._block_size, self._num_blocks)
            num_new_blocks = min(num_new_blocks, max(num_cached_tokens // self._block_size, needed))
        return AdmissionPlan(active, num_cached_tokens, num_new_blocks)

    def can_admit(self, plan: AdmissionPlan, *, is_alone: bool) -> bool:
        """Whether the blocks are available; a sequence that is not alone must also leave the watermark."""
        watermark = 0 if is_alone else self._watermark
        return plan.num_new_blocks + watermark <= self.num_available

    def chunk_size(self, start: int, end: int, budget: int) -> int:
        """Tokens of the next chunk of a prefill from `start` to `end`, at most `budget`.

        A chunk ends at `end` or on a block boundary; 0 if `budget` does not reach the next boundary.
        """
        if end - start <= budget:
            return end - start
        return max(0, (start + budget) // self._block_size * self._block_size - start)

    def allocate(
        self, key: SequenceKey, active: ActiveSequence, num_tokens: int, *, first_query: int = 0
    ) -> int:
        """Allocate blocks for the first `num_tokens` tokens; tokens from `first_query` on are computed next.

        A starting sequence first uses all cached blocks before `first_query`, and releases those that its
        window hides before it allocates new ones. With a window, sequences may be longer than the cache: if
        blocks are short, fewer tokens are allocated.

        Returns:
            The number of tokens with blocks, above `first_query`.

        Raises:
            OutOfBlocks: no block was added. It does not occur directly after `can_admit` returned True.
        """
        self._planned = None
        if self._window is not None:
            if active.num_allocated_blocks == 0:
                self._extend(key, active, first_query // self._block_size * self._block_size)
            self._release_hidden(key, active, self._window, first_query)
            num_tokens = self._cap_to_available(active, num_tokens, first_query)
        self._extend(key, active, num_tokens)
        return num_tokens

    def _cap_to_available(self, active: ActiveSequence, num_tokens: int, first_query: int) -> int:
        """Reduce `num_tokens` to the available blocks, unless that leaves none beyond `first_query`."""
        end = (active.num_allocated_blocks + self.num_available) * self._block_size
        return end if first_query < end < num_tokens else num_tokens

    def grow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Allocate slots for the newest tokens of `sequences` in one go, where that preempts nobody.

        Returns the sequences that need `append` instead. A step has one run of grows.
        """
        if self._window is not None or self._grows or self.num_available < len(sequences):
            return sequences
        rows, others = [], []
        for sequence in sequences:
            active = sequence.kv
            grow = self._ledger.grow(active, sequence.newest_token, self._events)
            if grow is None:
                others.append(sequence)
            else:
                rows.append(pack_grow(sequence.identity, grow))
                sequence.kv_end = active.num_slots
        self._grows = Grows(b"".join(rows), len(self._pending))
        return others

    def append(self, sequence: Sequence) -> None:
        """Allocate a slot for the newest token of `sequence`, and set its `kv_end`.

        Raises OutOfBlocks without appending the token; the previous block may have been promoted.
        """
        active = sequence.kv
        self.push(sequence.key, active, sequence.newest_token)
        end = active.num_slots
        if self._window is not None:
            next_release = self._window.next_release(active.num_released_blocks, self._block_size)
            end = min(end, max(next_release, len(active)))
        sequence.kv_end = end

    def push(self, key: SequenceKey, active: ActiveSequence, token: int) -> None:
        """Like `append`, for a sequence outside of the scheduler."""
        if self._window is not None:
            self._release_hidden(key, active, self._window, len(active))
        if signals := active.push(token):
            self._open_block(key, active, signals)

    def _open_block(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Apply the signals of the last push, or revert it and raise OutOfBlocks."""
        try:
            for signal in self._ledger.settle(active, signals):
                self._apply(key, active, signal)
        except OutOfBlocks:
            active.pop()
            raise

    def release(self, key: SequenceKey, active: ActiveSequence, *, keep_content: bool) -> None:
        """Release all blocks of a sequence whose tokens are all in sent steps.

        Complete blocks stay cached, unless `keep_content` is False.
        """
        if keep_content:
            self.free(key, active, self._ledger.seal(active))
        self.free(key, active, active.free_signals() if keep_content else active.destroy_signals())

    def new_sequence(self, tokens: tuple[int, ...], *, max_output_tokens: int, salt: int) -> ActiveSequence:
        """Create the accounting of a sequence outside of the scheduler, without blocks and KV events."""
        return ActiveSequence(
            tokens,
            block_size=self._block_size,
            max_output_tokens=max_output_tokens,
            salt=salt,
            is_announced=False,
            new_id=self._ids.__next__,
        )

    def num_cached_tokens(self, active: ActiveSequence) -> int:
        """Leading tokens whose computation the cache saves."""
        return self._ledger.num_cached_tokens(active)

    def free(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Apply `signals` that release blocks."""
        for signal in signals:
            self._apply(key, active, signal)

    def check_integrity(self, sequences: list[ActiveSequence]) -> None:
        """Check the ledger, and that `sequences` are all owners of blocks. Raises IntegrityBroken."""
        self._ledger.check_integrity(sequences)

    def _active_sequence(self, sequence: Sequence) -> ActiveSequence:
        """Cache the accounting of the queue head: hashing a long prompt in every step would be slow."""
        planned = self._planned
        if planned and planned.sequence is sequence and planned.restart_count == sequence.restart_count:
            return planned.active
        active = ActiveSequence(
            sequence.all_tokens,
            block_size=self._block_size,
            max_output_tokens=sequence.num_tokens_to_generate,
            salt=salt_of(sequence.cache_salt) if sequence.cache_salt else DEFAULT_SALT,
            num_public_blocks=sequence.num_public_tokens // self._block_size,
            prefix_caching=self._prefix_caching and sequence.shares_cache,
            new_id=self._ids.__next__,
        )
        self._planned = _Planned(sequence, sequence.restart_count, active)
        return active

    def _extend(self, key: SequenceKey, active: ActiveSequence, num_tokens: int) -> None:
        use = self._ledger.prepare(active, num_tokens)
        if use is not None:
            self._apply(key, active, use)
        active.commit(num_tokens)

    def _release_hidden(
        self, key: SequenceKey, active: ActiveSequence, window: KvWindow, first_query: int
    ) -> None:
        """Release blocks that `first_query` cannot see; steps that see them were sent before."""
        first_visible = window.first_visible(first_query)
        if first_visible // self._block_size > active.num_released_blocks:
            self.free(key, active, active.release_before(first_visible))

    def _apply(self, key: SequenceKey, active: ActiveSequence, signal: Signal) -> None:
        if events := self._ledger.apply(active, signal):
            self._events += self._ledger.announced(events)
        self._pending.append(SequenceSignal(key, signal))
