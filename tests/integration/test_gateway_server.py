"""A gateway's process: it follows the coordinator at its address when that serves another model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from gateway.upstream.contract import UpstreamFailure
from stageline_rpc.v1 import cluster_pb2
from tests.faults.byte_proxy import ByteProxy
from tests.integration.calls import message, until, until_ready
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.test_link import PROMPT, Link, Reading
from tests.integration.test_mock_cluster import mock_cluster
from tests.ports import unused_address
from web.api_keys import changed_keys
from wire.transport import TransportSettings


async def complete(http: AsyncClient, **fields: Any) -> Any:
    fields = {"max_tokens": 3, "return_token_ids": True, "ignore_eos": True, **fields}
    return await http.post("/v1/completions", json=fields)


async def test_a_gateway_follows_its_coordinator_to_another_model() -> None:
    async with (
        Cluster(None, layers=(6, 6), has_text=True) as first,
        ByteProxy(first.address) as proxy,
        mock_cluster(2) as second,
    ):
        config = GatewayConfig(coordinator=proxy.address, listen="127.0.0.1:0")
        server = GatewayServer(config, template=None)
        await server.start()
        following = asyncio.create_task(server.follow_model())
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                told = await complete(http, prompt="Once upon a time")
                assert told.status_code == 200, told.text
                waiting = asyncio.create_task(complete(http, prompt="Once", max_tokens=400))
                await until(lambda: bool(first.server.engine.live_requests))
                proxy.target = second.address
                proxy.cut()
                lost = await waiting
                assert lost.status_code == 503, lost.text
                assert lost.json()["error"]["message"].endswith("serves another model now")
                await until_ready(http)
                models = (await http.get("/v1/models")).json()["data"]
                assert [model["root"] for model in models] == ["mock"]
                # The first model's tokenizer is gone with it.
                refused = await complete(http, prompt="Once upon a time")
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
                served = await complete(http, prompt=[3, 14, 15])
                assert len(served.json()["choices"][0]["token_ids"]) == 3, served.text
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.stop()


async def test_requests_fail_at_the_coordinator_timeout() -> None:
    """It is 30 seconds by default, which is more than this test waits."""
    async with mock_cluster(1) as cluster, ByteProxy(cluster.address) as proxy:
        config = GatewayConfig(coordinator=proxy.address, listen="127.0.0.1:0", coordinator_timeout_s=0.5)
        server = GatewayServer(config, template=None)
        await server.start()
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                waiting = asyncio.create_task(complete(http, prompt=[3, 14, 15], max_tokens=4000))
                await until(lambda: bool(cluster.server.engine.live_requests))
                proxy.target = unused_address()
                proxy.cut()
                async with asyncio.timeout(25):
                    lost = await waiting
                assert lost.status_code == 503, lost.text
        finally:
            await server.stop()


async def test_a_link_sends_no_request_to_another_model() -> None:
    async with (
        mock_cluster(1) as first,
        ByteProxy(first.address) as proxy,
        Link(proxy.address) as link,
        mock_cluster(2) as second,
    ):
        reading = Reading(await link.submit(message(PROMPT, 4000)))
        await reading.until(5)
        proxy.target = second.address
        proxy.cut()
        with pytest.raises(UpstreamFailure, match="serves another model now"):
            await reading.end()
        assert link.other_model.is_set()
        assert not link.is_connected
        with pytest.raises(UpstreamFailure, match="serves another model now"):
            await link.submit(message(PROMPT, 5))
        assert second.server.engine.admission.num_preparing == 0
        assert not second.server.engine.live_requests


async def test_a_gateway_is_ready_when_its_coordinator_serves_and_while_that_recovers() -> None:
    async with mock_cluster(2, num_workers=0, waits=False) as cluster:
        server = GatewayServer(
            GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0"), template=None
        )
        await server.start()
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                await until(lambda: "waiting for the pipeline" in server.condition().text)
                reason = f"the coordinator {cluster.address} does not serve: waiting for workers"
                await until_problem(http, reason)
                [model] = (await http.get("/v1/models")).json()["data"]
                assert model["max_model_len"] is None
                workers = [await cluster.start_worker(f"w{number}") for number in range(2)]
                await until_ready(http)
                assert server.condition().is_ready
                served = await complete(http, prompt=[3, 14, 15])
                assert served.status_code == 200, served.text
                [model] = (await http.get("/v1/models")).json()["data"]
                assert model["max_model_len"] > 0
                await workers[0].stop()
                await cluster.wait_state(cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS)
                assert (await http.get("/readyz")).status_code == 200
        finally:
            await server.stop()


async def test_a_gateway_is_not_ready_when_requests_no_longer_wait_for_the_pipeline() -> None:
    async with mock_cluster(1) as cluster:
        config = GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0", coordinator_timeout_s=0.2)
        server = GatewayServer(config, template=None)
        await server.start()
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                await until_ready(http)
                await cluster.workers["w0"].stop()
                await until_problem(http, "does not serve: waiting for workers")
        finally:
            await server.stop()


async def until_problem(http: AsyncClient, text: str) -> None:
    """Wait until a gateway is not ready, with this reason."""
    async with asyncio.timeout(DEADLINE_S):
        while (response := await http.get("/readyz")).status_code == 200 or text not in response.text:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_gateway_that_serves_anyone_on_the_network_says_so(
    has_keys: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.toml"
    with changed_keys(keys):
        pass
    async with mock_cluster(1) as cluster:
        config = GatewayConfig(
            coordinator=cluster.address,
            listen="0.0.0.0:0",
            keys_file=keys if has_keys else None,
            transport=TransportSettings(insecure=True),
        )
        server = GatewayServer(config, template=None)
        await server.start()
        await server.stop()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = f"anyone who reaches {server.address} is served: give --keys-file to ask for API keys"
    assert (expected in warnings) is not has_keys
