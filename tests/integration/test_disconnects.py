"""Disconnecting clients: their requests are cancelled or detached, as requested."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stageline_rpc.v1 import cluster_pb2
from tests.integration.calls import Caller, Reader, StatusCode, again, message, until
from tests.integration.cluster import TEST_POLICY, Cluster
from tests.integration.gate import Gate

pytestmark = pytest.mark.full

LAYERS = (1, 1, 1)
POLICY = replace(TEST_POLICY, sweep_interval_s=0.05)
LONG_PROMPT = tuple(index * 7 % 128 for index in range(200))


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[Cluster, Caller]]:
    """A cluster with a gate, and a client that stays connected."""
    async with (
        Cluster(directory, layers=LAYERS, policy=POLICY, max_kv_tokens=2048, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as caller,
    ):
        yield cluster, caller


async def disconnect(caller: Caller, reader: Reader, how: str) -> None:
    """Disconnect the client: end its call or close its connection."""
    if how == "call":
        reader.cancel()
    else:
        await caller.__aexit__(None, None, None)


def counts(status: cluster_pb2.GetStatusResponse) -> tuple[int, int, int]:
    """Finished, cancelled and failed requests."""
    return status.requests.finished, status.requests.cancelled, status.requests.failed


def has(**wanted: int) -> Callable[[cluster_pb2.GetStatusResponse], bool]:
    """Condition on the counts of requests."""
    return lambda status: all(getattr(status.requests, name) == value for name, value in wanted.items())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", ["call", "connection"])
async def test_a_detached_request_continues_and_can_be_attached_to(varied_llama: Path, how: str) -> None:
    async with served(varied_llama) as (cluster, caller):
        request = message([3, 1, 4], 40, seed=5, n=2, keep_s=60.0)
        undisturbed = await caller.run(request)
        gate = Gate(cluster)
        leaver = Caller(cluster.address)
        reader = leaver.generate(again(request))
        await reader.until(5)
        gate.close()
        await gate.wait_quiet()
        await disconnect(leaver, reader, how)
        status = await cluster.wait_status(has(detached=1))
        assert (status.requests.decode, status.requests.kept) == (2, 1)
        gate.open()
        status = await cluster.wait_drained()
        assert counts(status) == (2, 0, 0)
        assert (status.requests.detached, status.requests.kept) == (0, 2)
        attached = caller.attach(reader.received)
        assert await attached.end() is StatusCode.OK
        assert attached.received.outputs == undisturbed.outputs
        # Its id is in use for as long as its output is kept.
        twin = again(request)
        twin.request_id = reader.received.request_id
        assert await caller.generate(twin).end() is StatusCode.ALREADY_EXISTS
        await leaver.__aexit__(None, None, None)


@pytest.mark.full
async def test_a_detached_request_can_be_attached_to_at_any_token(varied_llama: Path) -> None:
    async with served(varied_llama) as (cluster, caller):
        request = message([3, 1, 4], 60, seed=5, keep_s=60.0)
        undisturbed = await caller.run(request)
        reader = caller.generate(again(request))
        for num_tokens in (5, 20, 35):
            await reader.until(num_tokens)
            reader.cancel()
            reader = caller.attach(reader.received)
        assert await reader.end() is StatusCode.OK
        assert reader.received.outputs == undisturbed.outputs
        assert counts(await cluster.wait_drained()) == (2, 0, 0)


@pytest.mark.full
async def test_output_is_kept_for_the_requested_time(varied_llama: Path) -> None:
    async with served(varied_llama) as (cluster, caller):
        long, short = (message([3], 10, keep_s=keep_s) for keep_s in (60.0, 2.0))
        received = [await caller.run(request) for request in (long, short)]
        assert (await cluster.client.status()).requests.kept == 2
        await cluster.wait_status(has(kept=1))
        assert await caller.attach(received[0]).end() is StatusCode.OK
        assert await caller.attach(received[1]).end() is StatusCode.NOT_FOUND
        # The id is free again.
        assert await caller.generate(short).end() is StatusCode.OK


async def test_cancel_ends_a_detached_request_and_removes_a_kept_one(varied_llama: Path) -> None:
    async with served(varied_llama) as (cluster, caller):
        request = message([3, 1, 4], 400, n=2, keep_s=60.0)
        reader = caller.generate(request)
        await reader.until(3)
        reader.cancel()
        await cluster.wait_status(has(detached=1))
        assert await caller.cancel(request.request_id) is StatusCode.OK
        status = await cluster.wait_drained()
        assert counts(status) == (0, 1, 0)
        # An attaching client receives the generated tokens, then the status.
        attached = caller.attach(reader.received)
        assert await attached.end() is StatusCode.CANCELLED
        assert "the request was cancelled" in attached.details
        assert status.requests.kept == 1
        assert await caller.cancel(request.request_id) is StatusCode.OK
        assert await caller.cancel(request.request_id) is StatusCode.NOT_FOUND
        assert await caller.attach(reader.received).end() is StatusCode.NOT_FOUND
        status = await cluster.wait_drained()
        assert counts(status) == (0, 1, 0)
        assert status.requests.kept == 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", ["call", "connection"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_disconnect_frees_the_pages_of_all_choices(varied_llama: Path, how: str, stage: str) -> None:
    async with served(varied_llama) as (cluster, caller):
        gate = Gate(cluster)
        leaver = Caller(cluster.address)
        if stage == "prefill":
            gate.close()
            reader = leaver.generate(message(LONG_PROMPT, 20, n=3))
            reading = asyncio.create_task(reader.end())
        else:
            reader = leaver.generate(message([3, 1, 4], 400, n=3))
            for choice in range(3):
                await reader.until(2, choice=choice)
            gate.close()
            reading = asyncio.create_task(reader.end())
        await gate.wait_quiet()
        await disconnect(leaver, reader, how)
        await cluster.wait_status(has(cancelled=1, prefill=0, decode=0, waiting=0))
        assert not cluster.server.engine.scheduler.running
        gate.open()
        assert counts(await cluster.wait_drained()) == (0, 1, 0)
        await asyncio.gather(reading, return_exceptions=True)
        await leaver.__aexit__(None, None, None)
        assert await caller.generate(message(LONG_PROMPT, 5)).end() is StatusCode.OK


@pytest.mark.matrix(1)
@pytest.mark.parametrize("keep_s", [None, 60.0], ids=["cancel", "detach"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_deadline_cancels_with_any_disconnect_action(
    varied_llama: Path, keep_s: float | None, stage: str
) -> None:
    async with served(varied_llama) as (cluster, caller):
        gate = Gate(cluster)
        request = message(LONG_PROMPT if stage == "prefill" else [3, 1, 4], 200, keep_s=keep_s)
        if stage == "prefill":
            gate.close()
        reader = caller.generate(request, timeout_s=0.5)
        if stage == "decode":
            await reader.until(3)
            gate.close()
        assert await reader.end() is StatusCode.DEADLINE_EXCEEDED
        await cluster.wait_status(has(cancelled=1, prefill=0, decode=0, detached=0))
        gate.open()
        assert counts(await cluster.wait_drained()) == (0, 1, 0)
        expected = StatusCode.NOT_FOUND if keep_s is None else StatusCode.DEADLINE_EXCEEDED
        assert await caller.attach(reader.received).end() is expected


async def test_a_deadline_ends_a_request_without_a_reader(varied_llama: Path) -> None:
    async with served(varied_llama) as (cluster, caller):
        gate = Gate(cluster)
        request = message([3, 1, 4], 200, keep_s=60.0)
        reader = caller.generate(request, timeout_s=0.6)
        await reader.until(3)
        gate.close()
        reader.cancel()
        await cluster.wait_status(has(detached=1))
        await cluster.wait_status(has(cancelled=1, detached=0))
        gate.open()
        await cluster.wait_drained()
        attached = caller.attach(reader.received)
        assert await attached.end() is StatusCode.DEADLINE_EXCEEDED
        assert "the request deadline has passed" in attached.details


async def test_a_sweep_that_fails_is_logged_and_the_next_ones_go_on(
    varied_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(varied_llama) as (cluster, caller):
        gate, engine = Gate(cluster), cluster.server.engine
        with monkeypatch.context() as fault:
            fault.setattr(engine, "sweep", lambda: 1 // 0)
            await until(lambda: caplog.text.count("sweep failed") > 1)
        reader = caller.generate(message([3, 1, 4], 200, keep_s=60.0), timeout_s=0.6)
        await reader.until(3)
        gate.close()
        await cluster.wait_status(has(cancelled=1))
        gate.open()
        await cluster.wait_drained()
