"""The KV ledger of one epoch and the signals that no frame has carried yet. Pure.

Whatever changes the ledger goes through here, so the order in the frames is the order in the ledger.
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
from wire.steps import SequenceSignal

WATERMARK_FRACTION = 0.01
"""Share of the blocks that an admission leaves to running sequences, so that they can grow."""


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """What a queued sequence would need now: at most `num_new_blocks` at once from free or cached pages."""

    active: ActiveSequence
    num_cached_tokens: int
    num_new_blocks: int


class _Planned(NamedTuple):
    """The last start that was planned and has not begun."""

    sequence: Sequence
    restart_count: int
    active: ActiveSequence


class KvCacheManager:
    """The ledger with its outbox."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        window: KvWindow | None = None,
    ) -> None:
        """With a `window`, sequences give back the blocks that no later query can see."""
        self._ledger = Ledger(num_blocks, block_size=block_size)
        self._pool = self._ledger.pool
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._window = window
        self._watermark = int(num_blocks * WATERMARK_FRACTION)
        self._ids = count(1)
        self._pending: list[SequenceSignal] = []
        self._events: list[Announced] = []
        self._planned: _Planned | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def digest(self) -> int:
        """The digest after everything applied so far."""
        return self._ledger.digest

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
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
        """The signals since the last call, in the order in which the ledger applied them."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def take_events(self) -> list[Announced]:
        """What entered and left the cache since the last call, in order; private blocks and those of
        `new_sequence` are left out.
        """
        events, self._events = self._events, []
        return events

    def cached_blocks(self) -> Iterator[CachedBlock]:
        """All full blocks that are in the cache now and that `take_events` tells of."""
        return self._ledger.cached_blocks()

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """What a (re)start of `sequence` would need if it came now. Changes nothing.

        Asked again for the same start, it only looks again at what is cached.
        """
        active = self._active_for(sequence)
        # A block whose hash is known with other content gets a name of its own before hits are counted.
        self._ledger.prepare(active, len(active))
        pool = self._ledger.pool
        blocks = active.blocks
        # A cached block without owner is no longer evictable once it is used, so only owned ones are free of
        # charge.
        num_owned = sum(isinstance(block, FullBlock) and pool.refcount(block) > 0 for block in blocks)
        # What is scored is computed, cached or not; blocks that are there already are not written again.
        num_cached_tokens = 0 if sequence.needs_scoring else self._ledger.num_cached_tokens(active)
        num_new_blocks = len(blocks) - num_owned
        if self._window is not None:
            # First it holds what is cached, all of it; then never more than the window and one chunk, which
            # `allocate` cuts to the blocks that are left.
            needed = self._window.admission_blocks(self._block_size, self._num_blocks)
            num_new_blocks = min(num_new_blocks, max(num_cached_tokens // self._block_size, needed))
        return AdmissionPlan(active, num_cached_tokens, num_new_blocks)

    def can_admit(self, plan: AdmissionPlan, *, is_alone: bool) -> bool:
        """All that the sequence needs at once fits now; beside others it also leaves them the watermark."""
        watermark = 0 if is_alone else self._watermark
        return plan.num_new_blocks + watermark <= self.num_available

    def chunk_size(self, start: int, end: int, budget: int) -> int:
        """Tokens of the next chunk of a prefill at `start` that ends at `end`; a chunk ends there or on a
        block boundary.

        0 when `budget` does not reach the next boundary.
        """
        if end - start <= budget:
            return end - start
        return max(0, (start + budget) // self._block_size * self._block_size - start)

    def allocate(
        self, key: SequenceKey, active: ActiveSequence, num_tokens: int, *, first_query: int = 0
    ) -> int:
        """Blocks for the first `num_tokens` tokens, of which those from `first_query` on are computed now.

        A sequence begins by taking hold of everything that is cached before `first_query`; what its window
        hides from there on it gives back before it takes new blocks. With a window, whose sequences may be
        longer than the cache, fewer tokens are allocated where blocks are short. Returns the number of tokens
        that have blocks now, above `first_query`. Raises OutOfBlocks; then no block was added to those that
        the sequence held. What `can_admit` has just allowed begins without that error.
        """
        self._planned = None
        if self._window is not None:
            if active.num_allocated_blocks == 0:
                self._extend(key, active, first_query // self._block_size * self._block_size)
            self._release_unseen(key, active, self._window, first_query)
            num_tokens = self._affordable(active, num_tokens, first_query)
        self._extend(key, active, num_tokens)
        return num_tokens

    def _affordable(self, active: ActiveSequence, num_tokens: int, first_query: int) -> int:
        """As many of `num_tokens` as there are blocks for; all, if that is none beyond `first_query`."""
        end = (active.num_allocated_blocks + self.num_available) * self._block_size
        return end if first_query < end < num_tokens else num_tokens

    def append(self, sequence: Sequence) -> None:
        """A block slot for the newest token of `sequence`. Raises OutOfBlocks; then the token is not
        appended, though the block before may have been promoted, which stands.
        """
        self.push(sequence.key, sequence.kv, sequence.newest_token)

    def push(self, key: SequenceKey, active: ActiveSequence, token: int) -> None:
        """As `append`, for the blocks of a sequence that the scheduler does not know."""
        if self._window is not None:
            self._release_unseen(key, active, self._window, len(active))
        signals = active.push(token)
        if not signals:
            return
        try:
            for signal in self._ledger.settle(active, signals):
                self._apply(key, active, signal)
        except OutOfBlocks:
            active.pop()
            raise

    def release(self, key: SequenceKey, active: ActiveSequence, *, keep_content: bool) -> None:
        """A sequence gives up all its blocks. Complete ones stay cached, also the last one, unless
        `keep_content` is False. Every token of `active` is in a step that was handed out.
        """
        if keep_content:
            self.free(key, active, self._ledger.seal(active))
        self.free(key, active, active.free_signals() if keep_content else active.destroy_signals())

    def new_sequence(self, tokens: tuple[int, ...], *, max_output_tokens: int, salt: int) -> ActiveSequence:
        """The blocks of a sequence that the scheduler does not know; none is allocated, and no event tells of
        them.
        """
        return ActiveSequence(
            tokens,
            block_size=self._block_size,
            max_output_tokens=max_output_tokens,
            salt=salt,
            is_announced=False,
            new_id=self._ids.__next__,
        )

    def num_cached_tokens(self, active: ActiveSequence) -> int:
        """Leading tokens that need not be computed if it began now."""
        return self._ledger.num_cached_tokens(active)

    def free(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Applies `signals` that give blocks back."""
        for signal in signals:
            self._apply(key, active, signal)

    def check_integrity(self, sequences: list[ActiveSequence]) -> None:
        """Proves that the pages add up and that every owner is one of `sequences`. Raises IntegrityBroken."""
        self._ledger.check_integrity(sequences)

    def _active_for(self, sequence: Sequence) -> ActiveSequence:
        """Hashing a long prompt takes a while, and the head of the queue may wait for many steps."""
        planned = self._planned
        if planned and planned.sequence is sequence and planned.restart_count == sequence.restart_count:
            return planned.active
        active = ActiveSequence(
            sequence.all_tokens,
            block_size=self._block_size,
            max_output_tokens=sequence.num_tokens_to_generate,
            salt=salt_of(sequence.cache_salt) if sequence.cache_salt else DEFAULT_SALT,
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

    def _release_unseen(
        self, key: SequenceKey, active: ActiveSequence, window: KvWindow, first_query: int
    ) -> None:
        """Steps that were sent before see more, but they are also computed before this one."""
        first_visible = window.first_visible(first_query)
        if first_visible // self._block_size > active.num_released_blocks:
            self.free(key, active, active.release_before(first_visible))

    def _apply(self, key: SequenceKey, active: ActiveSequence, signal: Signal) -> None:
        if events := self._ledger.apply(active, signal):
            self._events += self._ledger.announced(events)
        self._pending.append(SequenceSignal(key, signal))
