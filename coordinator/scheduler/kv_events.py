"""Publishes cached blocks to subscribers: one snapshot, then every change in order.

Publishing and subscribing do not await, so a snapshot and the changes after it are consistent.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvcache import Announced, CachedBlock, Event
from wire.errors import ClusterUnavailable, Overloaded, ServingError

BUFFERED_CHANGES = 4096
"""Buffered changes per subscriber; 256 sequences cause about as many in a thousand steps."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache became empty because an epoch started or ended."""

    event_id: int


@dataclass(frozen=True, slots=True)
class KvChange:
    """One event. Ids count from 0 per process, without gaps, across epochs.

    `packed_tokens` are the tokens of stored blocks as little-endian u32.
    """

    epoch: int
    event: Event | Cleared
    packed_tokens: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All cached blocks after the events before `next_event_id`."""

    epoch: int
    block_size: int
    blocks: tuple[CachedBlock, ...]
    next_event_id: int


class KvSubscription:
    """Snapshot and buffered changes of one subscriber."""

    def __init__(
        self, snapshot: KvSnapshot, *, buffer_size: int, on_close: Callable[["KvSubscription"], None]
    ) -> None:
        self.snapshot = snapshot
        self._pending: deque[KvChange] = deque()
        self._buffer_size = buffer_size
        self._on_close = on_close
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    def put(self, change: KvChange) -> None:
        """Buffer a change; a full buffer ends the subscription with Overloaded."""
        if len(self._pending) == self._buffer_size:
            self.end(
                Overloaded(
                    f"{self._buffer_size} KV changes are unread, the limit is {self._buffer_size}: "
                    "subscribe again for a new snapshot"
                )
            )
            return
        self._pending.append(change)
        self._changed.set()

    def end(self, error: ServingError) -> None:
        """End the subscription with `error` and discard buffered changes."""
        self._error = error
        self._pending.clear()
        self._changed.set()
        self.close()

    def close(self) -> None:
        """Stop the subscription."""
        self._on_close(self)

    async def changes(self) -> AsyncIterator[KvChange]:
        """Yield changes until the subscription ends; raises the error that ended it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                yield self._pending.popleft()
            if self._error is not None:
                raise self._error


class KvEventPublisher:
    """Sends the events of the KV ledger to all subscriptions."""

    def __init__(
        self, *, buffer_size: int = BUFFERED_CHANGES, before_snapshot: Callable[[], None] = lambda: None
    ) -> None:
        """`before_snapshot` publishes the events that snapshots include."""
        self._buffer_size = buffer_size
        self._before_snapshot = before_snapshot
        self._subscriptions: set[KvSubscription] = set()
        self._next_event_id = 0
        self._epoch = 0
        self._block_size = 0
        self._cached_blocks: Callable[[], Iterable[CachedBlock]] = tuple

    def begin_epoch(
        self, epoch: int, *, block_size: int, cached_blocks: Callable[[], Iterable[CachedBlock]]
    ) -> None:
        """Start with an empty cache; `cached_blocks` returns its content for snapshots."""
        self._epoch, self._block_size, self._cached_blocks = epoch, block_size, cached_blocks
        self._broadcast(Cleared(self._new_event_id()))

    def end_epoch(self) -> None:
        """Report an empty cache."""
        self._cached_blocks = tuple
        self._broadcast(Cleared(self._new_event_id()))

    def publish(self, announced: Sequence[Announced]) -> None:
        """Publish the events of the ledger since the last call, with ids of this publisher."""
        if not self._subscriptions:
            self._next_event_id += len(announced)
            return
        for event, packed_tokens in announced:
            self._broadcast(replace(event, event_id=self._new_event_id()), packed_tokens)

    def subscribe(self) -> KvSubscription:
        """Start a subscription; close it when the subscriber's call ends."""
        self._before_snapshot()
        snapshot = KvSnapshot(
            self._epoch, self._block_size, tuple(self._cached_blocks()), self._next_event_id
        )
        subscription = KvSubscription(
            snapshot, buffer_size=self._buffer_size, on_close=self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription with ClusterUnavailable."""
        for subscription in list(self._subscriptions):
            subscription.end(ClusterUnavailable("the coordinator is stopping"))

    def _broadcast(self, event: Event | Cleared, packed_tokens: bytes = b"") -> None:
        change = KvChange(self._epoch, event, packed_tokens)
        for subscription in list(self._subscriptions):
            subscription.put(change)

    def _new_event_id(self) -> int:
        event_id = self._next_event_id
        self._next_event_id += 1
        return event_id
