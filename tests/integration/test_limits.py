"""Limits of the queue and per client, and scheduling by priority."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from stageline_rpc.v1 import inference_pb2
from tests.integration.calls import Caller, Reader, StatusCode, message, until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.gate import Gate
from wire.ids import id_text, parse_request_id

LAYERS = (2, 1)
LOW, NORMAL, HIGH = (
    inference_pb2.PRIORITY_LOW,
    inference_pb2.PRIORITY_NORMAL,
    inference_pb2.PRIORITY_HIGH,
)


def big(index: int, **more: Any) -> inference_pb2.GenerateRequest:
    """A request that fills a cache of 64 tokens alone."""
    return message([index] * 40, 8, **more)


@asynccontextmanager
async def one_slot(directory: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, Caller, Gate]]:
    """A cluster that serves one `big` request at a time and pauses while the gate is closed."""
    async with (
        Cluster(directory, layers=LAYERS, max_kv_tokens=64, hop_proxies=[0], **settings) as cluster,
        Caller(cluster.address) as caller,
    ):
        gate = Gate(cluster)
        gate.close()
        yield cluster, caller, gate
        await cluster.wait_drained()


def retry_after_s(reader: Reader) -> float:
    """Retry-after hint in the rich error model of gRPC."""
    metadata = dict(reader.trailing_metadata)
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (StatusCode.RESOURCE_EXHAUSTED.value[0], reader.details)
    _, detail = status.details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    return float(info.retry_delay.ToTimedelta().total_seconds())


async def test_a_full_queue_rejects_with_a_retry_after_hint(varied_llama: Path) -> None:
    async with one_slot(varied_llama, queue_size=2) as (cluster, caller, gate):
        here = [caller.generate(big(index)) for index in range(3)]
        ends = [asyncio.create_task(reader.end()) for reader in here]
        await until(lambda: len(cluster.server.engine.live_sequences) == 3)
        refused = caller.generate(big(3))
        assert await refused.end() is StatusCode.RESOURCE_EXHAUSTED
        assert "2 sequences are waiting, the limit is 2" in refused.details
        assert 0.1 <= retry_after_s(refused) <= 30.0
        gate.open()
        assert await asyncio.gather(*ends) == [StatusCode.OK] * 3
        # The queue is empty, and its rate is known.
        assert await caller.generate(big(3)).end() is StatusCode.OK
        assert (await cluster.client.status()).requests.finished == 4


async def test_the_limit_per_client_affects_no_other_client(varied_llama: Path) -> None:
    settings: dict[str, Any] = {"client_key": "x-tenant", "max_client_requests": 4}
    async with (
        Cluster(varied_llama, layers=LAYERS, hop_proxies=[0], **settings) as cluster,
        Caller(cluster.address) as caller,
        Caller(cluster.address) as other_connection,
    ):
        gate = Gate(cluster)
        gate.close()
        fox, owl = (("x-tenant", "fox"),), (("x-tenant", "owl"),)
        here = [
            caller.generate(message([1], 4), metadata=fox),
            other_connection.generate(message([2], 4, n=3), metadata=fox),
            caller.generate(message([3], 4), metadata=owl),
            # Without the key, clients are identified by address.
            caller.generate(message([4], 4)),
        ]
        ends = [asyncio.create_task(reader.end()) for reader in here]
        await until(lambda: len(cluster.server.engine.registry.live) == 4)
        for stub in (caller, other_connection):
            refused = stub.generate(message([5], 4), metadata=fox)
            assert await refused.end() is StatusCode.RESOURCE_EXHAUSTED
            assert "client fox has 4 active sequences, the limit is 4" in refused.details
            assert retry_after_s(refused) > 0
        gate.open()
        assert await asyncio.gather(*ends) == [StatusCode.OK] * 4
        assert await caller.generate(message([5], 4), metadata=fox).end() is StatusCode.OK
        await cluster.wait_drained()


async def test_without_a_key_a_client_is_identified_by_its_address(varied_llama: Path) -> None:
    async with (
        Cluster(varied_llama, layers=LAYERS, max_client_requests=1) as cluster,
        Caller(cluster.address) as first,
        Caller(cluster.address) as second,
    ):
        reader = first.generate(message([1], 400), metadata=(("x-tenant", "fox"),))
        await reader.next()
        refused = second.generate(message([2], 4), metadata=(("x-tenant", "owl"),))
        assert await refused.end() is StatusCode.RESOURCE_EXHAUSTED
        assert "client 127.0.0.1 has 1 active sequences" in refused.details
        reader.cancel()
        await cluster.wait_drained()
        assert await second.generate(message([2], 4)).end() is StatusCode.OK


@pytest.mark.matrix(1)
@pytest.mark.parametrize("end", ["finish", "cancel", "disconnect", "deadline", "detach", "refusal"])
async def test_a_request_frees_its_place_however_it_ends(varied_llama: Path, end: str) -> None:
    async with (
        Cluster(varied_llama, layers=LAYERS, max_client_requests=1) as cluster,
        Caller(cluster.address) as caller,
    ):
        for _ in range(3):
            reader = caller.generate(
                message(
                    [1] if end != "refusal" else [],
                    400 if end in ("cancel", "disconnect", "deadline") else 8,
                    keep_s=60.0 if end == "detach" else None,
                ),
                timeout_s=0.2 if end == "deadline" else 10.0,
            )
            if end in ("cancel", "disconnect", "detach"):
                await reader.next()
            if end == "cancel":
                assert await caller.cancel(reader.received.request_id) is StatusCode.OK
            if end in ("disconnect", "detach"):
                reader.cancel()
            else:
                await reader.end()
            await cluster.wait_drained()
        assert await caller.generate(message([1], 4)).end() is StatusCode.OK


def starts(cluster: Cluster) -> list[str]:
    """Request ids in the order of their first step."""
    steps = cluster.proxy(0).steps.values()
    found = (id_text(start.sequence.request_id) for step in steps for start in step.starts)
    return list(dict.fromkeys(found))


async def submit(
    cluster: Cluster, caller: Caller, requests: list[inference_pb2.GenerateRequest]
) -> list[asyncio.Task[StatusCode]]:
    """Submit requests one after another, each once the previous one is queued."""
    find = cluster.server.engine.registry.live_request
    ends = []
    for request in requests:
        request_id = parse_request_id(request.request_id)
        ends.append(end := asyncio.create_task(caller.generate(request).end()))
        async with asyncio.timeout(DEADLINE_S):
            while find(request_id) is None and not end.done():
                await asyncio.sleep(0.001)
    return ends


async def test_higher_priorities_start_first_and_equal_ones_in_order(
    varied_llama: Path,
) -> None:
    async with one_slot(varied_llama) as (cluster, caller, gate):
        classes = [NORMAL, NORMAL, LOW, NORMAL, HIGH, inference_pb2.PRIORITY_UNSPECIFIED, HIGH]
        requests = [big(index, priority=priority) for index, priority in enumerate(classes)]
        ends = await submit(cluster, caller, requests)
        gate.open()
        assert await asyncio.gather(*ends) == [StatusCode.OK] * len(classes)
        ids = [request.request_id for request in requests]
        assert starts(cluster) == [ids[index] for index in (0, 4, 6, 1, 3, 5, 2)]


async def test_a_request_gains_one_priority_per_aging_interval(varied_llama: Path) -> None:
    age_s = 0.2
    async with one_slot(varied_llama, priority_age_s=age_s) as (cluster, caller, gate):
        running, low, normal = big(0), big(1, priority=LOW), big(2)
        ends = await submit(cluster, caller, [running, low, normal])
        arrived_s = cluster.server.engine.now_s()
        # By then both requests have aged by two intervals: low counts as high, normal above it.
        await until(lambda: cluster.server.engine.now_s() > arrived_s + 2 * age_s)
        high, late = big(3, priority=HIGH), big(4)
        ends += await submit(cluster, caller, [high, late])
        gate.open()
        assert await asyncio.gather(*ends) == [StatusCode.OK] * 5
        ids = [request.request_id for request in (running, normal, low, high, late)]
        assert starts(cluster) == ids


async def test_no_request_starves(varied_llama: Path) -> None:
    async with one_slot(varied_llama, priority_age_s=0.1) as (cluster, caller, gate):
        gate.open()
        num_overtaking = 0
        low = big(0, priority=LOW)
        (running, waiting) = await submit(cluster, caller, [big(1, priority=HIGH), low])
        while not waiting.done():
            # A request of the highest priority is always waiting.
            (following,) = await submit(cluster, caller, [big(2, priority=HIGH)])
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            num_overtaking += not waiting.done()
            running = following
        assert await waiting is StatusCode.OK
        assert await running is StatusCode.OK
        assert starts(cluster).index(low.request_id) > 1
        assert num_overtaking > 0
