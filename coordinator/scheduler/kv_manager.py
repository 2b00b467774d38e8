"""The KV ledgers of one epoch, one per block group, and their signals that were not sent yet. Pure.

All changes of the ledgers go through this module, so frames carry signals in the order of the ledgers.
"""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count, repeat
from typing import NamedTuple

from coordinator.scheduler.sequence import Sequence
from kvcache import (
    DEFAULT_SALT,
    SNAPSHOT_GRID_TOKENS,
    ActiveSequence,
    Announced,
    CachedBlock,
    FullBlock,
    KvGroup,
    KvWindow,
    Ledger,
    OutOfBlocks,
    Signal,
    StateLedger,
    StateSignal,
    Use,
    combined_digest,
    first_needed_block,
    longest_hit,
    salt_of,
)
from wire.ids import SequenceKey
from wire.steps import NO_GROWS, Grows, SequenceSignal, pack_grow

WATERMARK_FRACTION = 0.01
"""Share of the blocks that an admission leaves free for running sequences to grow."""


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Requirements of a queued sequence: at most `num_new_blocks` free or evictable blocks.

    `other_new_blocks` belong to the block groups after the first.
    """

    active: ActiveSequence
    num_cached_tokens: int
    num_new_blocks: int
    other_new_blocks: tuple[int, ...] = ()


class _Planned(NamedTuple):
    """The last planned start of a sequence."""

    sequence: Sequence
    restart_count: int
    active: ActiveSequence


class _Group:
    """Blocks of one block group."""

    def __init__(self, group: KvGroup, *, block_size: int) -> None:
        self.ledger = Ledger(group.num_blocks, block_size=block_size)
        self.window = group.window
        self.watermark = int(group.num_blocks * WATERMARK_FRACTION)
        self._num_blocks = group.num_blocks
        self._block_size = block_size
        self._pool = self.ledger.pool

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

    def num_new_blocks(self, part: ActiveSequence, num_cached_tokens: int) -> int:
        """Blocks that must be free or evictable to start `part` after `num_cached_tokens`."""
        first = first_needed_block(self.window, num_cached_tokens, self._block_size)
        part.skip_blocks(first)
        # Rename blocks with a hash collision before they are counted.
        self.ledger.prepare(part, len(part))
        needed = part.blocks[first:]
        # Using a cached block without an owner makes it unevictable, so only owned blocks cost nothing.
        num_owned = sum(isinstance(block, FullBlock) and self._pool.refcount(block) > 0 for block in needed)
        num_new_blocks = len(needed) - num_owned
        if self.window is None:
            return num_new_blocks
        # It first holds the cached blocks, then at most the window and one chunk, which `allocate` cuts to
        # the available blocks.
        num_held = num_cached_tokens // self._block_size - first
        admission = self.window.admission_blocks(self._block_size, self._num_blocks)
        return min(num_new_blocks, max(num_held, admission))

    def cap_to_available(self, part: ActiveSequence, num_tokens: int, first_query: int) -> int:
        """Reduce `num_tokens` to the available blocks, unless that leaves none beyond `first_query`."""
        if self.window is None:
            return num_tokens
        end = (part.num_allocated_blocks + self.num_available) * self._block_size
        return end if first_query < end < num_tokens else num_tokens

    def check_room(self, use: Use) -> None:
        """Raises OutOfBlocks if `use` cannot be applied."""
        self._pool.check_room(use)


class KvCacheManager:
    """Allocates KV blocks of all block groups and collects the signals for the next step.

    A sequence has the same tokens in every group; groups with a window hold only the last ones. In models
    with recurrent states, every sequence has one of `num_states` from its first chunk to its release, and its
    prefix hits end where a state was saved.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        window: KvWindow | None = None,
        other_groups: Items[KvGroup] = (),
        num_states: int = 0,
        grid_tokens: int = SNAPSHOT_GRID_TOKENS,
    ) -> None:
        """`num_blocks` and `window` describe the first group.

        With a window, sequences release blocks that no later query can see. `num_states` is 0 for models
        without recurrent layers; `grid_tokens` are between the snapshots of a long sequence.
        """
        groups = (KvGroup(num_blocks, window), *other_groups)
        self._groups = tuple(_Group(group, block_size=block_size) for group in groups)
        self._first = self._groups[0]
        self._ledger = self._first.ledger
        self._has_windows = any(group.window is not None for group in groups)
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._ids = count(1)
        self._states: StateLedger | None = None
        if num_states:
            self._states = StateLedger(
                num_states, block_size=block_size, new_id=self._ids.__next__, grid_tokens=grid_tokens
            )
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
        states = [] if self._states is None else [self._states.digest]
        return combined_digest([group.ledger.digest for group in self._groups] + states)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending or self._grows)

    @property
    def num_available(self) -> int:
        """Free and evictable blocks that every group has at least."""
        return min(group.num_available for group in self._groups)

    @property
    def num_active(self) -> int:
        """Blocks in use, of all groups."""
        return sum(group.num_active for group in self._groups)

    @property
    def num_inactive(self) -> int:
        """Cached blocks that no sequence uses, of all groups."""
        return sum(group.num_inactive for group in self._groups)

    @property
    def num_free(self) -> int:
        """Empty blocks, of all groups."""
        return sum(group.num_free for group in self._groups)

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

        They belong to the first group. Private blocks and blocks of `new_sequence` have no events.
        """
        events, self._events = self._events, []
        return events

    def cached_blocks(self) -> Iterator[CachedBlock]:
        """All cached full blocks of the first group that have events."""
        return self._ledger.cached_blocks()

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """Compute the requirements of starting `sequence` now. Does not modify the cache.

        A repeated call for the same start only looks up cached blocks again.
        """
        active = self._active_sequence(sequence)
        if not self._has_windows:
            # Rename blocks with a hash collision before hits are counted.
            self._ledger.prepare(active, len(active))
        # Scored tokens are computed even if cached; cached blocks are not written again.
        num_cached_tokens = 0 if sequence.needs_scoring else self.num_cached_tokens(active)
        num_new_blocks = [
            group.num_new_blocks(part, num_cached_tokens)
            for group, part in zip(self._groups, active.groups, strict=True)
        ]
        return AdmissionPlan(active, num_cached_tokens, num_new_blocks[0], tuple(num_new_blocks[1:]))

    def can_admit(
        self, plan: AdmissionPlan, *, is_alone: bool, prefilling: Collection[Sequence] = ()
    ) -> bool:
        """Whether blocks and a state are available beside those that the rest of `prefilling` needs.

        A sequence that is not alone must also leave the watermark.
        """
        needed = (plan.num_new_blocks, *plan.other_new_blocks)
        if self._states is not None and not self._states.has_room(plan.active, plan.num_cached_tokens):
            return False
        kept = [sum(map(self._num_missing_blocks, prefilling, repeat(index))) for index in range(len(needed))]
        return all(
            num_blocks + num_kept + (0 if is_alone else group.watermark) <= group.num_available
            for group, num_blocks, num_kept in zip(self._groups, needed, kept, strict=True)
        )

    def _num_missing_blocks(self, sequence: Sequence, group: int) -> int:
        """Blocks of a block group that the rest of a prefill takes at most at a time."""
        num_blocks = -(-sequence.num_prefill_tokens // self._block_size)
        num_missing = num_blocks - sequence.kv.groups[group].num_allocated_blocks
        window = self._groups[group].window
        return num_missing if window is None else min(num_missing, window.num_blocks(self._block_size))

    def chunk_size(self, active: ActiveSequence, start: int, end: int, budget: int) -> int:
        """Tokens of the next chunk of a prefill of `active` from `start` to `end`, at most `budget`.

        A chunk ends at `end` or on a block boundary; 0 if `budget` does not reach the next boundary. It does
        not pass the next place where a state is saved.
        """
        if self._states is not None:
            end = self._states.next_stop(active, start, end)
        if end - start <= budget:
            return end - start
        return max(0, (start + budget) // self._block_size * self._block_size - start)

    def allocate(
        self, key: SequenceKey, active: ActiveSequence, num_tokens: int, *, first_query: int = 0
    ) -> int:
        """Allocate blocks for the first `num_tokens` tokens; tokens from `first_query` on are computed next.

        In a group with a window, a starting sequence begins at the first block that `first_query` sees, and
        uses the cached blocks from there before new ones. Sequences may be longer than such a group: if its
        blocks are short, fewer tokens are allocated.

        Returns:
            The number of tokens with blocks, above `first_query`.

        Raises:
            OutOfBlocks: no block was added. It does not occur directly after `can_admit` returned True.
            OutOfStates: the same for the state of a sequence that begins.
        """
        self._planned = None
        parts = active.groups
        self._place_state(key, active, first_query)
        for group, part in zip(self._groups, parts, strict=True):
            if group.window is not None:
                if part.num_allocated_blocks == part.num_released_blocks:
                    part.skip_blocks(first_needed_block(group.window, first_query, self._block_size))
                    self._extend([part], key, first_query // self._block_size * self._block_size)
                self._release_hidden(key, part, group.window, first_query)
                num_tokens = group.cap_to_available(part, num_tokens, first_query)
        self._extend(parts, key, num_tokens)
        return num_tokens

    def grow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Allocate slots for the newest tokens of `sequences` in one go, where that preempts nobody.

        Returns the sequences that need `append` instead. A step has one run of grows, in a cache of one group
        with full attention.
        """
        if self._has_windows or self._grows or self.num_available < len(sequences):
            return sequences
        rows, others = [], []
        for sequence in sequences:
            active = sequence.kv
            is_saved = self._states is not None and self._states.is_stop(active, len(active), None)
            grow = None if is_saved else self._ledger.grow(active, sequence.newest_token, self._events)
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
        for group, part in zip(self._groups, active.groups, strict=True):
            if group.window is not None:
                next_release = group.window.next_release(part.num_released_blocks, self._block_size)
                end = min(end, max(next_release, len(active)))
        sequence.kv_end = end

    def push(self, key: SequenceKey, active: ActiveSequence, token: int) -> None:
        """Like `append`, for a sequence outside of the scheduler."""
        for group, part in zip(self._groups, active.groups, strict=True):
            if group.window is not None:
                self._release_hidden(key, part, group.window, len(part))
        opens_block = active.num_slots == len(active)
        if opens_block and not all(group.num_available for group in self._groups[1:]):
            raise OutOfBlocks(1, 0)
        for part in active.groups:
            if signals := part.push(token):
                self._open_block(key, part, signals)
        if self._states is not None and self._states.is_stop(active, position := len(active) - 1, None):
            self._save_state(key, active, position)

    def _open_block(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Apply the signals of the last push, or revert it and raise OutOfBlocks."""
        try:
            for signal in self._groups[active.group].ledger.settle(active, signals):
                self._apply(key, active, signal)
        except OutOfBlocks:
            active.pop()
            raise

    def release(self, key: SequenceKey, active: ActiveSequence, *, keep_content: bool) -> None:
        """Release all blocks of a sequence whose tokens are all in sent steps.

        Complete blocks stay cached, unless `keep_content` is False.
        """
        for group, part in zip(self._groups, active.groups, strict=True):
            if keep_content:
                self.free(key, part, group.ledger.seal(part))
        self.free_blocks(key, active, keep_content=keep_content)

    def free_blocks(self, key: SequenceKey, active: ActiveSequence, *, keep_content: bool) -> None:
        """Like `release`, but the last block is dropped unless it was promoted before."""
        self._release_state(key, active, keep_content=keep_content)
        for part in active.groups:
            self.free(key, part, part.free_signals() if keep_content else part.destroy_signals())

    def new_sequence(self, tokens: tuple[int, ...], *, max_output_tokens: int, salt: int) -> ActiveSequence:
        """Create the accounting of a sequence outside of the scheduler, without blocks and KV events."""

        def in_group(group: int, others: Items[ActiveSequence] = ()) -> ActiveSequence:
            return ActiveSequence(
                tokens,
                block_size=self._block_size,
                max_output_tokens=max_output_tokens,
                salt=salt,
                is_announced=False,
                new_id=self._ids.__next__,
                group=group,
                others=others,
            )

        return in_group(0, [in_group(group) for group in range(1, len(self._groups))])

    def num_cached_tokens(self, active: ActiveSequence) -> int:
        """Leading tokens whose computation the cache saves; never the last token, whose logits are needed."""
        if not self._has_windows and self._states is None:
            return self._ledger.num_cached_tokens(active)
        return longest_hit(
            [
                group.ledger.cached_flags(part)
                for group, part in zip(self._groups, active.groups, strict=True)
            ],
            [group.window for group in self._groups],
            block_size=self._block_size,
            max_tokens=max(0, len(active) - 1),
            ends=None if self._states is None else self._states.hit_blocks(active),
        )

    def free(self, key: SequenceKey, active: ActiveSequence, signals: list[Signal]) -> None:
        """Apply `signals` that release blocks, in the group of `active`."""
        for signal in signals:
            self._apply(key, active, signal)

    def check_integrity(self, sequences: list[ActiveSequence]) -> None:
        """Check the ledgers, and that `sequences` are all owners of blocks. Raises IntegrityBroken."""
        for number, group in enumerate(self._groups):
            group.ledger.check_integrity([active.groups[number] for active in sequences])
        if self._states is not None:
            self._states.check_integrity(sequences)

    def _active_sequence(self, sequence: Sequence) -> ActiveSequence:
        """Cache the accounting of the queue head: hashing a long prompt in every step would be slow."""
        planned = self._planned
        if planned and planned.sequence is sequence and planned.restart_count == sequence.restart_count:
            return planned.active
        others = [self._new_active(sequence, group) for group in range(1, len(self._groups))]
        active = self._new_active(sequence, 0, others)
        self._planned = _Planned(sequence, sequence.restart_count, active)
        return active

    def _new_active(
        self, sequence: Sequence, group: int, others: Items[ActiveSequence] = ()
    ) -> ActiveSequence:
        return ActiveSequence(
            sequence.all_tokens,
            block_size=self._block_size,
            max_output_tokens=sequence.num_tokens_to_generate,
            salt=salt_of(sequence.cache_salt) if sequence.cache_salt else DEFAULT_SALT,
            num_public_blocks=sequence.num_public_tokens // self._block_size,
            prefix_caching=self._prefix_caching and sequence.shares_cache,
            new_id=self._ids.__next__,
            group=group,
            others=others,
        )

    def _extend(self, parts: Items[ActiveSequence], key: SequenceKey, num_tokens: int) -> None:
        """Allocate `num_tokens` tokens in the groups of all `parts`, or in none."""
        uses = [self._groups[part.group].ledger.prepare(part, num_tokens) for part in parts]
        if len(parts) > 1:
            for part, use in zip(parts, uses, strict=True):
                if use is not None:
                    self._groups[part.group].check_room(use)
        for part, use in zip(parts, uses, strict=True):
            if use is not None:
                self._apply(key, part, use)
            part.commit(num_tokens)

    def _release_hidden(
        self, key: SequenceKey, active: ActiveSequence, window: KvWindow, first_query: int
    ) -> None:
        """Release blocks that `first_query` cannot see; steps that see them were sent before."""
        first_visible = window.first_visible(first_query)
        if first_visible // self._block_size > active.num_released_blocks:
            self.free(key, active, active.release_before(first_visible))

    def _place_state(self, key: SequenceKey, active: ActiveSequence, first_query: int) -> None:
        """Begin the state of a sequence that starts at `first_query`, or save it where a prefill stopped."""
        if self._states is None:
            return
        if active.state is None:
            self._send_states(key, self._states.start(active, first_query))
        elif self._states.is_stop(active, first_query, len(active)):
            self._save_state(key, active, first_query)

    def _save_state(self, key: SequenceKey, active: ActiveSequence, position: int) -> None:
        assert self._states is not None
        pool = self._ledger.pool
        signals = self._states.save(active, position, lambda name: FullBlock(name) in pool)
        self._send_states(key, signals)

    def _release_state(self, key: SequenceKey, active: ActiveSequence, *, keep_content: bool) -> None:
        if self._states is not None:
            self._send_states(key, self._states.end(active))
            if not keep_content:
                self._send_states(key, self._states.discard(active))

    def _send_states(self, key: SequenceKey, signals: Items[StateSignal]) -> None:
        self._pending += [SequenceSignal(key, signal) for signal in signals]

    def _apply(self, key: SequenceKey, active: ActiveSequence, signal: Signal) -> None:
        group = active.group
        events = self._groups[group].ledger.apply(active, signal)
        if events and group == 0:
            self._events += self._ledger.announced(events)
        self._pending.append(SequenceSignal(key, signal, group))
