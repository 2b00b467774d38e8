"""A snapshot and the changes after it always add up to the cached blocks; ids have no gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import kvcache.hashing
from coordinator.api.cluster_service import (
    BLOCKS_PER_MESSAGE,
    TOKENS_PER_MESSAGE,
    KvOrigin,
    encode_change,
    encode_snapshot,
)
from coordinator.scheduler.kv_events import Cleared, KvChange, KvEventPublisher, KvSubscription
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.sequence import QueueOrder, Sequence
from kvcache import CachedBlock, Removed, Stored, salt_of
from kvcache.hashing import block_hash, pack_tokens, sequence_hash
from tests.unit.coordinator.scheduler.pipeline_model import GREEDY, key_of
from wire.errors import ClusterUnavailable, Overloaded


def new_sequence(
    prompt: tuple[int, ...], *, number: int = 0, cache_salt: str = "", shares_cache: bool = True
) -> Sequence:
    return Sequence(
        key_of(number),
        prompt,
        max_tokens=1,
        sampling=GREEDY,
        stop_token_ids=frozenset(),
        order=QueueOrder(0.0, number),
        cache_salt=cache_salt,
        shares_cache=shares_cache,
    )


def serve(log: KvCacheManager, prompt: tuple[int, ...], *, number: int = 0, cache_salt: str = "") -> None:
    """Allocates and frees the blocks of a prompt."""
    sequence = new_sequence(prompt, number=number, cache_salt=cache_salt)
    active = log.plan(sequence).active
    log.allocate(sequence.key, active, len(prompt))
    log.free(sequence.key, active, active.free_signals())


async def read(subscription: KvSubscription, count: int) -> list[KvChange]:
    changes = subscription.changes()
    async with asyncio.timeout(5):
        return [await anext(changes) for _ in range(count)]


@pytest.fixture
def log() -> KvCacheManager:
    return KvCacheManager(num_blocks=3, block_size=2)


@pytest.fixture
def feed(log: KvCacheManager) -> Iterator[KvEventPublisher]:
    feed = KvEventPublisher(buffer_size=5)
    feed.begin_epoch(4, block_size=2, cached_blocks=log.cached_blocks)
    yield feed
    assert len(feed._subscriptions) == 0


async def test_a_snapshot_has_the_cached_blocks_and_changes_continue_from_it(
    log: KvCacheManager, feed: KvEventPublisher
) -> None:
    serve(log, (1, 2, 3, 4))
    feed.publish(log.take_events())
    subscription = feed.subscribe()
    first, second = block_hash([1, 2]), block_hash([3, 4])
    assert subscription.snapshot.epoch == 4
    assert subscription.snapshot.block_size == 2
    assert subscription.snapshot.blocks == (
        CachedBlock(first, first, None),
        CachedBlock(sequence_hash(first, second), second, first),
    )
    assert subscription.snapshot.next_event_id == 2
    serve(log, (5, 6, 7, 8))
    feed.publish(log.take_events())
    third, fourth = block_hash([5, 6]), block_hash([7, 8])
    # One page was free; the tail of the first prompt is evicted before its head.
    assert await read(subscription, 2) == [
        KvChange(4, Removed((sequence_hash(first, second),), 2)),
        KvChange(4, Stored(None, (third, sequence_hash(third, fourth)), (third, fourth), 3)),
    ]
    subscription.close()


async def test_a_new_epoch_clears_the_cache_and_continues_the_ids(
    log: KvCacheManager, feed: KvEventPublisher
) -> None:
    serve(log, (1, 2))
    feed.publish(log.take_events())
    subscription = feed.subscribe()
    feed.end_epoch()
    assert feed.subscribe().snapshot.blocks == ()
    fresh = KvCacheManager(num_blocks=3, block_size=2)
    feed.begin_epoch(5, block_size=2, cached_blocks=fresh.cached_blocks)
    serve(fresh, (1, 2))
    feed.publish(fresh.take_events())
    name = block_hash([1, 2])
    assert await read(subscription, 3) == [
        KvChange(4, Cleared(2)),
        KvChange(5, Cleared(3)),
        KvChange(5, Stored(None, (name,), (name,), 4)),
    ]
    feed.close()


async def test_a_slow_subscriber_is_dropped_without_delaying_others(
    log: KvCacheManager, feed: KvEventPublisher
) -> None:
    slow, quick = feed.subscribe(), feed.subscribe()
    for number in range(6):
        serve(log, (number, number), number=number)
        feed.publish(log.take_events())
        await read(quick, 1 if number < 3 else 2)
        assert len(feed._subscriptions) == (2 if number < 4 else 1)
    with pytest.raises(Overloaded, match="5 KV changes are unread"):
        await read(slow, 1)
    again = feed.subscribe()
    assert {block.sequence_hash for block in again.snapshot.blocks} == {
        block_hash([number, number]) for number in (3, 4, 5)
    }
    again.close()
    quick.close()


async def test_the_end_of_the_coordinator_ends_every_subscription(feed: KvEventPublisher) -> None:
    subscription = feed.subscribe()
    feed.close()
    with pytest.raises(ClusterUnavailable):
        await read(subscription, 1)


def test_blocks_of_a_salt_are_announced_with_their_own_hashes(log: KvCacheManager) -> None:
    serve(log, (1, 2), cache_salt="tenant")
    (block,) = log.cached_blocks()
    assert block.block_hash == block_hash([1, 2], salt_of("tenant")) != block_hash([1, 2])


def test_private_blocks_are_never_announced(log: KvCacheManager) -> None:
    private = new_sequence((1, 2, 3, 4, 5), shares_cache=False)
    active = log.plan(private).active
    log.allocate(private.key, active, 5)
    assert list(log.cached_blocks()) == []
    log.release(private.key, active, keep_content=True)
    assert log.take_events() == []
    assert (log.num_inactive, log.num_free) == (0, 3)


def test_private_blocks_after_a_collision_are_not_announced(
    log: KvCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(log, (1, 2))
    collision = block_hash([1, 2])
    monkeypatch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: collision)
    colliding = new_sequence((5, 6, 7), number=1)
    active = log.plan(colliding).active
    log.allocate(colliding.key, active, 3)
    log.release(colliding.key, active, keep_content=True)
    ((stored, _),) = log.take_events()
    assert stored == Stored(None, (collision,), (collision,), stored.event_id)
    assert [block.sequence_hash for block in log.cached_blocks()] == [collision]
    assert (log.num_inactive, log.num_free) == (1, 2)


ORIGIN = KvOrigin(cluster="east", incarnation="a-uuid", fingerprint="f" * 32)


async def test_snapshots_and_changes_name_their_cluster(log: KvCacheManager, feed: KvEventPublisher) -> None:
    subscription = feed.subscribe()
    (message,) = encode_snapshot(subscription.snapshot, ORIGIN)
    snapshot = message.snapshot
    assert (snapshot.cluster, snapshot.incarnation, snapshot.fingerprint) == ("east", "a-uuid", "f" * 32)
    assert encode_change(KvChange(3, Cleared(13)), ORIGIN.cluster).event.cluster == "east"
    subscription.close()


async def test_a_large_snapshot_is_sent_in_parts_and_an_empty_one_in_one(
    log: KvCacheManager, feed: KvEventPublisher
) -> None:
    subscription = feed.subscribe()
    (empty,) = encode_snapshot(subscription.snapshot, ORIGIN)
    assert empty.snapshot.is_last
    subscription.close()
    large = [CachedBlock(index, index, None) for index in range(2 * BLOCKS_PER_MESSAGE + 1)]
    feed.begin_epoch(5, block_size=2, cached_blocks=lambda: large)
    subscription = feed.subscribe()
    parts = list(encode_snapshot(subscription.snapshot, ORIGIN))
    assert [part.snapshot.is_last for part in parts] == [False, False, True]
    assert [block.sequence_hash for part in parts for block in part.snapshot.blocks] == [
        block.sequence_hash for block in large
    ]
    subscription.close()


async def test_a_snapshot_keeps_both_hashes_and_the_parent_on_the_wire(
    log: KvCacheManager, feed: KvEventPublisher
) -> None:
    serve(log, (1, 2, 3, 4))
    subscription = feed.subscribe()
    (message,) = encode_snapshot(subscription.snapshot, ORIGIN)
    first, second = block_hash([1, 2]), block_hash([3, 4])
    announced = [
        (block.sequence_hash, block.block_hash, block.parent if block.HasField("parent") else None)
        for block in message.snapshot.blocks
    ]
    assert announced == [(first, first, None), (sequence_hash(first, second), second, first)]
    assert first != second
    subscription.close()


async def test_token_ids_are_sent_on_request(log: KvCacheManager, feed: KvEventPublisher) -> None:
    serve(log, (1, 2, 3, 4))
    feed.publish(log.take_events())
    subscription = feed.subscribe()
    serve(log, (7, 4_000_000_000, 8, 9), number=1)
    feed.publish(log.take_events())
    *_, change = await read(subscription, 2)
    for asked, of_blocks, of_stored in (
        (False, [[], []], []),
        (True, [[1, 2], [3, 4]], [7, 4_000_000_000, 8, 9]),
    ):
        (message,) = encode_snapshot(subscription.snapshot, ORIGIN, with_token_ids=asked)
        assert [list(block.token_ids) for block in message.snapshot.blocks] == of_blocks
        assert (
            list(encode_change(change, ORIGIN.cluster, with_token_ids=asked).event.stored.token_ids)
            == of_stored
        )
    subscription.close()


async def test_a_snapshot_with_token_ids_is_sent_in_parts_of_bounded_size(feed: KvEventPublisher) -> None:
    block_size = TOKENS_PER_MESSAGE // 4
    large = [CachedBlock(index, index, None, pack_tokens([2**32 - 1] * block_size)) for index in range(5)]
    feed.begin_epoch(5, block_size=block_size, cached_blocks=lambda: large)
    subscription = feed.subscribe()
    parts = list(encode_snapshot(subscription.snapshot, ORIGIN, with_token_ids=True))
    assert [len(part.snapshot.blocks) for part in parts] == [4, 1]
    assert max(part.ByteSize() for part in parts) < 1024 * 1024
    subscription.close()


def test_changes_keep_their_fields_on_the_wire() -> None:
    stored = encode_change(KvChange(3, Stored(7, (8, 9), (1, 2), 11)), ORIGIN.cluster).event
    assert (stored.event_id, stored.epoch, stored.stored.parent) == (11, 3, 7)
    assert list(stored.stored.sequence_hashes) == [8, 9]
    assert list(stored.stored.block_hashes) == [1, 2]
    assert not encode_change(KvChange(3, Stored(None, (8,), (1,), 11)), ORIGIN.cluster).event.stored.HasField(
        "parent"
    )
    removed = encode_change(KvChange(3, Removed((8, 9), 12)), ORIGIN.cluster).event
    assert list(removed.removed.sequence_hashes) == [8, 9]
    assert encode_change(KvChange(3, Cleared(13)), ORIGIN.cluster).event.WhichOneof("change") == "cleared"
