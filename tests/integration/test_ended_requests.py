"""The gateway keeps nothing of a request that has ended, in whatever way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.api.call import Call
from gateway.config import GatewayConfig
from gateway.generation import Generation
from gateway.rendering import Rendering
from gateway.server import GatewayServer
from gateway.upstream.numbered_request import NumberedRequest, RequestStream
from stageline_rpc.v1 import inference_pb2
from tests.faults.byte_proxy import ByteProxy
from tests.integration.calls import until, until_ready
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.test_mock_cluster import mock_cluster
from tests.ports import unused_address
from wire.errors import InvariantBroken

NUM_REQUESTS = 200
FEW_REQUESTS = 30
AT_ONCE = 50
PATH = "/v1/completions"
LONG = {"prompt": [3, 14, 15] * 100, "max_tokens": 3000}
KINDS = (NumberedRequest, RequestStream, Generation, Rendering, Call, inference_pb2.GenerateRequest)
few_or_many = pytest.mark.parametrize(
    "number", [FEW_REQUESTS, pytest.param(NUM_REQUESTS, marks=pytest.mark.full)]
)
MOST_KEPT = 3
"""Of a kind: a loop that waits for its next message still has the last one."""


class World:
    """A mock cluster, and a gateway that reaches it through a proxy."""

    def __init__(self, cluster: Cluster, proxy: ByteProxy, http: AsyncClient) -> None:
        self.cluster, self.proxy, self.http = cluster, proxy, http

    async def refused(self, status: int, **fields: object) -> None:
        response = await self.http.post(PATH, json={"prompt": [3, 14], "max_tokens": 4, **fields})
        assert response.status_code == status, response.text

    async def failed(self) -> None:
        """A stream that ends with an error while its request runs."""
        async with self.http.stream("POST", PATH, json={**LONG, "stream": True}) as response:
            text = (await response.aread()).decode()
        assert '"error"' in text.rpartition("data: ")[2], text

    async def all_run(self) -> None:
        await until(lambda: len(self.cluster.server.engine.live_requests) == AT_ONCE)

    async def left(self) -> None:
        """A client that closes the connection of a running stream."""
        async with self.http.stream("POST", PATH, json={**LONG, "stream": True}) as response:
            assert response.status_code == 200
            await anext(response.aiter_lines())

    async def cancelled(self) -> None:
        """A kept response that another call cancels."""
        body = {"model": "stageline-stories", "input": "Once", "background": True, "max_output_tokens": 400}
        response = await self.http.post("/v1/responses", json={**body, "ignore_eos": True})
        assert response.status_code == 200, response.text
        path = f"/v1/responses/{response.json()['id']}"
        for ended in (await self.http.post(f"{path}/cancel"), await self.http.delete(path)):
            assert ended.status_code == 200, ended.text


def world(**settings: Any) -> AbstractAsyncContextManager[World]:
    return serving(mock_cluster(1, "step=2ms", **settings))


@asynccontextmanager
async def serving(stages: Cluster) -> AsyncIterator[World]:
    async with stages as cluster, ByteProxy(cluster.address) as proxy:
        config = GatewayConfig(coordinator=proxy.address, listen="127.0.0.1:0", coordinator_timeout_s=0.2)
        server = GatewayServer(config, template=None)
        await server.start()
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                await until_ready(http)
                yield World(cluster, proxy, http)
        finally:
            await server.stop()


def live() -> dict[str, int]:
    gc.collect()
    kept = [type(value) for value in gc.get_objects()]
    return {kind.__name__: kept.count(kind) for kind in KINDS}


async def nothing() -> None:
    pass


async def many(
    run: Callable[[], Coroutine[Any, Any, None]],
    *,
    meanwhile: Callable[[], Coroutine[Any, Any, None]] = nothing,
    after: Callable[[], Coroutine[Any, Any, None]] = nothing,
    number: int = NUM_REQUESTS,
) -> None:
    """Run requests in rounds of `AT_ONCE`; `meanwhile` runs beside each round and `after` behind it."""
    for begun in range(0, number, AT_ONCE):
        await asyncio.gather(*(run() for _ in range(min(AT_ONCE, number - begun))), meanwhile())
        await after()


async def check_gone(world: World, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """After `end` has ended many requests, none of their objects is left."""
    await end()
    await world.cluster.wait_drained()
    await until(lambda: max(live().values()) <= MOST_KEPT)


@few_or_many
async def test_requests_that_the_gateway_refuses_are_gone(number: int) -> None:
    async with world() as served:
        await check_gone(served, lambda: many(lambda: served.refused(404, model="other"), number=number))


async def test_requests_that_the_coordinator_refuses_are_gone() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    async with world() as served:
        await check_gone(served, lambda: many(lambda: served.refused(400, response_format=schema)))


async def test_requests_without_room_in_the_queue_are_gone() -> None:
    async with world(max_client_requests=1) as served, AsyncExitStack() as running:
        await running.enter_async_context(served.http.stream("POST", PATH, json={**LONG, "stream": True}))

        async def end() -> None:
            await many(lambda: served.refused(429))
            await running.aclose()

        await check_gone(served, end)


async def test_requests_that_fail_while_they_run_are_gone() -> None:
    async with world() as served:
        engine = served.cluster.server.engine

        async def fail_all() -> None:
            await served.all_run()
            for request in engine.live_requests:
                engine.fail(request, InvariantBroken("as the test wants"))

        await check_gone(served, lambda: many(served.failed, meanwhile=fail_all))


@few_or_many
async def test_requests_of_clients_that_leave_are_gone(number: int) -> None:
    async with world() as served:
        await check_gone(served, lambda: many(served.left, number=number))


@pytest.mark.full
async def test_requests_of_a_lost_coordinator_are_gone() -> None:
    async with world() as served:
        target = served.proxy.target

        async def lose() -> None:
            await served.all_run()
            served.proxy.target = unused_address()
            served.proxy.cut()

        async def again() -> None:
            served.proxy.target = target
            await until_ready(served.http)

        await check_gone(served, lambda: many(served.failed, meanwhile=lose, after=again))


@pytest.mark.full
async def test_responses_that_are_cancelled_and_deleted_are_gone() -> None:
    async with serving(Cluster(None, layers=(12,), has_text=True)) as served:
        await check_gone(served, lambda: many(served.cancelled))
