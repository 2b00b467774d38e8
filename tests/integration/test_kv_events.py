"""KV events over gRPC describe the cache to a router, through load and a new epoch."""

from __future__ import annotations

import asyncio
import struct
from contextlib import aclosing
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import pytest
from xxhash import xxh3_64_intdigest

from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, kv_events_pb2
from tests.integration.cluster import DEADLINE_S, Cluster, RequestCase
from tests.integration.request_cases import mixed_cases
from wire.errors import Overloaded
from wire.transport import PLAIN

LAYERS = (1, 2)


class Router:
    """Follows the stream and tracks the cached blocks."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cached: set[int] = set()
        self.next_event_id = 0
        self.epochs: list[int] = []
        self.token_ids: list[int] = []
        """Of all stored blocks, if requested."""

    async def read_snapshot(self) -> None:
        is_last = False
        while not is_last:
            message = await self._read()
            snapshot = message.snapshot
            self.cached |= {block.sequence_hash for block in snapshot.blocks}
            self.next_event_id, is_last = snapshot.next_event_id, snapshot.is_last

    async def read_event(self) -> None:
        event = (await self._read()).event
        assert event.event_id == self.next_event_id, "a gap"
        self.next_event_id += 1
        match event.WhichOneof("change"):
            case "stored":
                assert not self.cached & set(event.stored.sequence_hashes)
                assert event.stored.HasField("parent") <= (event.stored.parent in self.cached)
                self.cached |= set(event.stored.sequence_hashes)
                self.token_ids += event.stored.token_ids
            case "removed":
                assert self.cached >= set(event.removed.sequence_hashes)
                self.cached -= set(event.removed.sequence_hashes)
            case "cleared":
                self.cached = set()
                self.epochs.append(event.epoch)

    async def read_until(self, event_id: int) -> None:
        while self.next_event_id < event_id:
            await self.read_event()

    async def _read(self) -> kv_events_pb2.WatchKvEventsResponse:
        async with asyncio.timeout(DEADLINE_S):
            message = await self._call.read()
        assert message is not grpc.aio.EOF
        answer: kv_events_pb2.WatchKvEventsResponse = message
        return answer


async def read_to_the_end(call: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await call.read() is not grpc.aio.EOF:
            pass
        await call.code()


def cached_now(cluster: Cluster) -> set[int]:
    kv = cluster.server.engine.scheduler.kv
    assert kv is not None
    return {block.sequence_hash for block in kv.cached_blocks()}


async def test_kv_events_track_the_cache_through_load_and_a_new_epoch(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=LAYERS, max_kv_tokens=256) as cluster:
        await cluster.generate_all(mixed_cases(6))
        async with PLAIN.channel(cluster.address) as channel:
            router = Router(
                cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(kv_events_pb2.WatchKvEventsRequest())
            )
            await router.read_snapshot()
            assert router.cached == cached_now(cluster) != set()
            await cluster.generate_all(mixed_cases(12, seed=1))
            feed = cluster.server.engine.kv_events
            await router.read_until(feed.subscribe().snapshot.next_event_id)
            assert router.cached == cached_now(cluster)
            assert router.epochs == []
            epoch = cluster.epoch
            cluster.server.controller.fail_epoch(epoch, "for the test")
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            await cluster.generate_all(mixed_cases(3, seed=2))
            await router.read_until(feed.subscribe().snapshot.next_event_id)
            assert router.epochs == [epoch, cluster.epoch]
            assert router.cached == cached_now(cluster) != set()


async def test_a_subscriber_that_is_too_slow_gets_resource_exhausted(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=LAYERS) as cluster, PLAIN.channel(cluster.address) as channel:
        cluster.server.engine.kv_events._buffer_size = 1
        call: Any = cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(kv_events_pb2.WatchKvEventsRequest())
        await Router(call).read_snapshot()
        await cluster.generate_all(mixed_cases(8, prompt_lengths=(50,)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "subscribe again" in (caught.value.details() or "")
        assert len(cluster.server.engine.kv_events._subscriptions) == 0


async def test_a_disconnected_subscriber_is_removed(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=LAYERS) as cluster, PLAIN.channel(cluster.address) as channel:
        call = cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(kv_events_pb2.WatchKvEventsRequest())
        await Router(call).read_snapshot()
        feed = cluster.server.engine.kv_events
        assert len(feed._subscriptions) == 1
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while feed._subscriptions:
                await asyncio.sleep(0.01)


async def test_the_client_follows_the_cache_and_gets_a_new_snapshot_when_it_was_too_slow(
    tiny_llama: Path,
) -> None:
    async with Cluster(tiny_llama, layers=LAYERS) as cluster, asyncio.timeout(DEADLINE_S):
        await cluster.generate_all(mixed_cases(3))
        feed = cluster.server.engine.kv_events
        async with aclosing(cluster.client.kv_events()) as items:
            first = await anext(items)
            assert isinstance(first, kv_events_pb2.KvSnapshot)
            assert {block.sequence_hash for block in first.blocks} == cached_now(cluster) != set()
            (subscription,) = feed._subscriptions
            subscription.end(Overloaded("for the test"))
            await cluster.generate_all(mixed_cases(6, seed=1))
            second = await anext(items)
            assert isinstance(second, kv_events_pb2.KvSnapshot)
            assert second.next_event_id >= first.next_event_id
            assert {block.sequence_hash for block in second.blocks} <= cached_now(cluster)
        while feed._subscriptions:
            await asyncio.sleep(0.01)


async def test_a_router_can_compute_hashes_of_salted_blocks(tiny_llama: Path) -> None:
    """By the rules in kv_events.proto alone."""
    prompt, block_size = list(range(1, 18)), 8
    packed = struct.pack("<8I", *prompt[:block_size]), struct.pack("<8I", *prompt[block_size:16])
    expected = set()
    async with Cluster(tiny_llama, layers=LAYERS) as cluster, asyncio.timeout(DEADLINE_S):
        for cache_salt in ("", "a", "b"):
            async for _ in cluster.client.generate(prompt, max_tokens=1, cache_salt=cache_salt):
                pass
            salt = xxh3_64_intdigest(cache_salt.encode(), 0) if cache_salt else 1337
            first, second = (xxh3_64_intdigest(block, salt) for block in packed)
            expected |= {first, xxh3_64_intdigest(struct.pack("<QQ", first, second), 1337)}
        async with aclosing(cluster.client.kv_events()) as items:
            snapshot = await anext(items)
        assert isinstance(snapshot, kv_events_pb2.KvSnapshot)
        assert {block.sequence_hash for block in snapshot.blocks} == expected
        status = await cluster.client.status()
        assert (snapshot.cluster, snapshot.fingerprint) == ("default", status.fingerprint)
        assert UUID(snapshot.incarnation).version == 7


@pytest.mark.full
async def test_salts_hits_and_preemptions_show_in_usage_and_status(tiny_llama: Path) -> None:
    prompt = list(range(1, 42))
    async with Cluster(tiny_llama, layers=LAYERS, max_kv_tokens=96) as cluster:
        cached = []
        for salt in ("", "a", "b", "a", ""):
            outputs = [
                output async for output in cluster.client.generate(prompt, max_tokens=2, cache_salt=salt)
            ]
            usage = outputs[-1].usage
            assert usage is not None
            cached.append(usage.cached_tokens)
        # 12 blocks of 8 tokens: each salt has 5 of them; the third one's evict the ends of the first one's.
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0
        status = await cluster.wait_drained()
        assert status.requests.prompt_tokens == 5 * len(prompt)
        assert status.requests.cached_tokens == sum(cached)
        for worker in status.workers:
            kv = worker.kv
            assert (kv.blocks_active, kv.blocks_inactive + kv.blocks_free) == (0, 12)
            assert kv.blocks_wanted == 5 * 5
            assert kv.blocks_hit == sum(cached) // 8
        cases = [RequestCase(prompt=(number,), max_tokens=60) for number in range(4)]
        assert all(answer.succeeded for answer in await cluster.generate_all(cases))
        status = await cluster.wait_drained()
        assert status.requests.preemptions > 0
