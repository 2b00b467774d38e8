"""Streams of a gateway survive kills of workers and coordinator; clients that leave leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from httpx2 import AsyncClient, RemoteProtocolError

from deploy import LocalCluster, LocalClusterConfig
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import START_TIMEOUT_S, is_idle, is_serving, wait_for_status
from tests.e2e.commands import ENVIRONMENT, Shell, exit_code

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 60.0
NUM_TOKENS = 100
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "seed": 5,
    "temperature": 1.0,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**SAMPLED, "prompt": "Once upon a time"}),
    (COMPLETIONS, {**SAMPLED, "prompt": "The king", "n": 2}),
    (CHAT, {**SAMPLED, "messages": [{"role": "user", "content": "Once upon a time"}]}),
]
LONG_PROMPT = [1 + number % 100 for number in range(1500)]
"""More than a second of prefill at MOCK."""
MOCK = "step=10ms,token=1ms"


@dataclass
class Served:
    cluster: LocalCluster
    shell: Shell
    url: str
    num_gateways: int = 0

    @property
    def address(self) -> str:
        return self.cluster.address

    @asynccontextmanager
    async def http(self) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(base_url=self.url, timeout=TIMEOUT_S) as http:
            yield http

    async def wait(self, condition: Any) -> cluster_pb2.GetStatusResponse:
        return await wait_for_status(self.address, condition, timeout_s=TIMEOUT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A cluster with a journal, and a gateway."""
    directory = tmp_path_factory.mktemp("gateway")
    template = directory / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    config = LocalClusterConfig(
        num_workers=2,
        mocks=(MOCK,),
        environment=ENVIRONMENT,
        log_directory=directory,
        gateway="127.0.0.1:0",
        gateway_arguments=("--chat-template", str(template)),
        coordinator_arguments=("--journal", str(directory / "journal.db")),
    )
    async with LocalCluster(config) as cluster, Shell(directory) as shell:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield Served(cluster, shell, await cluster.gateway_url(timeout_s=TIMEOUT_S))


@dataclass
class Answer:
    """What a stream says, without ids and times."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.texts[index] = self.texts.get(index, "") + (text or "")
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"]:
                self.finish_reasons[index] = choice["finish_reason"]
        self.usage = event.get("usage") or self.usage

    @property
    def restarts(self) -> int:
        return int(self.usage["stageline"]["restarts"])

    @property
    def contents(self) -> tuple[Any, ...]:
        """What a disturbed stream has in common with an undisturbed one."""
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return self.texts, self.token_ids, self.finish_reasons, counts


class Reading:
    """Streams of all cases at the same time."""

    def __init__(self, http: AsyncClient) -> None:
        self._answers = [Answer() for _ in CASES]
        self._news = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._read(http, path, body, answer))
            for (path, body), answer in zip(CASES, self._answers, strict=True)
        ]

    async def until(self, num_tokens: int) -> None:
        """Wait until each stream has some of its tokens."""
        async with asyncio.timeout(TIMEOUT_S):
            while min(self._progress()) < num_tokens:
                self._news.clear()
                await self._news.wait()
        assert max(self._progress()) < NUM_TOKENS, "a stream ended before the fault"

    async def end(self) -> list[Answer]:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self._tasks)
        return self._answers

    def _progress(self) -> list[int]:
        return [max(map(len, answer.token_ids.values()), default=0) for answer in self._answers]

    async def _read(self, http: AsyncClient, path: str, body: dict[str, Any], answer: Answer) -> None:
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line async for line in self._data(response.aiter_lines(), answer)]
        assert lines[-1] == "[DONE]"

    async def _data(self, lines: AsyncIterator[str], answer: Answer) -> AsyncIterator[str]:
        async for line in lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data
                if data != "[DONE]":
                    answer.add(json.loads(data))
                    self._news.set()


async def kill(cluster: LocalCluster, name: str) -> None:
    """Kill a process and start it again."""
    cluster.kill(name, signal.SIGKILL)
    await cluster.process(name).wait()
    await cluster.restart(name)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["worker-1", pytest.param("worker-0", marks=pytest.mark.nightly), "coordinator"]
)
async def test_streams_go_on_when_a_process_is_killed(served: Served, name: str) -> None:
    await served.wait(is_serving)
    async with served.http() as http:
        undisturbed = await Reading(http).end()
        streams = Reading(http)
        await streams.until(10)
        await kill(served.cluster, name)
        disturbed = await streams.end()
    for alone, again in zip(undisturbed, disturbed, strict=True):
        assert again.contents == alone.contents
        assert again.restarts >= 1  # workers of the case before may still move layers beside `alone`
        assert all(len(ids) == NUM_TOKENS for ids in alone.token_ids.values())
    status = await served.wait(is_idle)
    assert (status.requests.failed, status.requests.orphaned) == (0, 0)


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_during_prefill_leaves_nothing_behind(
    served: Served, is_streamed: bool
) -> None:
    await served.wait(is_serving)
    async with leaving(served, {"prompt": LONG_PROMPT, "max_tokens": 10, "stream": is_streamed}):
        await served.wait(lambda status: status.requests.prefill == 1)
    await served.wait(is_idle)


@pytest.mark.full
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(
    served: Served, is_streamed: bool
) -> None:
    """Requests wait for a pipeline that has lost its workers."""
    await served.wait(is_serving)
    workers = ("worker-0", "worker-1")
    for name in workers:
        served.cluster.kill(name, signal.SIGSTOP)
    try:
        await served.wait(lambda status: not is_serving(status))
        async with leaving(served, {"prompt": [1, 2, 3], "max_tokens": 10, "stream": is_streamed}):
            await served.wait(lambda status: status.requests.waiting == 1)
        await served.wait(lambda status: status.requests.waiting == 0)
    finally:
        for name in workers:
            served.cluster.kill(name, signal.SIGCONT)
    await served.wait(is_idle)


@asynccontextmanager
async def leaving(served: Served, body: dict[str, Any]) -> AsyncIterator[None]:
    """A client with a request, which closes its connection at the end."""
    async with served.http() as http:
        posting = asyncio.create_task(http.post(COMPLETIONS, json=body))
        yield
        assert not posting.done()
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)


@asynccontextmanager
async def second_gateway(served: Served, *arguments: str) -> AsyncIterator[tuple[Any, AsyncClient]]:
    listen = ("--coordinator", served.address, "--listen", "127.0.0.1:0", *arguments)
    served.num_gateways += 1
    process = await served.shell.start(f"gw{served.num_gateways}", "gateway", *listen)
    url = f"http://{await process.listening_address(timeout_s=TIMEOUT_S)}"
    async with AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        yield process, http


@pytest.mark.full
async def test_a_gateway_that_drains_finishes_its_streams_and_refuses_new_ones(served: Served) -> None:
    await served.wait(is_serving)
    async with second_gateway(served) as (process, http):
        (path, body), answer = CASES[0], Answer()
        async with http.stream("POST", path, json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            refused = await http.post(path, json=body)
            while refused.status_code == 200:
                refused = await http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            answer.add(json.loads(event))
        assert answer.usage["completion_tokens"] == NUM_TOKENS
    assert await exit_code(process) == "exit code 0"
    await served.wait(is_idle)


@pytest.mark.full
async def test_streams_beyond_the_drain_timeout_end_with_an_error(served: Served) -> None:
    await served.wait(is_serving)
    async with second_gateway(served, "--drain-timeout", "0.2") as (process, http):
        path, body = CASES[0]
        async with http.stream("POST", path, json={**body, "max_tokens": 1000}) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "unavailable"
    assert await exit_code(process) == "exit code 0"
    await served.wait(is_idle)


@pytest.mark.nightly
async def test_requests_of_a_killed_gateway_are_kept_for_a_minute(served: Served) -> None:
    await served.wait(is_idle)
    async with second_gateway(served) as (process, http):
        path, body = CASES[0]
        async with http.stream("POST", path, json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.send_signal(signal.SIGKILL)
            with pytest.raises(RemoteProtocolError):
                async for _ in lines:
                    pass
    await served.wait(lambda status: is_idle(status) and status.requests.kept == 1)
    status = await wait_for_status(served.address, lambda status: status.requests.kept == 0, timeout_s=100)
    assert (status.requests.detached, status.requests.orphaned) == (0, 0)
