"""Publishes cached blocks to subscribers: one snapshot, then every change in order.

Everything but the waiting runs on the event loop without awaiting, like the engine that feeds it, so a
snapshot and the changes after it fit together.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvcache import Announced, CachedBlock, Event
from wire.errors import ClusterUnavailable, Overloaded, ServingError

BUFFERED_CHANGES = 4096
"""Changes that may wait for one subscriber; about what 256 sequences bring forth in a thousand steps."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """An epoch has begun or ended: nothing is cached."""

    event_id: int


@dataclass(frozen=True, slots=True)
class KvChange:
    """One event; ids count from 0 for the process, without gaps, through all epochs.

    `packed_tokens` are those of the blocks that it stores, as little-endian u32.
    """

    epoch: int
    event: Event | Cleared
    packed_tokens: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """Everything that is cached between the events before `next_event_id` and those from it on."""

    epoch: int
    block_size: int
    blocks: tuple[CachedBlock, ...]
    next_event_id: int


class KvSubscription:
    """One subscriber's snapshot and the changes that wait for it."""

    def __init__(
        self, snapshot: KvSnapshot, *, buffer_size: int, on_close: Callable[["KvSubscription"], None]
    ) -> None:
        self.snapshot = snapshot
        self._waiting: deque[KvChange] = deque()
        self._buffer_size = buffer_size
        self._on_close = on_close
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    def put(self, change: KvChange) -> None:
        """Adds a change; one too many ends the subscription with Overloaded."""
        if len(self._waiting) == self._buffer_size:
            self.end(
                Overloaded(
                    f"{self._buffer_size} changes are waiting to be read, which is the limit: "
                    "subscribe again for a new snapshot"
                )
            )
            return
        self._waiting.append(change)
        self._changed.set()

    def end(self, error: ServingError) -> None:
        """Ends the subscription: the reader gets `error` next, and what was waiting is forgotten."""
        self._error = error
        self._waiting.clear()
        self._changed.set()
        self.close()

    def close(self) -> None:
        """The subscriber is gone."""
        self._on_close(self)

    async def changes(self) -> AsyncIterator[KvChange]:
        """Changes as they come, for as long as the caller's stream lives. Raises what ended the
        subscription.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                yield self._waiting.popleft()
            if self._error is not None:
                raise self._error


class KvEventPublisher:
    """The source of all subscriptions."""

    def __init__(self, *, buffer_size: int = BUFFERED_CHANGES) -> None:
        self._buffer_size = buffer_size
        self._subscriptions: set[KvSubscription] = set()
        self._next_event_id = 0
        self._epoch = 0
        self._block_size = 0
        self._cached_blocks: Callable[[], Iterable[CachedBlock]] = tuple

    def begin_epoch(
        self, epoch: int, *, block_size: int, cached_blocks: Callable[[], Iterable[CachedBlock]]
    ) -> None:
        """An empty cache; `cached_blocks` tells what is in it whenever someone subscribes."""
        self._epoch, self._block_size, self._cached_blocks = epoch, block_size, cached_blocks
        self._tell(Cleared(self._new_event_id()))

    def end_epoch(self) -> None:
        """The cache is gone."""
        self._cached_blocks = tuple
        self._tell(Cleared(self._new_event_id()))

    def publish(self, announced: Sequence[Announced]) -> None:
        """Passes on what the ledger has done since the last call, with the feed's own ids."""
        if not self._subscriptions:
            self._next_event_id += len(announced)
            return
        for event, packed_tokens in announced:
            self._tell(replace(event, event_id=self._new_event_id()), packed_tokens)

    def subscribe(self) -> KvSubscription:
        """From this moment on; to be closed when the subscriber's call ends."""
        snapshot = KvSnapshot(
            self._epoch, self._block_size, tuple(self._cached_blocks()), self._next_event_id
        )
        subscription = KvSubscription(
            snapshot, buffer_size=self._buffer_size, on_close=self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """Ends every subscription as UNAVAILABLE."""
        for subscription in list(self._subscriptions):
            subscription.end(ClusterUnavailable("the coordinator is stopping"))

    def _tell(self, event: Event | Cleared, packed_tokens: bytes = b"") -> None:
        change = KvChange(self._epoch, event, packed_tokens)
        for subscription in list(self._subscriptions):
            subscription.put(change)

    def _new_event_id(self) -> int:
        event_id = self._next_event_id
        self._next_event_id += 1
        return event_id
