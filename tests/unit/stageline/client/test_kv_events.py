"""`Client.kv_events` over scripted subscriptions, one script per call."""

# ruff: noqa: N802 - gRPC names the methods

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

import stageline
from stageline import Client
from stageline_rpc.v1 import cluster_pb2_grpc
from stageline_rpc.v1.kv_events_pb2 import (
    KvBlock,
    KvCleared,
    KvEvent,
    KvSnapshot,
    WatchKvEventsRequest,
    WatchKvEventsResponse,
)

DEADLINE_S = 10.0
Step = WatchKvEventsResponse | grpc.StatusCode
"""A message, or the status that ends the subscription."""


def snapshot(next_event_id: int, *hashes: int, is_last: bool = True) -> WatchKvEventsResponse:
    blocks = [KvBlock(sequence_hash=block_hash, block_hash=block_hash) for block_hash in hashes]
    message = KvSnapshot(epoch=1, block_size=16, blocks=blocks, is_last=is_last, next_event_id=next_event_id)
    return WatchKvEventsResponse(snapshot=message)


def event(event_id: int) -> WatchKvEventsResponse:
    return WatchKvEventsResponse(event=KvEvent(event_id=event_id, epoch=1, cleared=KvCleared()))


@dataclass(kw_only=True, slots=True)
class Script(cluster_pb2_grpc.ClusterServicer):
    subscriptions: list[Sequence[Step]]
    """Of each call in turn; a subscription without a status at its end stays open."""
    requests: list[WatchKvEventsRequest] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def WatchKvEvents(
        self, request: WatchKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[WatchKvEventsResponse]:
        self.requests.append(request)
        for step in self.subscriptions.pop(0):
            if isinstance(step, grpc.StatusCode):
                await context.abort(step, "for the test")
            else:
                yield step
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@asynccontextmanager
async def subscribed(*subscriptions: Sequence[Step]) -> AsyncIterator[tuple[Client, Script]]:
    server = grpc.aio.server()
    script = Script(subscriptions=list(subscriptions))
    cluster_pb2_grpc.add_ClusterServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}", reattach_timeout_s=DEADLINE_S) as client:
        yield client, script
    await server.stop(0)


async def take(client: Client, count: int) -> list[tuple[str, int]]:
    """Kind of each item, with the next event's id for snapshots and the own id for events."""
    taken: list[tuple[str, int]] = []
    async with asyncio.timeout(DEADLINE_S):
        async for item in client.kv_events():
            is_snapshot = isinstance(item, KvSnapshot)
            taken.append(("snapshot", item.next_event_id) if is_snapshot else ("event", item.event_id))
            if len(taken) == count:
                break
    return taken


async def test_a_snapshot_in_parts_is_one_item_before_its_events() -> None:
    first = [snapshot(7, 1, 2, is_last=False), snapshot(7, 3), event(7), event(8)]
    async with subscribed(first) as (client, script), asyncio.timeout(DEADLINE_S):
        items = []
        async for item in client.kv_events(with_token_ids=True):
            items.append(item)
            if len(items) == 3:
                break
        assert isinstance(items[0], KvSnapshot)
        assert [block.sequence_hash for block in items[0].blocks] == [1, 2, 3]
        assert [item.event_id for item in items[1:] if isinstance(item, KvEvent)] == [7, 8]
        assert [request.with_token_ids for request in script.requests] == [True]
        await script.left.wait()


@pytest.mark.parametrize("status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_an_ended_subscription_is_renewed_with_a_snapshot_that_tells_what_was_missed(
    status: grpc.StatusCode,
) -> None:
    restarted = [snapshot(0)]
    async with subscribed([snapshot(5), event(5), status], [snapshot(9), event(9), status], restarted) as (
        client,
        script,
    ):
        expected = [("snapshot", 5), ("event", 5), ("snapshot", 9), ("event", 9), ("snapshot", 0)]
        assert await take(client, 5) == expected
        assert len(script.requests) == 3


async def test_a_status_that_no_renewal_mends_is_raised() -> None:
    async with subscribed([snapshot(0), grpc.StatusCode.PERMISSION_DENIED]) as (client, script):
        with pytest.raises(stageline.PermissionDenied):
            await take(client, 2)
        assert len(script.requests) == 1


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([snapshot(5), event(6)], id="an event is missing"),
        pytest.param([snapshot(5), event(5), event(5)], id="an event is repeated"),
        pytest.param([snapshot(5), snapshot(5)], id="a second snapshot"),
        pytest.param([snapshot(5, is_last=False), event(5)], id="an event within the snapshot"),
    ],
)
async def test_events_that_do_not_continue_are_an_error(steps: list[Step]) -> None:
    async with subscribed(steps) as (client, _):
        with pytest.raises(stageline.ServerError, match="KV event"):
            await take(client, 4)


async def test_an_unreachable_coordinator_is_unavailable_after_the_reattach_timeout() -> None:
    unavailable = [grpc.StatusCode.UNAVAILABLE]
    async with subscribed([snapshot(0), *unavailable], *[unavailable] * 50) as (client, _):
        client._timeouts = type(client._timeouts)(connect_timeout_s=DEADLINE_S, reattach_timeout_s=0.3)
        with pytest.raises(stageline.Unavailable, match=r"could not be subscribed to for 0\.3 s"):
            await take(client, 2)
