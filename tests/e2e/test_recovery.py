"""Workers die and come back: clients see a pause, and the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy import LocalCluster
from stageline import Client, GenerateOutput, Unavailable
from tests.e2e.clusters import (
    START_TIMEOUT_S,
    Reference,
    config,
    holds_pages_everywhere,
    is_idle,
    is_serving,
    random_prompt,
    tokens_of,
    wait_for_status,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 300
PROMPTS = [random_prompt(length, seed=31) for length in (1, 16, 40, 101)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(llama: Reference, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    logs = tmp_path_factory.mktemp("recovery")
    async with LocalCluster(config(llama.directory, 3, log_directory=logs)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: LocalCluster) -> list[list[int]]:
    async with Client(cluster.address) as client:
        return await asyncio.gather(*(tokens_of(client, prompt, NUM_TOKENS) for prompt in PROMPTS))


class _Streams:
    """All prompts at once; how far each is, and what it ended with."""

    def __init__(self, client: Client) -> None:
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.last: list[GenerateOutput] = []
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(client, number)) for number in range(len(PROMPTS))]

    async def all_have(self, num_tokens: int) -> None:
        async with asyncio.timeout(60):
            while min(map(len, self.tokens)) < num_tokens:
                await self._next_token()
        assert max(map(len, self.tokens)) < NUM_TOKENS, "it is too late to disturb anything"

    async def end(self, *, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)

    async def _next_token(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _read(self, client: Client, number: int) -> None:
        async for output in client.generate(PROMPTS[number], max_tokens=NUM_TOKENS):
            self.tokens[number] += output.token_ids
            self._news.set()
        self.last.append(output)


@pytest.mark.parametrize("worker", ["worker-0", "worker-1", "worker-2"])
async def test_streams_continue_when_a_killed_worker_comes_back(
    cluster: LocalCluster, undisturbed: list[list[int]], worker: str
) -> None:
    before = await wait_for_status(cluster.address, is_idle)
    async with Client(cluster.address) as client:
        streams = _Streams(client)
        await streams.all_have(10)
        cluster.kill(worker, signal.SIGKILL)
        await cluster.restart_worker(worker)
        await streams.end(timeout_s=90)
    assert streams.tokens == undisturbed
    assert all(last.usage is not None and last.usage.restarts >= 1 for last in streams.last)
    after = await wait_for_status(cluster.address, is_idle)
    assert after.epoch > before.epoch
    assert after.requests.failed == before.requests.failed


@pytest.mark.slow
async def test_streams_continue_when_a_worker_that_hung_wakes_up(
    cluster: LocalCluster, undisturbed: list[list[int]]
) -> None:
    async with Client(cluster.address) as client:
        streams = _Streams(client)
        await streams.all_have(10)
        cluster.kill("worker-1", signal.SIGSTOP)
        lost = await wait_for_status(cluster.address, lambda status: not is_serving(status))
        assert "no heartbeat for" in lost.detail
        cluster.kill("worker-1", signal.SIGCONT)
        await streams.end(timeout_s=60)
    assert streams.tokens == undisturbed


@pytest.mark.slow
async def test_without_the_lost_worker_requests_fail_in_bounded_time_with_the_reason(
    llama: Reference, tmp_path: Path
) -> None:
    async with LocalCluster(config(llama.directory, 2, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            live = asyncio.create_task(tokens_of(client, random_prompt(3), 3000))
            await wait_for_status(cluster.address, holds_pages_everywhere)
            cluster.kill("worker-1")
            start = time.monotonic()
            await wait_for_status(cluster.address, lambda status: not is_serving(status), timeout_s=5)
            queued = asyncio.create_task(tokens_of(client, random_prompt(3), 5))
            for request in (live, queued):
                with pytest.raises(Unavailable, match=r"no pipeline within 30 s: .*worker-1 is lost"):
                    await asyncio.wait_for(request, timeout=45)
        assert 25 < time.monotonic() - start < 45
