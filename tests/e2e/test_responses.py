"""Responses as processes: their events are the same wherever they are read, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient, RemoteProtocolError, Response

from deploy import LocalCluster, LocalClusterConfig
from deploy.process import LocalProcess
from tests.e2e.clusters import START_TIMEOUT_S, wait_for_status
from tests.e2e.commands import ENVIRONMENT, Shell

TIMEOUT_S = 60.0
PATH = "/v1/responses"
NUM_TOKENS = 120
BODY = {"input": "Once upon a time", "max_output_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


@dataclass
class Gateway:
    process: LocalProcess
    http: AsyncClient

    async def create(self, **body: Any) -> Any:
        response = await self.http.post(PATH, json={**BODY, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def json(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()


@dataclass
class Serving:
    cluster: LocalCluster
    gateways: list[Gateway]


@asynccontextmanager
async def serving(
    tmp_path: Path, *, num_gateways: int = 2, step: str = "10ms", journal: bool = False, gateway: str = ""
) -> AsyncIterator[Serving]:
    """Mock stages of the built-in model, and gateways; `gateway` are their further arguments."""
    config = LocalClusterConfig(
        num_workers=2, mocks=(f"step={step}",), environment=ENVIRONMENT, log_directory=tmp_path,
        coordinator_arguments=("--journal", str(tmp_path / "journal.db")) if journal else (),
    )  # fmt: skip
    async with LocalCluster(config) as cluster, Shell(tmp_path) as shell:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        gateways = []
        for number in range(num_gateways):
            listen = ("--listen", "127.0.0.1:0", *gateway.split())
            process = await shell.start(f"gw{number}", "gateway", "--coordinator", cluster.address, *listen)
            url = f"http://{await process.listening_address(timeout_s=TIMEOUT_S)}"
            gateways.append(Gateway(process, AsyncClient(base_url=url, timeout=TIMEOUT_S)))
        try:
            yield Serving(cluster, gateways)
        finally:
            for each in gateways:
                await each.http.aclose()


class Reading:
    """Whole events of a stream, as bytes."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.parts: list[str] = []
        self._rest = ""
        self._chunks = response.aiter_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(part.split("data: ", 1)[1]) for part in self.parts]

    @property
    def identity(self) -> str:
        return str(self.events[0]["response"]["id"])

    async def until(self, num_events: int) -> None:
        while len(self.parts) < num_events:
            assert await self._next(), f"the stream ended after {len(self.parts)} events"

    async def end(self) -> None:
        while await self._next():
            pass

    async def broken(self) -> None:
        """Read to the end of a connection whose server is killed."""
        with pytest.raises(RemoteProtocolError):
            await self.end()

    async def _next(self) -> bool:
        async with asyncio.timeout(TIMEOUT_S):
            chunk = await anext(self._chunks, None)
        *parts, self._rest = (self._rest + (chunk or "")).split("\n\n")
        self.parts += [part for part in parts if not part.startswith(":")]
        return chunk is not None


async def events_of(gateway: Gateway, path: str) -> list[str]:
    response = await gateway.http.get(path)
    assert response.status_code == 200, response.text
    return response.text.split("\n\n")[:-1]


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_continues_at_another_gateway_when_its_own_is_killed(
    tmp_path: Path, background: bool
) -> None:
    async with serving(tmp_path) as served:
        one, other = served.gateways
        body = {**BODY, "stream": True, "background": background}
        async with one.http.stream("POST", PATH, json=body) as response:
            reading = Reading(response)
            await reading.until(20)
            one.process.send_signal(signal.SIGKILL)
            await reading.broken()
        last = reading.events[-1]["sequence_number"]
        url = f"{PATH}/{reading.identity}?stream=true"
        rest = await events_of(other, f"{url}&starting_after={last}")
        assert len(rest) > 20, "the response was over before its gateway was killed"
        assert [*reading.parts, *rest] == await events_of(other, url)
        body = json.loads(rest[-1].split("data: ", 1)[1])["response"]
        assert body["usage"]["output_tokens"] == NUM_TOKENS
        undisturbed = await other.create()
        assert undisturbed["output"][0]["content"] == body["output"][0]["content"]
        await wait_for_status(served.cluster.address, lambda status: status.requests.decode == 0)


@pytest.mark.full
async def test_a_stream_goes_on_when_the_coordinator_restarts_with_its_journal(tmp_path: Path) -> None:
    async with serving(tmp_path, journal=True) as served:
        one, other = served.gateways
        async with one.http.stream(
            "POST", PATH, json={**BODY, "stream": True, "background": True}
        ) as response:
            reading = Reading(response)
            await reading.until(20)
            await served.cluster.restart("coordinator")
            await reading.end()
        events = reading.events
        assert events[-1]["type"] == "response.incomplete"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["usage"]["output_tokens"] == NUM_TOKENS
        assert events[-1]["response"]["usage"]["stageline"]["restarts"] == 1
        undisturbed = await other.create()
        assert undisturbed["output"][0]["content"] == events[-1]["response"]["output"][0]["content"]
        url = f"{PATH}/{reading.identity}"
        assert await events_of(other, f"{url}?stream=true") == reading.parts
        await served.cluster.restart("coordinator")
        assert await events_of(other, f"{url}?stream=true") == reading.parts
        assert await other.json(url) == events[-1]["response"]


@pytest.mark.full
async def test_a_stream_has_the_same_bytes_when_a_worker_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path, num_gateways=1) as served:
        [gateway] = served.gateways
        undisturbed = await gateway.create()
        async with gateway.http.stream("POST", PATH, json={**BODY, "stream": True}) as response:
            reading = Reading(response)
            await reading.until(20)
            await served.cluster.restart("worker-1")
            await reading.end()
        body = reading.events[-1]["response"]
        assert body["usage"]["stageline"]["restarts"] >= 1
        assert body["output"][0]["content"] == undisturbed["output"][0]["content"]
        assert await events_of(gateway, f"{PATH}/{reading.identity}?stream=true") == reading.parts


@pytest.mark.full
async def test_without_a_journal_a_stream_fails_with_its_coordinator(tmp_path: Path) -> None:
    async with serving(tmp_path, num_gateways=1) as served:
        [gateway] = served.gateways
        body = {**BODY, "stream": True, "background": True}
        async with gateway.http.stream("POST", PATH, json=body) as response:
            reading = Reading(response)
            await reading.until(20)
            await served.cluster.restart("coordinator")
            await reading.end()
        assert reading.events[-1]["type"] == "response.failed"
        assert "keeps no journal" in reading.events[-1]["response"]["error"]["message"]
        assert (await gateway.http.get(f"{PATH}/{reading.identity}")).status_code == 404


@pytest.mark.full
async def test_a_response_of_the_background_needs_no_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path, gateway="--response-keep 3") as served:
        one, other = served.gateways
        created = await one.create(background=True)
        assert created["status"] == "queued"
        one.process.send_signal(signal.SIGKILL)
        url = f"{PATH}/{created['id']}"
        statuses = [created["status"]]
        async with asyncio.timeout(TIMEOUT_S):
            while (found := await other.json(url))["status"] != "incomplete":
                statuses.append(found["status"])
        assert set(statuses) == {"queued", "in_progress"}
        assert found["usage"]["output_tokens"] == NUM_TOKENS
        async with asyncio.timeout(TIMEOUT_S):
            while (await other.http.get(url)).status_code == 200:
                await asyncio.sleep(0.1)
        gone = await other.http.get(url)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert "--response-keep" in gone.json()["error"]["message"]


@pytest.mark.full
async def test_cancel_and_delete_at_another_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        one, other = served.gateways
        long = {**BODY, "background": True, "max_output_tokens": 200}
        async with one.http.stream("POST", PATH, json={**long, "stream": True}) as response:
            reading = Reading(response)
            await reading.until(20)
            url = f"{PATH}/{reading.identity}"
            cancelled = (await other.http.post(f"{url}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            await reading.end()
            assert reading.events[-1] == {
                "type": "response.failed",
                "sequence_number": len(reading.parts) - 1,
                "response": cancelled,
            }
        await wait_for_status(served.cluster.address, lambda status: status.requests.decode == 0)
        assert await one.json(url) == cancelled
        deleted = (await one.http.delete(url)).json()
        assert deleted["deleted"] is True
        assert (await other.http.get(url)).status_code == 404
        running = await one.create(**long)
        assert (await other.http.delete(f"{PATH}/{running['id']}")).status_code == 200
        assert (await one.http.get(f"{PATH}/{running['id']}")).status_code == 404
        await wait_for_status(served.cluster.address, lambda status: status.requests.decode == 0)
