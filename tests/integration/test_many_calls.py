"""Thousands of concurrent calls: each is served, or rejected by the coordinator itself and counted."""

import asyncio
import re
import time
from collections import Counter
from functools import partial

import grpc
import pytest

from stageline.client.client import Client
from stageline.client.errors import StatusDetails
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.cluster import Cluster
from tests.integration.test_connections import change_option
from tests.integration.test_mock_cluster import mock_cluster
from wire import channels
from wire.peer_limits import PeerLimits
from wire.transport import PLAIN

pytestmark = pytest.mark.full


NUM_CALLS = 2000
NUM_BEYOND = 400
"""Calls at once over a connection for 20."""
DEADLINE_S = 300.0


async def end_of(stub: inference_pb2_grpc.InferenceStub) -> str:
    """OK, or the status, the reason and whether there is a retry-after hint."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), max_tokens=1)
    try:
        async for _ in stub.Generate(request, timeout=DEADLINE_S):
            pass
    except grpc.aio.AioRpcError as error:
        details = StatusDetails.of(error)
        return f"{error.code().name} {details.reason} {details.retry_after_s is not None}"
    return "OK"


async def ends_of_all(cluster: Cluster, held_s: float) -> Counter[str]:
    """Start all calls while the serving event loop is blocked, so that they arrive at once."""
    async with PLAIN.channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await channel.channel_ready()
        calls = [asyncio.create_task(end_of(stub)) for _ in range(NUM_CALLS)]
        for _ in range(5):
            await asyncio.sleep(0)
        time.sleep(held_s)  # noqa: ASYNC251  # gRPC threads queue the calls meanwhile
        return Counter(await asyncio.gather(*calls))


async def num_counted(cluster: Cluster) -> int:
    """Requests that the coordinator's metrics show as refused for too many."""
    text, _ = await cluster.server.metrics.metrics_text("")
    counted = re.search(rb'^stageline_request_refused\S*reason="overloaded"\S* (\d+)', text, re.MULTILINE)
    assert counted is not None
    return int(counted[1])


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize(
    ("queue_size", "held_s"), [(32, 1.0), (4096, 1.0), pytest.param(4096, 32.0, marks=pytest.mark.nightly)]
)
async def test_each_of_2000_concurrent_calls_is_served_or_rejected(queue_size: int, held_s: float) -> None:
    async with mock_cluster(1, "step=0us", queue_size=queue_size) as cluster:
        ends = await ends_of_all(cluster, held_s)
        finished = cluster.server.engine.totals.finished
        refused = ends["RESOURCE_EXHAUSTED OVERLOADED True"]
        assert ends["OK"] + refused == NUM_CALLS, ends
        assert finished == ends["OK"]
        assert await num_counted(cluster) == refused
        if queue_size >= NUM_CALLS:
            assert not refused


async def tokens_of(client: Client) -> int:
    return sum(
        len(output.token_ids) for output in [o async for o in client.generate([1, 2, 3], max_tokens=2)]
    )


@pytest.mark.matrix(0, full=1)
async def test_calls_beyond_the_streams_of_a_connection_are_all_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client counts a call as ended before the server has forgotten it."""
    change_option(monkeypatch, "grpc.max_concurrent_streams", 20)
    async with mock_cluster(1, "step=0us", queue_size=NUM_BEYOND) as cluster:
        async with PLAIN.channel(cluster.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await channel.channel_ready()
            ends = Counter(await asyncio.gather(*(end_of(stub) for _ in range(NUM_BEYOND))))
        assert ends == {"OK": NUM_BEYOND}


@pytest.mark.matrix(0, full=1)
async def test_the_client_sends_calls_again_that_a_server_refused_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_option(monkeypatch, "grpc.max_concurrent_streams", 20)
    change_option(monkeypatch, "grpc.http.overload_protection", 1)  # a server that refuses, as proxies do
    async with (
        mock_cluster(1, "step=0us", queue_size=NUM_BEYOND) as cluster,
        Client(cluster.address) as client,
    ):
        counts = await asyncio.gather(*(tokens_of(client) for _ in range(NUM_BEYOND)))
        assert counts == [2] * NUM_BEYOND
        assert cluster.server.engine.totals.finished == NUM_BEYOND


@pytest.mark.matrix(0, full=1)
async def test_calls_beyond_the_limit_of_a_host_are_rejected_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "PeerLimits", partial(PeerLimits, max_calls_per_host=5))
    async with (
        mock_cluster(1, "step=50ms", queue_size=NUM_BEYOND) as cluster,
        PLAIN.channel(cluster.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        ends = Counter(await asyncio.gather(*(end_of(stub) for _ in range(NUM_BEYOND))))
        refused = ends["RESOURCE_EXHAUSTED OVERLOADED True"]
        assert refused > 0
        assert ends == {"OK": NUM_BEYOND - refused, "RESOURCE_EXHAUSTED OVERLOADED True": refused}
        assert await num_counted(cluster) == refused
