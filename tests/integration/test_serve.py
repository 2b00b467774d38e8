"""Serve: the requests of a gateway on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.engine import output_batch
from stageline_rpc.v1 import inference_pb2
from tests.hostile_messages import HOSTILE, inside
from tests.integration.calls import LENGTH, SECRET, STOP, Caller, StatusCode, again, message, until
from tests.integration.cluster import Cluster
from tests.integration.gate import Gate, num_generated
from tests.integration.numbered_calls import Gateway, Numbered
from tests.integration.test_mock_cluster import VOCAB_SIZE, mock_cluster
from tests.mock_answers import mock_tokens
from tests.unit.coordinator.journal.journals import crashed
from wire.ids import id_text, new_request_id

PROMPT = (3, 14, 15, 92)


def prompt_of(number: int) -> tuple[int, ...]:
    return (*PROMPT, number % VOCAB_SIZE)


def expected(number: int, count: int) -> list[int]:
    return list(mock_tokens(prompt_of(number), count, vocab_size=VOCAB_SIZE))


def live(cluster: Cluster) -> int:
    return len(cluster.server.engine.live_requests)


@pytest.mark.full
async def test_two_gateways_get_the_tokens_of_all_requests_in_one_message_per_step() -> None:
    async with (
        mock_cluster(2, max_step_sequences=64, queue_size=64) as cluster,
        Gateway(cluster.address) as one,
        Gateway(cluster.address) as other,
    ):
        for number in range(24):
            await one.submit(message(prompt_of(number), 40))
            await other.submit(message(prompt_of(number), 40))
        for gateway in (one, other):
            await gateway.until(lambda: all(each.is_ended for each in gateway.numbers.values()))  # noqa: B023
            for number, numbered in gateway.numbers.items():
                assert numbered.tokens[0] == expected(number, 40)
                assert numbered.ends[0].finish_reason == LENGTH
                usage = numbered.ends[0].usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (5, 40)
                queue_s, first_s = usage.queue_time.ToMicroseconds(), usage.first_token_time.ToMicroseconds()
                assert 0 <= queue_s < first_s
                assert usage.decode_time.ToMicroseconds() > 0
            sizes = [len(each.numbers) for each in gateway.messages if each.numbers]
            # Its 24 requests are spread over the steps in flight, of which there are two or three.
            assert max(sizes) >= 24 // 3
        assert (await cluster.wait_drained()).requests.finished == 48


SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"seed": 7},
    "several choices": {"seed": 8, "n": 3},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "log-probabilities of an echo": {"logprobs": 1, "echo": True, "n": 2, "seed": 1},
    "stop tokens": {"seed": 4, "stop_token_ids": list(range(90))},
    "nothing generated": {"prompt_logprobs": 1, "max_tokens": 0},
}


@pytest.mark.matrix(1, full=2)
@pytest.mark.parametrize("shape", SHAPES)
async def test_tokens_and_usage_equal_those_of_generate(worded_llama: Path, shape: str) -> None:
    options = {"max_tokens": 30, **SHAPES[shape]}
    request = message("The red fox", **options)
    async with (
        Cluster(worded_llama, layers=(1, 1, 1), has_text=True, prefix_cache=False) as cluster,
        Caller(cluster.address) as caller,
        Gateway(cluster.address) as gateway,
    ):
        responses = []
        reader = caller.generate(request)
        while (response := await reader.next()) is not None:
            responses.append(response)
        numbered = await gateway.submit(again(request))
        await gateway.until(lambda: numbered.is_ended)
        assert numbered.failure is None
        for index, choice in reader.received.choices.items():
            end = numbered.ends[index]
            assert numbered.tokens[index] == choice.tokens
            assert end.finish_reason == choice.finish_reason
            assert end.usage.completion_tokens == choice.usage.completion_tokens
            known = [row for each in responses if each.choice == index for row in each.logprobs]
            _check_logprobs(numbered.logprobs[index], known)
        known = [row for each in responses for row in each.prompt_logprobs]
        _check_logprobs(numbered.prompt_logprobs, known)
        await cluster.wait_drained()


def _check_logprobs(
    rows: Sequence[inference_pb2.TokenLogprobs], known: Sequence[inference_pb2.TokenLogprobs]
) -> None:
    """The same tokens and ranks, and values up to rounding: it differs between steps of one and two rows."""
    assert [_without_values(row) for row in rows] == [_without_values(row) for row in known]
    assert _values(rows) == pytest.approx(_values(known), abs=1e-4)


def _without_values(row: inference_pb2.TokenLogprobs) -> tuple[int, int, list[int]]:
    return row.token_id, row.rank, [top.token_id for top in row.top]


def _values(rows: Sequence[inference_pb2.TokenLogprobs]) -> list[float]:
    return [value for row in rows for value in (row.logprob, *(top.logprob for top in row.top))]


async def test_a_request_without_credit_waits_beside_fast_ones() -> None:
    async with mock_cluster(2) as cluster, Gateway(cluster.address) as gateway:
        slow = await gateway.submit(message(prompt_of(0), 60), credit=7)
        choices = await gateway.submit(message(prompt_of(1), 20, n=2), credit=0)
        fast = [await gateway.submit(message(prompt_of(number), 60)) for number in range(2, 6)]
        await gateway.until(lambda: all(each.is_ended for each in fast))
        await until(lambda: live(cluster) == 0)
        assert slow.tokens[0] == expected(0, 7)
        assert not choices.tokens
        assert not slow.ends
        await gateway.grant({0: 13, 1: 25})
        await gateway.until(
            lambda: len(slow.tokens[0]) == 20 and sum(map(len, choices.tokens.values())) == 25
        )
        await gateway.grant({0: 40, 1: 15})
        await gateway.until(lambda: slow.is_ended and choices.is_ended)
        assert slow.tokens[0] == expected(0, 60)
        assert choices.tokens[0] == choices.tokens[1] == expected(1, 20)
        for number, each in enumerate(fast, start=2):
            assert each.tokens[0] == expected(number, 60)


async def test_a_reader_too_far_behind_is_cancelled_after_the_tokens_before() -> None:
    async with mock_cluster(1, max_unread_tokens=32) as cluster, Gateway(cluster.address) as gateway:
        slow = await gateway.submit(message(prompt_of(0), 400), credit=0)
        await until(lambda: slow.is_accepted and live(cluster) == 0)
        assert slow.failure is None
        await gateway.grant({0: 400})
        await gateway.until(lambda: slow.is_ended)
        assert slow.failure is not None
        assert slow.failure.code == StatusCode.CANCELLED.value[0]
        assert slow.failure.message.startswith("the client reads too slowly")
        assert slow.tokens[0] == expected(0, 33)


async def test_a_stop_ends_a_choice_after_the_given_token() -> None:
    async with mock_cluster(2, hop_proxies=[0]) as cluster, Gateway(cluster.address) as gateway:
        gate = Gate(cluster)
        numbered = await gateway.submit(message(prompt_of(0), 400, n=2))
        await gateway.until(lambda: len(numbered.tokens[0]) >= 20 and len(numbered.tokens[1]) >= 20)
        gate.close()
        await gate.wait_quiet()
        await gateway.stop(0, 1, 13)
        await gateway.until(lambda: 1 in numbered.ends)
        end = numbered.ends[1]
        assert (end.finish_reason, end.usage.completion_tokens) == (STOP, 13)
        counts = num_generated(cluster, numbered.request_id)
        assert counts[1] == 13
        gate.open()
        await gateway.until(lambda: len(numbered.tokens[0]) > counts[0] + 5)
        await gateway.stop(0, 0, 6)
        await gateway.until(lambda: numbered.is_ended)
        assert (numbered.ends[0].finish_reason, numbered.ends[0].usage.completion_tokens) == (STOP, 6)
        status = await cluster.wait_drained()
        assert (status.requests.finished, status.requests.cancelled) == (1, 0)
        await gateway.stop(0, 0, 6)  # ended: ignored
        after = await gateway.submit(message(prompt_of(1), 3))
        await gateway.until(lambda: after.is_ended)
        assert not numbered.rejections


async def test_a_stop_of_a_reader_without_credit_ends_it_at_once() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        numbered = await gateway.submit(message(prompt_of(0), 50), credit=10)
        await gateway.until(lambda: len(numbered.tokens[0]) == 10)
        await until(lambda: live(cluster) == 0)
        await gateway.stop(0, 0, 8)
        await gateway.until(lambda: numbered.is_ended)
        assert numbered.ends[0].finish_reason == LENGTH  # it had ended before


async def test_errors_of_one_request_are_errors_of_its_number() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        running = await gateway.submit(message(prompt_of(0), 2000, keep_s=60.0))
        bad: list[tuple[Numbered, StatusCode, str]] = [
            (await gateway.submit(message(PROMPT, 5, stop=["a"])), StatusCode.INVALID_ARGUMENT, "stop needs"),
            (await gateway.submit(message((VOCAB_SIZE,), 5)), StatusCode.INVALID_ARGUMENT, "prompt token id"),
            (await gateway.submit(message(PROMPT, 5, n=65)), StatusCode.INVALID_ARGUMENT, "n is 65"),
            (
                await gateway.submit(message(PROMPT, 5), attach_secret="short"),
                StatusCode.INVALID_ARGUMENT,
                "attach secret has 5",
            ),
            (
                await gateway.submit(inference_pb2.GenerateRequest(request_id="no id")),
                StatusCode.INVALID_ARGUMENT,
                "",
            ),
            (
                await gateway.attach(Numbered(), request_id=id_text(new_request_id())),
                StatusCode.NOT_FOUND,
                "request",
            ),
        ]
        await gateway.until(lambda: len(running.tokens[0]) > 3)
        bad += [
            (
                await gateway.attach(running, secret="x" * 43),
                StatusCode.PERMISSION_DENIED,
                "attach secret of the request is missing or wrong",
            ),
            (
                await gateway.attach(Numbered(tokens={0: [0] * 3000}, request_id=running.request_id)),  # type: ignore[arg-type]
                StatusCode.INVALID_ARGUMENT,
                "from_token is 3000",
            ),
        ]
        same_id = message(PROMPT, 5)
        same_id.request_id = running.request_id
        bad.append((await gateway.submit(same_id), StatusCode.ALREADY_EXISTS, "request"))
        for numbered, code, text in bad:
            await gateway.until(lambda: numbered.is_ended)  # noqa: B023
            assert numbered.failure is not None
            assert numbered.failure.code == code.value[0], numbered.failure
            assert numbered.failure.message.startswith(text)
            assert numbered.failure.reason
        assert running.failure is None
        await gateway.cancel(0)
        await gateway.until(lambda: running.is_ended)
        assert running.failure.code == StatusCode.CANCELLED.value[0]
        assert (await cluster.wait_drained()).requests.kept == 1


async def test_commands_without_effect_are_rejected_and_the_request_continues() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        running = await gateway.submit(message(prompt_of(0), 2000))
        await gateway.until(lambda: len(running.tokens[0]) > 3)
        again_0 = inference_pb2.Submit(number=0, request=message(PROMPT, 5), credit=5)
        await gateway.send(submit=again_0)
        await gateway.stop(0, 3, 1)
        await gateway.stop(0, 0, 5000)
        await gateway.stop(0, 0, 0)
        await gateway.cancel(77)
        await gateway.stop(78, 0, 1)
        await gateway.grant({79: 5, 0: 5})
        await gateway.until(lambda: len(running.rejections) == 4 and len(gateway.numbers) == 4)
        texts = [rejection.message for rejection in running.rejections]
        assert texts[0] == "number is 0, must be greater than 0, the last one"
        assert texts[1] == "choice is 3, the request has 1 choices"
        assert texts[2].startswith("after_token is 5000, choice 0 has")
        assert texts[3].startswith("after_token is 0, choice 0 has")
        for number in (77, 78, 79):
            [rejection] = gateway.numbers[number].rejections
            assert (rejection.code, rejection.reason) == (StatusCode.NOT_FOUND.value[0], "REQUEST_NOT_FOUND")
        count = len(running.tokens[0])
        await gateway.until(lambda: len(running.tokens[0]) > count)
        assert running.failure is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 20,
        inference_pb2.ServeRequest(
            credit=inference_pb2.GrantCredit(numbers=[0], tokens=[1, 2])
        ).SerializeToString(),
        b"\x3a\x00",
    ],
)
async def test_a_message_that_cannot_be_read_ends_the_stream(data: bytes) -> None:
    async with mock_cluster(1) as cluster:
        async with Gateway(cluster.address) as gateway:
            await gateway.submit(message(PROMPT, 2000))
            await gateway.until(lambda: len(gateway.numbers[0].tokens[0]) > 3)
            raw: Any = gateway.call
            raw._request_serializer = lambda data: data
            await raw.write(data)
            error = await gateway.end()
            assert error is not None
            assert error.code() is StatusCode.INVALID_ARGUMENT
        assert (await cluster.wait_drained()).requests.cancelled == 1


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["7.5 million empty chat messages", "packed ids", "unknown groups"])
async def test_a_hostile_request_is_the_error_of_its_number(name: str) -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        running = await gateway.submit(message(prompt_of(0), 200))
        raw: Any = gateway.call
        serializer, raw._request_serializer = raw._request_serializer, lambda data: data
        await raw.write(inside(1, b"\x08\x05" + inside(2, HOSTILE[name].data)))
        raw._request_serializer = serializer
        await gateway.until(lambda: gateway.numbers[5].is_ended and running.is_ended)
        failure = gateway.numbers[5].failure
        assert failure is not None
        assert failure.reason == HOSTILE[name].reason
        assert running.tokens[0] == expected(0, 200)


async def test_a_stream_that_ends_cancels_or_detaches_and_another_attaches() -> None:
    async with mock_cluster(2, hop_proxies=[0]) as cluster:
        gate = Gate(cluster)
        async with Gateway(cluster.address) as first:
            kept = await first.submit(message(prompt_of(0), 80, n=2, keep_s=60.0), attach_secret="")
            await first.submit(message(prompt_of(1), 2000))
            await first.until(lambda: len(kept.tokens[0]) > 10 and len(kept.tokens[1]) > 10)
            gate.close()
            assert len(kept.secret) >= 32
        await until(lambda: live(cluster) == 1)
        async with Gateway(cluster.address) as second:
            attached = await second.attach(kept, secret=kept.secret)
            await second.until(lambda: attached.is_accepted)
            gate.open()
            await second.until(lambda: attached.is_ended)
            assert attached.tokens[0] == attached.tokens[1] == expected(0, 80)
            # Ended and kept: it can be read again.
            whole = await second.attach(
                Numbered(request_id=kept.request_id, num_choices=2), secret=kept.secret
            )
            await second.until(lambda: whole.is_ended)
            assert whole.tokens[0] == expected(0, 80)
        status = await cluster.wait_drained()
        assert (status.requests.finished, status.requests.cancelled) == (1, 1)


async def test_an_attaching_stream_supersedes_the_one_before() -> None:
    async with (
        mock_cluster(1) as cluster,
        Gateway(cluster.address) as one,
        Gateway(cluster.address) as other,
        Caller(cluster.address) as caller,
    ):
        first = await one.submit(message(prompt_of(0), 300))
        await one.until(lambda: len(first.tokens[0]) > 5)
        same_stream = await one.attach(first)
        await one.until(lambda: first.is_ended and len(same_stream.tokens[0]) > 8)
        second = await other.attach(same_stream)
        await one.until(lambda: same_stream.is_ended)
        for superseded in (first, same_stream):
            assert superseded.failure is not None
            assert superseded.failure.reason == "SUPERSEDED"
        await other.until(lambda: len(second.tokens[0]) > 20)
        reader = caller.attach_at(first.request_id, 0)
        assert await reader.end() is StatusCode.OK
        assert reader.received.tokens == expected(0, 300)
        await other.until(lambda: second.is_ended)
        assert second.failure is not None
        assert (await cluster.wait_drained()).requests.finished == 1


async def test_a_deadline_ends_a_request_and_its_number() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        late = await gateway.submit(message(PROMPT, 4000), timeout=Duration(nanos=200_000_000))
        past = await gateway.submit(message(PROMPT, 4000), timeout=Duration(seconds=-5))
        await gateway.until(lambda: late.is_ended and past.is_ended)
        for numbered in (late, past):
            assert numbered.failure is not None
            assert numbered.failure.code == StatusCode.DEADLINE_EXCEEDED.value[0]
        await cluster.wait_drained()


async def test_a_cancelled_submission_is_forgotten_before_a_pipeline_serves() -> None:
    async with mock_cluster(1, num_workers=0, waits=False) as cluster, Gateway(cluster.address) as gateway:
        waiting = await gateway.submit(message(PROMPT, 5))
        await until(lambda: cluster.server.engine.admission.num_preparing == 1)
        await gateway.stop(0, 0, 1)
        await gateway.until(lambda: len(waiting.rejections) == 1)
        assert waiting.rejections[0].message == "number 0 is not accepted yet, so it has no tokens"
        await gateway.cancel(0)
        await gateway.until(lambda: waiting.is_ended)
        await until(lambda: cluster.server.engine.admission.num_preparing == 0)
        await gateway.submit(message(PROMPT, 5))
        await until(lambda: cluster.server.engine.admission.num_preparing == 1)
        await gateway.close()
        await until(lambda: cluster.server.engine.admission.num_preparing == 0)


@pytest.mark.full
async def test_tokens_arrive_once_over_the_ends_of_epochs() -> None:
    async with mock_cluster(2) as cluster, Gateway(cluster.address) as gateway:
        numbered = [await gateway.submit(message(prompt_of(number), 300)) for number in range(6)]
        await gateway.until(lambda: all(len(each.tokens[0]) > 20 for each in numbered))
        for _ in range(2):
            epoch = cluster.epoch
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
            await until(lambda: cluster.epoch > epoch)  # noqa: B023
            counts = [len(each.tokens[0]) for each in numbered]
            await gateway.until(
                lambda: all(
                    len(each.tokens[0]) > min(count + 10, 299)
                    for each, count in zip(numbered, counts, strict=True)  # noqa: B023
                )
            )
        await gateway.until(lambda: all(each.is_ended for each in numbered))
        for number, each in enumerate(numbered):
            assert each.tokens[0] == expected(number, 300)
            assert each.ends[0].usage.restarts >= 1


@pytest.mark.full
async def test_a_coordinator_restarted_with_its_journal_continues_with_the_stops(tmp_path: Path) -> None:
    async with mock_cluster(2, journal=tmp_path / "j.db", hop_proxies=[0]) as first:
        gate = Gate(first)
        async with Gateway(first.address) as gateway:
            plain = await gateway.submit(message(prompt_of(0), 120))
            choices = await gateway.submit(message(prompt_of(1), 120, n=2))
            whole = await gateway.submit(message(prompt_of(2), 120, keep_s=60.0))
            await gateway.until(lambda: all(len(each.tokens[0]) > 20 for each in gateway.numbers.values()))
            gate.close()
            await gate.wait_quiet()
            await gateway.stop(1, 1, 9)
            await gateway.stop(2, 0, 11)
            await gateway.until(lambda: 1 in choices.ends and whole.is_ended)
            journal = crashed(tmp_path / "j.db", tmp_path / "after")
        gate.open()
    async with mock_cluster(2, journal=journal) as second, Gateway(second.address) as gateway:
        del choices.tokens[1][9:]
        again_plain, again_choices = await gateway.attach(plain), await gateway.attach(choices)
        again_whole = await gateway.attach(Numbered(request_id=whole.request_id))
        await gateway.until(lambda: all(each.is_ended for each in gateway.numbers.values()))
        assert again_plain.tokens[0] == expected(0, 120)
        assert again_choices.tokens[0] == expected(1, 120)
        assert again_choices.tokens[1] == expected(1, 9)
        assert again_choices.ends[1].finish_reason == STOP
        assert again_choices.ends[1].usage.completion_tokens == 9
        assert again_whole.tokens[0] == expected(2, 11)
        assert again_whole.ends[0].finish_reason == STOP
        metadata = dict(await gateway.call.initial_metadata())
        assert metadata["stageline-journalled"] == "1"


@pytest.mark.parametrize("client_key", [None, "x-client"])
async def test_clients_share_limits_by_name_over_streams(client_key: str | None) -> None:
    async with (
        mock_cluster(1, client_key=client_key, max_client_requests=1) as cluster,
        Gateway(cluster.address) as one,
        Gateway(cluster.address) as other,
    ):
        ann = await one.submit(message(prompt_of(0), 2000), client="ann")
        await one.until(lambda: ann.is_accepted)
        refused = await other.submit(message(PROMPT, 5), client="ann")
        bob = await other.submit(message(PROMPT, 5), client="bob")
        await other.until(lambda: refused.is_ended and bob.is_ended)
        assert refused.failure is not None
        assert refused.failure.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.failure.retry_delay.ToMicroseconds() > 0
        assert bob.failure is None


async def test_a_long_name_of_a_client_is_refused() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        served = await gateway.submit(message(PROMPT, 5), client="a" * 256)
        refused = await gateway.submit(message(PROMPT, 5), client="a" * 257)
        await gateway.until(lambda: served.is_ended and refused.is_ended)
        assert served.failure is None
        assert refused.failure is not None
        assert refused.failure.message == "client has 257 characters, the limit is 256"
        assert refused.failure.field == "client"


async def test_readers_of_a_client_take_its_own_part_of_a_streams_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_batch, "MAX_NUMBERS", 2)
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        request = await gateway.submit(message(PROMPT, 2000), client="flood")
        await gateway.until(lambda: request.is_accepted)
        for client, failures in (("flood", []), ("quiet", []), ("flood", ["OVERLOADED"])):
            reader = await gateway.attach(Numbered(request.request_id), observe=True, client=client)
            await gateway.until(lambda reader=reader: reader.is_accepted or reader.rejections)
            assert [rejection.reason for rejection in reader.rejections] == failures
        long = await gateway.attach(Numbered(request.request_id), observe=True, client="a" * 257)
        await gateway.until(lambda: long.is_ended)
        assert long.failure is not None
        assert long.failure.field == "client"


async def test_the_coordinators_end_fails_requests_and_streams() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        running = await gateway.submit(message(PROMPT, 2000))
        await gateway.until(lambda: len(running.tokens[0]) > 3)
        stopping = asyncio.create_task(cluster.server.stop())
        error = await gateway.end()
        assert error is not None
        assert error.code() is StatusCode.UNAVAILABLE
        assert running.failure is not None
        assert running.failure.code == StatusCode.UNAVAILABLE.value[0]
        await stopping


async def test_a_secret_of_the_coordinator_is_told_once() -> None:
    async with mock_cluster(1) as cluster, Gateway(cluster.address) as gateway:
        own = await gateway.submit(message(PROMPT, 3), attach_secret=SECRET)
        made = await gateway.submit(message(PROMPT, 3), attach_secret="")
        await gateway.until(lambda: own.is_ended and made.is_ended)
        assert not own.secret
        assert len(made.secret) == 43
