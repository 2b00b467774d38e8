"""However a request ends early, its pages are freed on every stage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stageline import Cancelled, Client, DeadlineExceeded, RequestNotFound
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import (
    Served,
    holds_pages_everywhere,
    is_idle,
    random_prompt,
    tokens_of,
    wait_for_status,
)
from tests.e2e.commands import run_stageline
from wire.ids import id_text, new_request_id

pytestmark = pytest.mark.asyncio(loop_scope="package")

LONG = 3500


@pytest_asyncio.fixture(loop_scope="package")
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.address) as client:
        yield client
    # After every test, the next request is served normally.
    await _serves_normally(served)


async def _serves_normally(served: Served) -> None:
    async with Client(served.address) as client:
        assert (await tokens_of(client, served.reference.prompts[-1], 48)) == served.reference.expected[-1]


async def _counts(served: Served) -> cluster_pb2.RequestCounts:
    return (await wait_for_status(served.address, is_idle)).requests


async def _start(
    client: Client, prompt: list[int], max_tokens: int, request_id: str = ""
) -> asyncio.Task[int]:
    async def consume() -> int:
        return len(await tokens_of(client, prompt, max_tokens, request_id=request_id or None))

    return asyncio.create_task(consume())


async def test_a_client_that_disconnects_while_decoding(served: Served, client: Client) -> None:
    before = await _counts(served)
    outputs = client.generate(random_prompt(20, seed=21), max_tokens=LONG)
    assert (await anext(outputs)).token_ids
    await wait_for_status(served.address, holds_pages_everywhere)
    await outputs.aclose()
    after = await _counts(served)
    assert after.cancelled == before.cancelled + 1
    assert (after.finished, after.failed) == (before.finished, before.failed)


async def test_a_client_whose_connection_breaks_during_prefill(served: Served) -> None:
    before = await _counts(served)
    async with Client(served.address) as client:
        request = await _start(client, random_prompt(LONG, seed=22), 8)
        await wait_for_status(served.address, lambda status: status.requests.prefill == 1)
    # Leaving the block has closed the channel during the call.
    with pytest.raises(Cancelled):
        await request
    after = await _counts(served)
    assert after.cancelled == before.cancelled + 1
    await _serves_normally(served)


async def test_a_deadline_that_passes(served: Served, client: Client) -> None:
    before = await _counts(served)
    with pytest.raises(DeadlineExceeded):
        await tokens_of(client, random_prompt(20, seed=23), LONG, timeout_s=1.0)
    assert (await _counts(served)).cancelled == before.cancelled + 1


async def test_an_explicit_cancel(served: Served, client: Client) -> None:
    before = await _counts(served)
    request_id = id_text(new_request_id())
    request = await _start(client, random_prompt(20, seed=24), LONG, request_id)
    await wait_for_status(served.address, holds_pages_everywhere)
    await client.cancel(request_id)
    with pytest.raises(Cancelled):
        await request
    assert (await _counts(served)).cancelled == before.cancelled + 1
    with pytest.raises(RequestNotFound):
        await client.cancel(request_id)


async def test_many_cancels_do_not_affect_another_request(served: Served, client: Client) -> None:
    undisturbed = asyncio.create_task(tokens_of(client, served.reference.prompts[2], 48))
    storm = [await _start(client, random_prompt(60 + i, seed=25), LONG) for i in range(32)]
    await wait_for_status(served.address, holds_pages_everywhere)
    for task in storm:
        task.cancel()
    await asyncio.gather(*storm, return_exceptions=True)
    assert await undisturbed == served.reference.expected[2]
    await wait_for_status(served.address, is_idle)


@pytest.mark.full
async def test_the_status_command_shows_every_worker_idle(served: Served) -> None:
    await wait_for_status(served.address, is_idle)
    finished = await run_stageline("status", "--json", "--coordinator", served.address)
    assert (finished.code, finished.stderr) == (0, "")
    status = json.loads(finished.stdout)
    assert [worker["kv"]["blocks_active"] for worker in status["workers"]] == [0, 0, 0]
    roles = [worker["role"] for worker in status["workers"]]
    assert roles == ["STAGE_ROLE_FIRST", "STAGE_ROLE_MIDDLE", "STAGE_ROLE_LAST"]
