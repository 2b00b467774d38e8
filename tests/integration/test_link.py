"""A gateway's link to a coordinator: requests that survive broken connections, and credit for readers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

import gateway.upstream.link as link_module
from builtin_model import MODEL_DIRECTORY
from gateway.upstream.contract import ChoiceEnd, Found, PromptLogprobs, Tokens, UpstreamFailure
from gateway.upstream.link import DEFAULT_POLICY, CoordinatorLink
from gateway.upstream.numbered_request import RequestStream
from gateway.upstream.tokenizer_files import TokenizerFiles
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.faults.byte_proxy import ByteProxy
from tests.integration.calls import LENGTH, STOP, message, until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.gate import Gate
from tests.integration.test_mock_cluster import VOCAB_SIZE, mock_cluster
from tests.mock_answers import mock_tokens
from tests.unit.coordinator.journal.journals import crashed
from wire.clock import ClusterClock, wall_clock_us

NOWHERE = "127.0.0.1:1"
PROMPT = (3, 14, 15, 92)
HOUR_US = 3_600_000_000
QUICK = replace(DEFAULT_POLICY, unreachable_s=2.0)


class Link(CoordinatorLink):
    """A link that is started and stopped by a block."""

    async def __aenter__(self) -> Link:
        async with asyncio.timeout(DEADLINE_S):
            await self.start()
            await until(lambda: self.is_connected)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


def expected(count: int) -> list[int]:
    return list(mock_tokens(PROMPT, count, vocab_size=VOCAB_SIZE))


class Reading:
    """What a reader has of a request; checks order."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, ChoiceEnd] = {}
        self.num_prompt_logprobs = 0
        self._items = aiter(stream)

    async def until(self, count: int) -> None:
        """Read until choice 0 has `count` tokens."""
        while len(self.tokens.get(0, ())) < count:
            assert await self.next()

    async def next(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            item = await anext(self._items, None)
        if item is None:
            return False
        if isinstance(item, PromptLogprobs):
            assert item.first_index == self.num_prompt_logprobs
            self.num_prompt_logprobs += len(item.logprobs)
            return True
        assert item.choice not in self.ends
        if isinstance(item, ChoiceEnd):
            self.ends[item.choice] = item
            return True
        known = self.tokens.setdefault(item.choice, [])
        assert isinstance(item, Tokens)
        assert item.first_token_index == len(known)
        known += item.token_ids
        return True

    async def end(self) -> None:
        while await self.next():
            pass


@pytest.mark.full
async def test_a_link_reads_the_tokens_of_many_requests() -> None:
    async with mock_cluster(2) as cluster, Link(cluster.address, policy=replace(QUICK, credit=64)) as link:
        assert (link.model.name, link.model.vocab_size) == ("mock", VOCAB_SIZE)
        assert link.tokenizer_directory is None
        requests = [message(PROMPT, 140, n=1 + index % 3) for index in range(9)]
        readings = [Reading(await link.submit(request)) for request in requests]
        await asyncio.gather(*(reading.end() for reading in readings))
        for request, reading in zip(requests, readings, strict=True):
            for choice in range(request.sampling.n):
                assert reading.tokens[choice] == expected(140)
                assert reading.ends[choice].finish_reason == LENGTH
        await cluster.wait_drained()


async def test_a_rejected_request_raises_status_reason_and_delay() -> None:
    async with mock_cluster(1, max_client_requests=2) as cluster, Link(cluster.address) as link:
        with pytest.raises(UpstreamFailure, match="top_p is 2") as caught:
            await link.submit(message(PROMPT, 5, top_p=2.0))
        assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
        running = [await link.submit(message(PROMPT, 2000)) for _ in range(2)]
        with pytest.raises(UpstreamFailure, match="max_client_requests") as caught:
            await link.submit(message(PROMPT, 5))
        assert (caught.value.status, caught.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "OVERLOADED",
        )
        assert caught.value.retry_after_s is not None
        for stream in running:
            await stream.cancel()
        await cluster.wait_drained()


async def test_a_reader_that_stops_reading_holds_up_nobody_and_gets_all_later() -> None:
    async with mock_cluster(1) as cluster, Link(cluster.address, policy=replace(QUICK, credit=16)) as link:
        slow = Reading(await link.submit(message(PROMPT, 300)))
        await slow.until(1)
        fast = Reading(await link.submit(message(PROMPT, 300)))
        await fast.end()
        await until(lambda: not cluster.server.engine.live_requests)
        await slow.end()
        assert slow.tokens == fast.tokens == {0: expected(300)}


async def test_a_stop_hides_later_tokens_and_counts_none_of_them() -> None:
    async with mock_cluster(1) as cluster, Link(cluster.address) as link:
        for num_tokens, stop_at in ((2000, 7), (30, 7)):
            reading = Reading(await link.submit(message(PROMPT, num_tokens)))
            await reading.until(stop_at)
            reading.stream.stop(0, stop_at)
            got = list(reading.tokens[0])
            await reading.end()
            assert reading.tokens[0] == got
            end = reading.ends[0]
            assert (end.finish_reason, end.usage.completion_tokens) == (STOP, stop_at)
        await cluster.wait_drained()


async def test_requests_that_nobody_reads_any_more_are_cancelled() -> None:
    async with mock_cluster(1) as cluster, Link(cluster.address) as link:
        stream = await link.submit(message(PROMPT, 4000))
        await stream.cancel()
        await until(lambda: not cluster.server.engine.live_requests)
        dropped = await link.submit(message(PROMPT, 4000))
        assert cluster.server.engine.live_requests
        del dropped
        gc.collect()
        await until(lambda: not cluster.server.engine.live_requests)
    async with mock_cluster(1, num_workers=0, waits=False) as cluster, Link(cluster.address) as link:
        submitting = asyncio.create_task(link.submit(message(PROMPT, 5)))
        await until(lambda: cluster.server.engine.admission.num_preparing == 1)
        submitting.cancel()
        await until(lambda: cluster.server.engine.admission.num_preparing == 0)


@pytest.mark.full
async def test_requests_attach_again_when_the_connection_breaks() -> None:
    async with mock_cluster(2) as cluster, ByteProxy(cluster.address) as proxy, Link(proxy.address) as link:
        readings = [Reading(await link.submit(message(PROMPT, 200, n=2))) for _ in range(4)]
        for count in (20, 70):
            await asyncio.gather(*(reading.until(count) for reading in readings))
            proxy.cut()
        await asyncio.gather(*(reading.end() for reading in readings))
        for reading in readings:
            assert reading.tokens == {0: expected(200), 1: expected(200)}
        assert (await cluster.wait_drained()).requests.finished == 4


@pytest.mark.parametrize("is_left", [False, True])
async def test_requests_that_end_while_the_coordinator_is_away_are_cancelled_there(is_left: bool) -> None:
    """They failed after the gateway's patience, or their clients left: they would run on for nobody."""
    policy = replace(QUICK, unreachable_s=DEADLINE_S if is_left else 0.3)
    async with mock_cluster(1) as cluster, ByteProxy(cluster.address) as proxy:
        async with Link(proxy.address, policy=policy) as link:
            readings = [Reading(await link.submit(message(PROMPT, 3000))) for _ in range(3)]
            kept = message(PROMPT, 3000)
            kept.on_disconnect.action = inference_pb2.OnDisconnect.ACTION_DETACH
            kept.on_disconnect.keep_for.FromSeconds(60)
            own = Reading(await link.submit(kept))
            for reading in (*readings, own):
                await reading.until(1)
            proxy.target = NOWHERE
            proxy.cut()
            await until(lambda: not link.is_connected)
            for reading in readings if is_left else (*readings, own):
                if is_left:
                    await reading.stream.cancel()
                with contextlib.suppress(UpstreamFailure):
                    await reading.end()
            assert (await cluster.client.status()).requests.decode == 4
            proxy.target = cluster.address
            await until(lambda: link.is_connected)
            status = await cluster.wait_status(lambda status: status.requests.cancelled == 3)
            assert status.requests.decode == 1, "the one that says what happens without its reader"
            await link.cancel(own.stream.request_id, own.stream.secret)
        await cluster.wait_drained()


@pytest.mark.full
async def test_requests_continue_at_a_coordinator_restarted_with_its_journal(tmp_path: Path) -> None:
    async with mock_cluster(2, journal=tmp_path / "j.db") as first, ByteProxy(first.address) as proxy:
        link = Link(proxy.address)
        async with link:
            readings = [Reading(await link.submit(message(PROMPT, 300))) for _ in range(3)]
            await asyncio.gather(*(reading.until(30) for reading in readings))
            proxy.target = ""
            proxy.cut()
            journal = crashed(tmp_path / "j.db", tmp_path / "after")
            async with mock_cluster(2, journal=journal) as second:
                proxy.target = second.address
                await asyncio.gather(*(reading.end() for reading in readings))
                for reading in readings:
                    assert reading.tokens[0] == expected(300)


@pytest.mark.full
async def test_observers_read_beside_a_link_and_over_a_restart(tmp_path: Path) -> None:
    async with (
        mock_cluster(2, journal=tmp_path / "j.db") as first,
        ByteProxy(first.address) as proxy,
        Link(proxy.address) as one,
        Link(proxy.address) as other,
    ):
        request = message(PROMPT, 900, keep_s=60.0)
        request.client_state = b"state"
        reader = Reading(await one.submit(request))
        await reader.until(20)
        observer = Reading(await other.observe(request.request_id, reader.stream.secret))
        assert observer.stream.client_state == reader.stream.client_state == b"state"
        assert observer.stream.found.num_tokens >= 20
        assert not observer.stream.found.has_ended
        await observer.until(10)
        proxy.target = ""
        proxy.cut()
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
        async with mock_cluster(2, journal=journal) as second:
            proxy.target = second.address
            await asyncio.gather(reader.end(), observer.end())
            assert reader.tokens == observer.tokens == {0: expected(900)}
            late = await other.observe(request.request_id, reader.stream.secret)
            assert late.found == Found(900, has_ended=True)
            assert (await second.wait_drained()).requests.finished == 1


async def test_a_request_goes_on_without_its_readers_until_another_link_cancels_it() -> None:
    async with (
        mock_cluster(2, hop_proxies=[0]) as cluster,
        Link(cluster.address) as one,
        Link(cluster.address) as other,
    ):
        request, gate = message(PROMPT, 4000, keep_s=60.0), Gate(cluster)
        stream = await one.submit(request)
        await Reading(stream).until(60)
        gate.close()
        observer = await other.observe(request.request_id, stream.secret)
        del observer
        gc.collect()
        stream.detach()
        again = Reading(await other.observe(request.request_id, stream.secret))
        await again.until(50)
        with pytest.raises(UpstreamFailure) as wrong:
            await other.cancel(request.request_id, "x" * 43)
        assert wrong.value.status is grpc.StatusCode.PERMISSION_DENIED
        await other.cancel(request.request_id, stream.secret)
        with pytest.raises(UpstreamFailure, match="cancelled"):
            await again.end()
        await other.cancel(request.request_id, stream.secret)
        with pytest.raises(UpstreamFailure) as gone:
            await other.cancel(request.request_id, stream.secret)
        assert gone.value.status is grpc.StatusCode.NOT_FOUND
        gate.open()
        assert (await cluster.wait_drained()).requests.cancelled == 1


async def test_a_request_that_was_cancelled_before_its_first_token_can_be_observed() -> None:
    async with mock_cluster(2, hop_proxies=[0]) as cluster, Link(cluster.address) as link:
        gate = Gate(cluster)
        gate.close()
        stream = await link.submit(message(PROMPT, 10, keep_s=60.0))
        await stream.cancel()
        observer = await link.observe(stream.request_id, stream.secret)
        assert observer.found == Found(0, has_ended=True)
        with pytest.raises(UpstreamFailure, match="cancelled"):
            await Reading(observer).end()
        gate.open()


@pytest.mark.full
async def test_a_coordinator_that_stays_away_fails_requests_with_its_address() -> None:
    async with (
        mock_cluster(1) as cluster,
        ByteProxy(cluster.address) as proxy,
        Link(proxy.address, policy=QUICK) as link,
    ):
        reading = Reading(await link.submit(message(PROMPT, 4000)))
        await reading.until(5)
        proxy.target = NOWHERE
        proxy.cut()
        text = f"coordinator {proxy.address} cannot be reached"
        with pytest.raises(UpstreamFailure, match=text) as caught:
            await reading.end()
        assert caught.value.status is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(UpstreamFailure, match=text) as caught:
            await link.submit(message(PROMPT, 5), deadline_s=0.2)
        assert (caught.value.status, caught.value.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_PASSED",
        )


async def test_a_coordinator_without_a_place_for_the_stream_is_named_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with mock_cluster(1) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        others = [inference_pb2_grpc.InferenceStub(channel).Serve() for _ in range(16)]
        for other in others:
            await other.initial_metadata()
        link = CoordinatorLink(cluster.address)
        try:
            await link.start()
            waiting = asyncio.create_task(link.submit(message(PROMPT, 5)))
            text = "refuses this gateway: RESOURCE_EXHAUSTED: host 127.0.0.1 has 16 Serve streams"
            for call in (waiting, link.submit(message(PROMPT, 5))):
                with pytest.raises(UpstreamFailure, match=text) as caught:
                    await asyncio.wait_for(call, DEADLINE_S)
                assert caught.value.status is grpc.StatusCode.UNAVAILABLE
                assert caught.value.retry_after_s
            assert not link.is_connected
            assert text in link.problem
            assert [text in record.getMessage() for record in caplog.records].count(True) == 1
            others[0].cancel()
            await until(lambda: link.is_connected)
            reading = Reading(await link.submit(message(PROMPT, 5)))
            await reading.end()
        finally:
            await link.stop()
            for other in others:
                other.cancel()


async def test_the_limit_of_tokens_outlasts_a_restart_of_the_coordinator() -> None:
    async with (
        Cluster(None, layers=(6, 6)) as first,
        ByteProxy(first.address) as proxy,
        Link(proxy.address) as link,
        Cluster(None, layers=(6, 6), num_workers=0, waits=False) as second,
    ):
        assert (limit := link.model.max_sequence_tokens) > 0
        proxy.target = second.address
        proxy.cut()
        await until(lambda: not link.is_connected)
        await until(lambda: link.is_connected)
        await link._fetch_model()
        assert link.model.max_sequence_tokens == limit


async def test_the_limits_are_known_as_soon_as_they_are_planned() -> None:
    policy = replace(DEFAULT_POLICY, refresh_s=10 * DEADLINE_S)
    async with (
        mock_cluster(1, num_workers=0, waits=False) as cluster,
        Link(cluster.address, policy=policy) as link,
    ):
        assert link.model.max_sequence_tokens == 0
        await cluster.start_worker("w0")
        await until(lambda: link.model.max_sequence_tokens > 0)


async def test_a_model_that_cannot_be_read_once_is_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        mock_cluster(1, num_workers=0, waits=False) as cluster,
        Link(cluster.address) as link,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(TokenizerFiles, "generation_config", property(_fail_to_read))
            await until(lambda: "failed to read the model, the gateway tries again: broken" in caplog.text)
        await cluster.start_worker("w0")
        await until(lambda: link.is_ready)


def _fail_to_read(files: TokenizerFiles) -> dict[str, float]:
    raise UpstreamFailure("broken", status=grpc.StatusCode.INTERNAL, reason="INTERNAL_ERROR")


async def test_the_tokenizer_is_fetched_once_into_the_cache(tmp_path: Path) -> None:
    async with Cluster(None, layers=(6, 6), has_text=True) as cluster:
        async with Link(cluster.address, cache_directory=tmp_path) as link:
            directory = link.tokenizer_directory
            assert directory is not None
            assert directory.parent == tmp_path
            name = "tokenizer.json"
            assert (directory / name).read_bytes() == (MODEL_DIRECTORY / name).read_bytes()
        written_at = (directory / name).stat().st_mtime_ns
        async with Link(cluster.address, cache_directory=tmp_path) as link:
            assert link.tokenizer_directory == directory
            assert (directory / name).stat().st_mtime_ns == written_at
            stub = link._stub
            ids = (await stub.Tokenize(inference_pb2.TokenizeRequest(text="Once upon a time"))).token_ids
            text = (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))).text
            assert text.strip() == "Once upon a time"
            with pytest.raises(grpc.aio.AioRpcError, match="outside the vocabulary"):
                await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1 << 30]))
            with pytest.raises(grpc.aio.AioRpcError, match="a prompt is needed"):
                await stub.Tokenize(inference_pb2.TokenizeRequest())


async def test_a_link_keeps_a_clock_on_the_coordinators_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "wall_clock_us", lambda: wall_clock_us() - HOUR_US)
    clock = ClusterClock()
    async with mock_cluster(1) as cluster, Link(cluster.address, clock=clock):
        assert clock.uncertainty_us is not None
        assert abs(clock.offset_us - HOUR_US) <= clock.uncertainty_us + 1
