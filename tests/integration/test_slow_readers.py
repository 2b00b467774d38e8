"""A client that does not read delays no other client, and its buffer is bounded."""

import asyncio
import gc
import logging
from pathlib import Path

import pytest

from coordinator.engine.request import Request
from tests.integration.calls import Caller, StatusCode, message, message_of, until
from tests.integration.cluster import Cluster, RequestCase
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.ids import parse_request_id

LAYERS = (1, 1, 1)
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
"""Options of a client without read-ahead: unread messages stay at the server."""


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


async def until_ended(cluster: Cluster, request_id: str) -> None:
    live_request = cluster.server.engine.registry.live_request
    await until(lambda: live_request(parse_request_id(request_id)) is None)


@pytest.mark.full
async def test_a_reader_too_far_behind_is_cancelled_with_the_reason(
    varied_llama: Path, solo: SoloRuns
) -> None:
    async with (
        Cluster(varied_llama, layers=LAYERS, max_unread_tokens=32, max_kv_tokens=4096) as cluster,
        Caller(cluster.address, options=SMALL_WINDOW) as slow,
    ):
        readers = [slow.generate(message([7], 400, n=num_choices)) for num_choices in (1, 4)]
        for reader in readers:
            await reader.next()
        async with cluster.generating(mixed_cases(6, max_tokens=40)) as others:
            for reader in readers:
                await until_ended(cluster, reader.received.request_id)
            status = await cluster.client.status()
            # Its pages are free although it has not read the status.
            assert (status.requests.cancelled, status.requests.orphaned) == (2, 0)
            assert len(cluster.server.engine.scheduler.running) <= 6
        solo.check(others)
        for reader in readers:
            assert await reader.end() is StatusCode.CANCELLED
            assert reader.details.startswith("the client reads too slowly: 33 tokens are unread")
            # The generated tokens arrive before the reason, in fewer messages than tokens.
            num_tokens = sum(len(choice.tokens) for choice in reader.received.choices.values())
            assert num_tokens >= 33
            assert reader.num_messages < num_tokens // 2
        tokens = readers[0].received.tokens
        assert tokens == solo.tokens(RequestCase(prompt=(7,), max_tokens=len(tokens)))
        await cluster.wait_drained()


@pytest.mark.full
async def test_a_reader_that_resumes_in_time_gets_all_tokens_in_few_messages(
    varied_llama: Path, solo: SoloRuns
) -> None:
    async with (
        Cluster(varied_llama, layers=LAYERS) as cluster,
        Caller(cluster.address, options=SMALL_WINDOW) as slow,
    ):
        (case,) = mixed_cases(1, max_tokens=200)
        reader = slow.generate(message_of(case))
        await reader.next()
        await until_ended(cluster, reader.received.request_id)
        solo.check(await cluster.generate_all(mixed_cases(2)))
        assert await reader.end() is StatusCode.OK
        assert reader.received.tokens == solo.tokens(case)
        assert reader.num_messages < 10
        await cluster.wait_drained()


@pytest.mark.full
async def test_the_slow_reader_limit_applies_to_attached_requests_only(
    varied_llama: Path, solo: SoloRuns
) -> None:
    case = RequestCase(prompt=(7,), max_tokens=200)
    async with (
        Cluster(varied_llama, layers=LAYERS, max_unread_tokens=32) as cluster,
        Caller(cluster.address) as caller,
        Caller(cluster.address, options=SMALL_WINDOW) as slow,
    ):
        detached = caller.generate(message_of(case, keep_s=60.0))
        await detached.until(3)
        detached.cancel()
        # Far more than the limit is buffered when it attaches.
        request = cluster.server.engine.registry.live[0]
        await until(lambda: request.choices[0].buffer.num_tokens > 100)
        attached = caller.attach(detached.received)
        assert await attached.end() is StatusCode.OK
        assert attached.received.tokens == solo.tokens(case)

        neglected = slow.generate(message_of(case.again(), keep_s=60.0))
        await neglected.next()
        await until_ended(cluster, neglected.received.request_id)
        # An attaching client receives the reason.
        late = caller.attach_at(neglected.received.request_id, 0)
        assert await late.end() is StatusCode.CANCELLED
        assert "the client reads too slowly" in late.details
        assert late.received.tokens == solo.tokens(case)[: len(late.received.tokens)]
        assert len(late.received.tokens) > 32
        requests = (await cluster.wait_drained()).requests
        assert (requests.finished, requests.cancelled) == (1, 1)


@pytest.mark.full
async def test_a_disconnected_client_that_never_reads_leaves_no_request(
    varied_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # grpc logs the unsent message with a traceback, which would keep the request.
    caplog.set_level(logging.CRITICAL, "grpc")
    async with Cluster(varied_llama, layers=LAYERS, max_unread_tokens=32) as cluster:
        num_tasks, num_requests = len(asyncio.all_tasks()), _num_requests()
        async with Caller(cluster.address, options=SMALL_WINDOW) as slow:
            readers = [slow.generate(message([index], 400)) for index in range(4)]
            for reader in readers:
                await reader.next()
            for reader in readers:
                await until_ended(cluster, reader.received.request_id)
        del reader, readers
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        # grpc keeps a call until the next one arrives.
        assert (await cluster.wait_drained()).requests.cancelled == 4
        await until(lambda: _num_requests() <= num_requests)


def _num_requests() -> int:
    gc.collect()
    return sum(type(obj) is Request for obj in gc.get_objects())
