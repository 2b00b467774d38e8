"""The ledger of one epoch and the signals that it applied but no frame has carried yet. Pure.

Whatever changes the ledger goes through here, so the order in the frames is the order in the ledger.
"""

from dataclasses import dataclass
from itertools import count

from coordinator.sequence import Sequence
from kvcache import DEFAULT_SALT, ActiveSequence, FullBlock, Ledger, OutOfBlocks, Signal
from wire.ids import SequenceKey
from wire.steps import SequenceSignal

WATERMARK_FRACTION = 0.01
"""Share of the blocks that an admission leaves to running sequences, so that they can grow."""


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """What a queued sequence would need now: `num_new_blocks` come from free or cached pages."""

    active: ActiveSequence
    num_cached_tokens: int
    num_new_blocks: int


class KvLog:
    """The ledger with its outbox."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self._ledger = Ledger(num_blocks, block_size=block_size)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._watermark = int(num_blocks * WATERMARK_FRACTION)
        self._ids = count(1)
        self._pending: list[SequenceSignal] = []

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
        return self._ledger.pool.num_free + self._ledger.pool.num_inactive

    @property
    def num_active(self) -> int:
        return self._ledger.pool.num_active

    @property
    def num_inactive(self) -> int:
        return self._ledger.pool.num_inactive

    @property
    def num_free(self) -> int:
        return self._ledger.pool.num_free

    def take_pending(self) -> tuple[SequenceSignal, ...]:
        """The signals since the last call, in the order in which the ledger applied them."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """What a (re)start of `sequence` would need if it came now. Changes nothing."""
        active = ActiveSequence(
            sequence.all_tokens,
            block_size=self._block_size,
            max_output_tokens=sequence.num_tokens_to_generate,
            salt=DEFAULT_SALT,
            prefix_caching=self._prefix_caching,
            new_id=lambda: next(self._ids),
        )
        # A block whose hash is known with other content gets a name of its own before hits are counted.
        self._ledger.prepare(active, len(active))
        pool = self._ledger.pool
        blocks = active.blocks
        # A cached block without owner is no longer evictable once it is used, so only owned ones are free of
        # charge.
        num_owned = sum(isinstance(block, FullBlock) and pool.refcount(block) > 0 for block in blocks)
        return AdmissionPlan(active, self._ledger.num_cached_tokens(active), len(blocks) - num_owned)

    def can_admit(self, plan: AdmissionPlan, *, is_alone: bool) -> bool:
        """The whole sequence fits now; beside others it also leaves them the watermark."""
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

    def allocate(self, key: SequenceKey, active: ActiveSequence, num_tokens: int) -> None:
        """Blocks for the first `num_tokens` tokens. Raises OutOfBlocks, and then nothing has changed."""
        use = self._ledger.prepare(active, num_tokens)
        if use is not None:
            self._apply(key, active, use)
        active.commit(num_tokens)

    def append(self, key: SequenceKey, active: ActiveSequence, token: int) -> None:
        """A block slot for one more token. Raises OutOfBlocks; then the token is not appended, though the
        block before may have been promoted, which stands.
        """
        signals = self._ledger.push(active, token)
        try:
            for signal in signals:
                self._apply(key, active, signal)
        except OutOfBlocks:
            active.pop()
            raise

    def free(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Gives blocks back."""
        for signal in signals:
            self._apply(key, active, signal)

    def check_integrity(self, sequences: list[ActiveSequence]) -> None:
        """Proves that the pages add up and that every owner is one of `sequences`. Raises IntegrityBroken."""
        self._ledger.check_integrity(sequences)

    def _apply(self, key: SequenceKey, active: ActiveSequence, signal: Signal) -> None:
        self._ledger.apply(active, signal)
        self._pending.append(SequenceSignal(key, signal))
