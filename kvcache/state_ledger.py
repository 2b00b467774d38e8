"""The coordinator's accounting of recurrent states: which sequence has one, and where snapshots are saved.

A snapshot can only be restored where it was saved, so prefills stop there: at multiples of the *grid*, and at
the last block boundary before the last token, where a sequence with the same prompt can continue. Private
content, and so any without prefix caching, has no snapshots and no stops.
"""

from collections.abc import Callable, Iterable

from kvcache.errors import IntegrityBroken
from kvcache.hashing import Content
from kvcache.sequence import ActiveSequence
from kvcache.states import CopyState, FreeState, LiveState, SavedState, StatePool, StateSignal, TakeState

SNAPSHOT_GRID_TOKENS = 1024
"""Tokens between the snapshots of a long sequence. A state of Qwen3.5-35B-A3B takes as much memory as keys
and values of 1,048 tokens in as many layers: snapshots about double the memory of a cached prefix.
"""


class StateLedger:
    """Decides which states begin, are saved, restored and evicted; without storage.

    It keeps the content before each snapshot, as `Ledger` does of blocks, so two contents with one hash never
    share a state. Methods apply their signals to the pool and return them, in order.
    """

    def __init__(
        self,
        num_states: int,
        *,
        block_size: int,
        new_id: Callable[[], int],
        grid_tokens: int = SNAPSHOT_GRID_TOKENS,
    ) -> None:
        """`grid_tokens` is rounded down to whole blocks, at least one. Raises ValueError below one state."""
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, got {num_states}")
        self.pool = StatePool(num_states)
        self._block_size = block_size
        self._grid_tokens = max(1, grid_tokens // block_size) * block_size
        self._new_id = new_id
        self._contents: dict[int, Content] = {}

    @property
    def digest(self) -> int:
        """Digest of all signals applied so far."""
        return self.pool.digest

    def hit_blocks(self, sequence: ActiveSequence) -> frozenset[int]:
        """Numbers of leading blocks after which the sequence can continue from a snapshot.

        The last slot that is not live is none: it is room for the state that continues, and the sequence
        would wait where one without a hit evicts the snapshot and begins.
        """
        if self.pool.num_free + self.pool.num_snapshots < 2:
            return frozenset()
        contents = self._contents
        return frozenset(
            index + 1
            for index, (name, content) in enumerate(sequence.full_blocks)
            if contents.get(name) == content
        )

    def has_room(self, sequence: ActiveSequence, num_tokens: int) -> bool:
        """Whether `start` with the same arguments has a slot."""
        return self.pool.has_room(besides=self._snapshot(sequence, num_tokens) if num_tokens else None)

    def start(self, sequence: ActiveSequence, num_tokens: int) -> list[StateSignal]:
        """Begin the state of `sequence` after `num_tokens`, which end at a snapshot unless they are 0.

        Raises OutOfStates; nothing has changed then.
        """
        state = LiveState(self._new_id())
        if num_tokens:
            source = self._snapshot(sequence, num_tokens)
            signals = self._apply([CopyState(source, state, num_tokens)])
        else:
            signals = self._apply([TakeState(state)])
        sequence.state = state
        return signals

    def next_stop(self, sequence: ActiveSequence, start: int, end: int) -> int:
        """First token after `start` where a prefill up to `end` must stop, so that it can be saved."""
        on_grid = (start // self._grid_tokens + 1) * self._grid_tokens
        last_boundary = self._last_boundary(end)
        stop = min(on_grid, last_boundary if start < last_boundary else end)
        return min(stop, end) if self._is_shared(sequence, stop) else end

    def is_stop(self, sequence: ActiveSequence, position: int, end: int | None) -> bool:
        """Whether a state is saved after `position` tokens of a prefill up to `end`, or in decodes (None)."""
        if position == 0 or not self._is_shared(sequence, position):
            return False
        return position % self._grid_tokens == 0 or (end is not None and position == self._last_boundary(end))

    def save(
        self, sequence: ActiveSequence, position: int, is_cached: Callable[[int], bool]
    ) -> list[StateSignal]:
        """Save the live state after `position` tokens, all in sent steps, unless it was saved before.

        Private content is not saved, and nothing if all slots are live. Snapshots whose block is not
        `is_cached` go first where a slot is needed: no sequence can hit them.
        """
        if sequence.state is None:
            return []
        if not self._is_shared(sequence, position):
            return []
        name, content = sequence.full_block(position // self._block_size - 1)
        if name in self._contents:
            return []
        freed = [] if self.pool.num_free else self._without_blocks(is_cached)
        if not self.pool.has_room():
            return freed
        saved = self._apply([CopyState(sequence.state, SavedState(name), position)])
        self._contents[name] = content
        self._drop_evicted()
        return freed + saved

    def end(self, sequence: ActiveSequence) -> list[StateSignal]:
        """Free the state of a sequence, if it has one."""
        state, sequence.state = sequence.state, None
        return [] if state is None else self._apply([FreeState(state)])

    def discard(self, sequence: ActiveSequence) -> list[StateSignal]:
        """Free the snapshots of the sequence's content, which may be wrong: it failed."""
        names = [name for name, content in sequence.full_blocks if self._contents.get(name) == content]
        return self._apply([FreeState(SavedState(name)) for name in names])

    def check_integrity(self, sequences: Iterable[ActiveSequence] | None = None) -> None:
        """Check the pool, and that exactly its snapshots are hits; with all running `sequences`, also that
        they own its live states.

        Raises IntegrityBroken.
        """
        if self._contents.keys() != set(self.pool.snapshots):
            raise IntegrityBroken(
                f"{len(self._contents)} contents of snapshots are known, the pool has"
                f" {self.pool.num_snapshots} snapshots, or others"
            )
        owned = None
        if sequences is not None:
            owned = [sequence.state for sequence in sequences if sequence.state is not None]
        self.pool.check_integrity(owned)

    def _is_shared(self, sequence: ActiveSequence, position: int) -> bool:
        """Whether others can continue after `position` tokens: their content is not private."""
        private_from = sequence.first_private_block
        return private_from is None or position <= private_from * self._block_size

    def _last_boundary(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self._block_size * self._block_size

    def _snapshot(self, sequence: ActiveSequence, num_tokens: int) -> SavedState:
        return SavedState(sequence.full_block(num_tokens // self._block_size - 1)[0])

    def _without_blocks(self, is_cached: Callable[[int], bool]) -> list[StateSignal]:
        names = [name for name in self.pool.snapshots if not is_cached(name)]
        return self._apply([FreeState(SavedState(name)) for name in names])

    def _apply(self, signals: list[StateSignal]) -> list[StateSignal]:
        for signal in signals:
            self.pool.apply(signal)
        self._drop_evicted()
        return signals

    def _drop_evicted(self) -> None:
        """Forget the contents of snapshots that the pool has evicted or freed: they are no hits."""
        if len(self._contents) > self.pool.num_snapshots:
            kept = set(self.pool.snapshots)
            self._contents = {name: content for name, content in self._contents.items() if name in kept}
