"""Another process of a client continues its work: state kept with the request, observers, and detaching."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.engine.request import MAX_OBSERVERS
from stageline_rpc.v1 import inference_pb2
from tests.integration.calls import SECRET, Caller, StatusCode, message, until
from tests.integration.cluster import DEADLINE_S
from tests.integration.gate import Gate
from tests.integration.numbered_calls import PLENTY, Gateway, Numbered
from tests.integration.test_mock_cluster import VOCAB_SIZE, mock_cluster
from tests.mock_answers import mock_tokens
from tests.unit.coordinator.journal.journals import crashed
from wire.channels import ATTACH_SECRET_KEY

pytestmark = pytest.mark.full

PROMPT = (3, 14, 15, 92)
STATE = b"state that no log may have \x00\xff" * 9
LIMIT = 256 * 1024


def with_state(
    max_tokens: int, state: bytes = STATE, *, keep_s: float = 60.0
) -> inference_pb2.GenerateRequest:
    request = message(PROMPT, max_tokens, keep_s=keep_s)
    request.client_state = state
    return request


def expected(count: int) -> list[int]:
    return list(mock_tokens(PROMPT, count, vocab_size=VOCAB_SIZE))


async def test_the_state_comes_back_with_an_attach_that_wants_it() -> None:
    async with mock_cluster(1) as cluster, Caller(cluster.address) as caller:
        async with Gateway(cluster.address) as one:
            submitted = await one.submit(with_state(50, b"\xfe" * LIMIT))
            await one.until(lambda: submitted.is_ended)
            assert submitted.client_state == b"", "the submitting client has it"
        async with Gateway(cluster.address) as other:
            plain = await other.attach(submitted)
            wanting = [
                await other.attach(
                    Numbered(request_id=submitted.request_id), include_client_state=True, observe=True
                )
                for _ in range(5)
            ]
            await other.until(lambda: all(each.is_ended for each in (plain, *wanting)))
            assert [each.client_state for each in wanting] == [b"\xfe" * LIMIT] * 5
            assert all(each.tokens[0] == expected(50) for each in wanting)
            assert plain.client_state == b""
        attach = inference_pb2.AttachRequest(request_id=submitted.request_id, include_client_state=True)
        secret = ((ATTACH_SECRET_KEY, SECRET),)
        responses = [each async for each in caller._stub.Attach(attach, timeout=DEADLINE_S, metadata=secret)]
        assert [each.client_state for each in responses][:1] == [b"\xfe" * LIMIT]
        assert not any(each.client_state for each in responses[1:])


async def test_too_much_state_is_rejected_with_the_numbers() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        large = await gateway.submit(with_state(5, bytes(LIMIT + 1)))
        await gateway.until(lambda: large.is_ended)
        assert large.failure is not None
        assert large.failure.message == "client_state has 262145 bytes, the limit is 262144"
        assert large.failure.code == StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize("ends_first", [False, True])
async def test_the_state_survives_a_restart_of_the_coordinator(
    ends_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with mock_cluster(2, journal=tmp_path / "j.db", hop_proxies=[0]) as first:
        gate = Gate(first)
        async with Gateway(first.address) as gateway:
            submitted = await gateway.submit(with_state(120))
            if ends_first:
                await gateway.until(lambda: submitted.is_ended)
            else:
                await gateway.until(lambda: len(submitted.tokens[0]) > 20)
                gate.close()
                await gate.wait_quiet()
            journal = crashed(tmp_path / "j.db", tmp_path / "after")
        gate.open()
    async with mock_cluster(2, journal=journal) as second, Gateway(second.address) as gateway:
        again = await gateway.attach(Numbered(request_id=submitted.request_id), include_client_state=True)
        await gateway.until(lambda: again.is_ended)
        assert again.client_state == STATE
        assert again.tokens[0] == expected(120)
    assert "no log may have" not in caplog.text


async def test_observers_read_beside_the_reader_and_leave_it_alone() -> None:
    async with (
        mock_cluster(2, hop_proxies=[0], max_unread_tokens=32) as cluster,
        Gateway(cluster.address) as one,
        Gateway(cluster.address) as other,
    ):
        gate = Gate(cluster)
        reader = await one.submit(message(PROMPT, 600))
        await one.until(lambda: len(reader.tokens[0]) > 10)
        gate.close()
        start = Numbered(request_id=reader.request_id)
        quick = await other.attach(start, observe=True)
        gone = await other.attach(start, observe=True)
        stuck = await other.attach(start, observe=True, credit=0)
        await other.until(lambda: len(gone.tokens[0]) > 0 and stuck.is_accepted)
        await other.detach(1)
        gate.open()
        await one.until(lambda: reader.is_ended)
        await other.until(lambda: quick.is_ended)
        assert reader.tokens[0] == quick.tokens[0] == expected(600)
        assert (stuck.tokens[0], gone.is_ended) == ([], False)
        await other.grant({2: PLENTY})
        await other.until(lambda: stuck.is_ended)
        assert stuck.tokens[0] == expected(600), "the output was not kept, but a reader had it"
        assert (await cluster.wait_drained()).requests.finished == 1


async def test_observers_are_limited_and_get_the_end_of_a_cancelled_request() -> None:
    async with mock_cluster(2, hop_proxies=[0]) as cluster, Gateway(cluster.address) as gateway:
        gate = Gate(cluster)
        reader = await gateway.submit(with_state(3000))
        await gateway.until(lambda: len(reader.tokens[0]) > 10)
        gate.close()
        start = Numbered(request_id=reader.request_id)
        observers = [await gateway.attach(start, observe=True) for _ in range(MAX_OBSERVERS + 1)]
        await gateway.until(lambda: observers[-1].is_ended)
        assert observers[-1].failure is not None
        assert observers[-1].failure.message.endswith("the limit is 64")
        await gateway.cancel(0)
        await gateway.until(lambda: all(each.is_ended for each in observers))
        assert {each.failure.reason for each in observers[:-1] if each.failure} == {"REQUEST_CANCELLED"}
        gate.open()


async def test_a_request_goes_on_or_ends_without_a_detached_reader_as_it_asked() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        kept = await gateway.submit(with_state(200))
        unkept = await gateway.submit(message(PROMPT, 4000))
        await gateway.until(lambda: len(unkept.tokens[0]) > 3)
        for number in (0, 1):
            await gateway.detach(number)
        await until(lambda: not cluster.server.engine.live_requests)
        again = await gateway.attach(Numbered(request_id=kept.request_id))
        await gateway.until(lambda: again.is_ended)
        assert again.tokens[0] == expected(200)
        status = await cluster.wait_drained()
        assert (status.requests.finished, status.requests.cancelled) == (1, 1)
        await gateway.detach(0)
        await gateway.detach(99)
        await gateway.until(lambda: bool(gateway.numbers[99].rejections))
        assert not gateway.numbers[0].rejections, "ended numbers are ignored"
