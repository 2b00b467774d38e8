"""One message has the new output of many requests, each as far as its credit goes."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.engine import output_batch
from coordinator.engine.output_batch import (
    BatchMessage,
    NumberedOpening,
    NumberedStream,
    OutputBatch,
)
from coordinator.engine.output_stream import Positions
from coordinator.engine.request import Choice, Request
from coordinator.scheduler.sequence import FinishReason, SequenceState
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import InvalidRequest, Overloaded, RequestNotFound, StepFailed
from wire.steps import TokenLogprobs

PLENTY = 1 << 20


class Readings:
    """A batch, and the messages that it has had."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.batch = OutputBatch(lambda stream: self.ended.append(stream.number))
        self._messages = self.batch.messages()

    def open(
        self, number: int, request: Request, *, credit: int = PLENTY, at: Positions | None = None
    ) -> NumberedStream:
        self.batch.reserve(number, credit)
        opening = NumberedOpening(batch=self.batch, number=number)
        return self.batch.open(opening, request, at or Positions())

    async def next(self) -> BatchMessage:
        async with asyncio.timeout(5):
            return await anext(self._messages)

    async def has_more(self) -> bool:
        """Whether there is another message now; no other follows."""
        waiting = asyncio.ensure_future(anext(self._messages))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        has_more = waiting.done()
        waiting.cancel()
        return has_more


def request_of(num_choices: int = 1) -> Request:
    return RequestCase(max_tokens=100_000, n=num_choices).request()


def append(choice: Choice, *tokens: int) -> None:
    for token in tokens:
        choice.buffer.append(token)


def columns(message: BatchMessage) -> list[tuple[int, int, list[int]]]:
    begin, rows = 0, []
    for number, choice, count in zip(message.numbers, message.choices, message.counts, strict=True):
        rows.append((number, choice, message.token_ids[begin : begin + count]))
        begin += count
    assert begin == len(message.token_ids)
    return rows


async def test_one_message_has_the_new_tokens_of_all_requests() -> None:
    readings = Readings()
    requests = [request_of(2), request_of(), request_of()]
    streams = [readings.open(number, request) for number, request in enumerate(requests)]
    assert [accepted.number for accepted in (await readings.next()).accepted] == [0, 1, 2]
    append(requests[0].choices[1], 5, 6)
    append(requests[2].choices[0], 7)
    for stream in (streams[2], streams[0]):
        stream.wake()
    assert columns(await readings.next()) == [(2, 0, [7]), (0, 1, [5, 6])]
    assert not await readings.has_more()


async def test_what_the_end_of_a_request_delivers_is_in_the_next_message() -> None:
    readings = Readings()
    requests = [request_of(), request_of(), request_of()]
    streams = [readings.open(number, request) for number, request in enumerate(requests)]
    await readings.next()

    def deliver(ended: NumberedStream) -> None:
        """As an engine that finishes its deliveries before it detaches a reader."""
        append(requests[1].choices[0], 8)
        readings.batch.add(streams[1])
        if ended is streams[0]:
            readings.batch.end(2)

    readings.batch._on_end = deliver
    append(requests[1].choices[0], 7)
    append(requests[0].choices[0], 5)
    requests[0].choices[0].buffer.finish(FinishReason.LENGTH)
    append(requests[2].choices[0], 9)
    for stream in (streams[1], streams[0], streams[2]):
        stream.wake()
    message = await readings.next()
    assert columns(message) == [(1, 0, [7]), (0, 0, [5])]
    assert [number for number, _ in message.ends] == [0]
    assert columns(await readings.next()) == [(1, 0, [8, 8])]
    assert not await readings.has_more()


async def test_credit_bounds_what_is_sent_of_all_choices_together() -> None:
    readings = Readings()
    request = request_of(2)
    readings.open(4, request, credit=3)
    for choice in request.choices:
        append(choice, 1, 2)
    assert columns(await readings.next()) == [(4, 0, [1, 2]), (4, 1, [1])]
    assert not await readings.has_more()
    readings = Readings()
    stream = readings.open(4, request, credit=0, at=Positions(1))
    stream.num_unread_tokens = 2
    await readings.next()
    readings.batch.grant(4, 1)
    readings.batch.grant(4, 1)
    assert columns(await readings.next()) == [(4, 0, [2]), (4, 1, [2])]
    assert stream.num_unread_tokens == 0


async def test_a_choice_ends_after_its_tokens_and_the_number_after_its_choices() -> None:
    readings = Readings()
    request = request_of(2)
    readings.open(0, request, credit=2)
    for choice in request.choices:
        append(choice, 1, 2)
        choice.buffer.finish(FinishReason.LENGTH)
    message = await readings.next()
    assert (columns(message), [end[1].index for end in message.ends]) == ([(0, 0, [1, 2])], [0])
    assert readings.ended == []
    readings.batch.grant(0, 2)
    message = await readings.next()
    assert (columns(message), [end[1].index for end in message.ends]) == ([(0, 1, [1, 2])], [1])
    assert readings.ended == [0]
    assert readings.batch.find(0) is None
    readings.batch.grant(0, 2)  # ended: ignored


async def test_an_error_follows_the_tokens_before_it() -> None:
    readings = Readings()
    request = request_of()
    stream = readings.open(0, request, credit=1)
    append(request.choices[0], 1, 2)
    for sequence in request.live_sequences:
        sequence.end(SequenceState.FAILED)
    request.end(1.0, StepFailed("gave up"))
    message = await readings.next()
    assert (columns(message), message.failures) == ([(0, 0, [1])], [])
    readings.batch.grant(0, 5)
    message = await readings.next()
    assert columns(message) == [(0, 0, [2])]
    assert [str(failure.error) for failure in message.failures] == ["gave up"]
    assert readings.ended == [0]
    stream.wake()
    assert not await readings.has_more()


async def test_a_full_message_leaves_the_rest_for_the_next_one() -> None:
    readings = Readings()
    limit = output_batch.MESSAGE_TOKENS
    first, second = request_of(), request_of()
    readings.open(0, first)
    readings.open(1, second)
    append(first.choices[0], *([1] * (limit + 10)))
    append(second.choices[0], 2)
    assert [len(tokens) for _, _, tokens in columns(await readings.next())] == [limit]
    assert columns(await readings.next()) == [(1, 0, [2]), (0, 0, [1] * 10)]


async def test_log_probabilities_take_more_room_than_tokens() -> None:
    readings = Readings()
    row = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, -2.0)))
    for number in range(2):
        request = RequestCase(max_tokens=1000, logprobs=2).request()
        readings.open(number, request)
        for _ in range(100):
            request.choices[0].buffer.append(1, row)
    message = await readings.next()
    assert message.counts == [100, 28]
    assert [len(rows.rows) for rows in message.logprobs] == [100, 28]
    assert columns(await readings.next()) == [(1, 0, [1] * 72)]


async def test_client_state_takes_the_room_of_tokens() -> None:
    readings = Readings()
    limit = output_batch.MESSAGE_TOKENS * output_batch.STATE_BYTES_PER_TOKEN
    for number, size_bytes in enumerate((limit // 2, limit // 2, limit, 1)):
        request = request_of()
        request.client_state = bytes(size_bytes)
        readings.batch.reserve(number, PLENTY)
        opening = NumberedOpening(batch=readings.batch, number=number, includes_state=True)
        readings.batch.open(opening, request, Positions())
    for numbers in ([0, 1], [2], [3]):
        assert [accepted.number for accepted in (await readings.next()).accepted] == numbers
    assert not await readings.has_more()


def test_numbers_increase_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Readings().batch
    with pytest.raises(RequestNotFound, match="number 3 is not in use"):
        batch.find(3)
    batch.reserve(3, 1)
    assert batch.is_reserved(3)
    assert batch.find(3) is None
    for number in (0, 3):
        with pytest.raises(InvalidRequest, match=f"number is {number}, must be greater than 3"):
            batch.reserve(number, 1)
    monkeypatch.setattr(output_batch, "MAX_NUMBERS", 2)
    batch.reserve(4, 1)
    with pytest.raises(Overloaded, match="2 requests are live on this stream, the limit is 2"):
        batch.reserve(5, 1)
    batch.fail(3, InvalidRequest("no"))
    batch.reserve(5, 1)


def test_a_tenant_has_its_part_of_the_numbers_that_another_one_has_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_batch, "MAX_NUMBERS", 4)
    batch = Readings().batch
    for number in range(4):
        batch.reserve(number, 1, owner="flood")
    for number in (4, 5):
        batch.reserve(number, 1, owner="quiet")
    for tenant in ("flood", "quiet"):
        with pytest.raises(Overloaded):
            batch.reserve(6, 1, owner=tenant)
    for number in range(6):
        batch.end(number)
    for number in range(6, 10):
        batch.reserve(number, 1, owner="flood")


async def test_a_closed_batch_sends_what_is_left() -> None:
    readings = Readings()
    batch = readings.batch
    batch.reserve(0, 1)
    batch.fail(0, InvalidRequest("no"))
    batch.fail(0, InvalidRequest("again"))
    batch.close(InvalidRequest("the end"))
    assert [str(failure.error) for failure in (await readings.next()).failures] == ["no"]
    with pytest.raises(InvalidRequest, match="the end"):
        await readings.next()
