"""After a result, the next step leaves before readers, text and observers; they follow in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import pipeline
from coordinator.cluster.pipeline import PipelineLink
from coordinator.engine import engine
from coordinator.engine.observer import EngineObserver
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.output_stream import READERS_PER_TURN, OutputStream, ReaderWakeups
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import FinishReason, SequenceState
from stageline_rpc.internal.v1 import forward_pb2
from tests.unit.coordinator.engine.conftest import NewModel
from tests.unit.coordinator.engine.coordinators import Coordinators
from tests.unit.coordinator.engine.engine_model import EngineModel, check_whole
from tests.unit.coordinator.engine.request_cases import RequestCase, solo
from wire.errors import InvariantBroken, RequestNotFound
from wire.steps import Step, StepResult
from wire.transport import Transport

CASE = RequestCase(max_tokens=9)


# Order


class FakeCall:
    """A stream to FIRST that notes its writes; each is finished by `finish`."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._writing: asyncio.Future[None] | None = None
        self._num_read = 0

    async def write(self, message: bytes) -> None:
        self._note("hello" if forward_pb2.ForwardRequest.FromString(message).HasField("hello") else "write")
        if self._num_read:
            assert self._writing is None, "gRPC allows one write at a time"
            self._writing = asyncio.get_running_loop().create_future()
            await self._writing
            self._writing = None

    async def finish(self) -> None:
        assert self._writing is not None
        self._writing.set_result(None)
        await asyncio.sleep(0.001)

    async def read(self) -> forward_pb2.ForwardResponse:
        self._num_read += 1
        if self._num_read > 1:
            await asyncio.Event().wait()
        return forward_pb2.ForwardResponse()

    def cancel(self) -> None:
        pass


class FakeChannel:
    async def close(self) -> None:
        pass


class Notes(EngineObserver):
    """Notes the metrics that are recorded."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def step_scheduled(self, duration_s: float) -> None:
        self._note("metric")

    def step_sent(self, step: Step, now_s: float) -> None:
        self._note("metric")

    def step_completed(
        self, result: StepResult, updates: Sequence[SequenceUpdate], sent_s: float, now_s: float
    ) -> None:
        self._note("metric")


@pytest.fixture
async def link(events: list[str], monkeypatch: pytest.MonkeyPatch) -> PipelineLink:
    call: Any = FakeCall(events.append)
    monkeypatch.setattr(Transport, "channel", lambda transport, address: FakeChannel())
    monkeypatch.setattr(pipeline, "open_forward", lambda channel: call)
    link = PipelineLink("stage", forward_pb2.HopHello(), lambda reason: None, timeout_s=1.0)
    await link.open()
    await asyncio.sleep(0)
    return link


@pytest.fixture
def events() -> list[str]:
    return []


async def test_a_step_is_written_before_a_reader_wakes_text_is_decoded_or_a_metric_is_recorded(
    events: list[str], link: PipelineLink, new_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, wake = OutputBuffer.append, OutputStream.wake

    def noted_append(buffer: OutputBuffer, *arguments: Any) -> bool:
        events.append("text")
        return append(buffer, *arguments)

    def noted_wake(stream: OutputStream) -> None:
        events.append("wake")
        wake(stream)

    model = new_model(observer=Notes(events.append))
    model.submit(RequestCase(max_tokens=9, stops=("zz",)).request())
    model.turn()
    model.advance(0)
    monkeypatch.setattr(OutputBuffer, "append", noted_append)
    monkeypatch.setattr(OutputStream, "wake", noted_wake)
    model.engine._send = link.send
    events.clear()
    model.complete()
    assert events == ["write"]
    model.turn()
    assert events == ["write", "metric", "metric", "metric", "text", "wake"]
    await link.close()


async def test_a_step_behind_an_unfinished_write_follows_it(events: list[str], link: PipelineLink) -> None:
    call: Any = link._call
    for step_id in range(3):
        link.send(Step(epoch=1, step_id=step_id))
    await asyncio.sleep(0.001)
    assert events == ["hello", "write"]
    await call.finish()
    assert events == ["hello", "write", "write"]
    await call.finish()
    await call.finish()
    assert events == ["hello", "write", "write", "write"]
    link.send(Step(epoch=1, step_id=3))
    assert events == ["hello", *["write"] * 4]
    await link.close()


def test_observers_get_the_times_of_the_events(new_model: NewModel) -> None:
    times: list[float] = []

    class Times(EngineObserver):
        def step_completed(
            self, result: StepResult, updates: Sequence[SequenceUpdate], sent_s: float, now_s: float
        ) -> None:
            times.extend((sent_s, now_s))

        def step_sent(self, step: Step, now_s: float) -> None:
            times.append(now_s)

    model = new_model(observer=Times())
    model.submit(CASE.request())
    model.advance(0)
    model.now_s += 2.0
    model.complete()
    model.now_s += 5.0
    model.turn()
    assert times == [1000.0, 1000.0, 1002.0, 1002.0]


def test_a_large_step_is_delivered_in_turns_and_whole_at_the_next_call(
    new_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UPDATES_PER_TURN", 2)
    model = new_model()
    requests = [RequestCase(prompt=(1,), max_tokens=9).request(arrival=arrival) for arrival in range(5)]
    model.stop()
    calls = [model.submit(request) for request in requests]
    model.start(64)
    model.turn()
    assert model.advance(0)
    assert len(model.results[0].results) == 5
    model.complete()

    def num_delivered() -> int:
        return sum(request.choices[0].buffer.num_tokens for request in requests)

    model.turn(most=1)
    assert num_delivered() == 2
    model.turn(most=1)
    assert num_delivered() == 2, "the readers had their turn"
    model.turn(most=1)
    assert num_delivered() == 4
    model.engine.cancel(requests[4].id)
    assert num_delivered() == 5
    model.run()
    for call in calls[:4]:
        check_whole(call, RequestCase(prompt=(1,), max_tokens=9))
    model.check_idle()


def test_readers_wake_a_few_per_turn_in_order_and_once() -> None:
    turns: list[Callable[[], None]] = []
    woken: list[int] = []

    class Reader:
        batch = None

        def __init__(self, number: int) -> None:
            self.wake = lambda: woken.append(number)

    readers: list[Any] = [Reader(number) for number in range(2 * READERS_PER_TURN + 1)]
    wakeups = ReaderWakeups(turns.append, is_delivering=lambda: False)
    for reader in (*readers, *readers):
        wakeups.add(reader)
    for turn in range(3):
        assert len(woken) == turn * READERS_PER_TURN
        (wake_some,) = turns
        turns.clear()
        wake_some()
    assert turns == []
    assert woken == list(range(len(readers)))
    wakeups.add(readers[5])
    turns.pop()()
    assert woken[len(readers) :] == [5]


def test_a_batch_of_readers_wakes_once_when_all_results_are_delivered() -> None:
    turns: list[Callable[[], None]] = []
    added: list[object] = []
    woken: list[int] = []
    is_delivering = True

    class Batch:
        def add(self, stream: object) -> None:
            added.append(stream)

        def wake(self) -> None:
            woken.append(len(added))

    class Reader:
        def __init__(self, batch: Batch) -> None:
            self.batch = batch

    batches = Batch(), Batch()
    readers: list[Any] = [Reader(batches[number % 2]) for number in range(5 * READERS_PER_TURN)]
    wakeups = ReaderWakeups(turns.append, is_delivering=lambda: is_delivering)
    for reader in readers:
        wakeups.add(reader)
    for _ in range(3):
        turns.pop()()
        assert woken == []
    is_delivering = False
    turns.pop()()
    assert woken == [len(readers)] * 2
    assert turns == []
    assert added == readers


# Events between a result and its delivery


def completed(new_model: NewModel, case: RequestCase = CASE, **options: Any) -> EngineModel:
    """A model with one request, two delivered tokens, and one that is not delivered yet."""
    model = new_model(**options)
    model.submit(case.request())
    for _ in range(2):
        model.run_step()
    while not model.results:
        assert any(model.advance(stage) for stage in reversed(range(len(model.stages))))
    model.complete()
    return model


def test_a_stop_string_is_found_after_the_next_step_left_and_its_token_is_dropped(
    new_model: NewModel,
) -> None:
    plain = solo(CASE)
    case = RequestCase(max_tokens=9, stops=(plain.text[1:3],))
    model = completed(new_model, case)
    request = model.engine.live_requests[0]
    sequence = request.choices[0].sequence
    assert sequence.state is SequenceState.DECODE
    assert model.queues[0], "the next step was sent"
    call = model._calls[0]
    model.turn()
    assert request.choices[0].buffer.finish_reason is FinishReason.STOP
    assert model.kv.num_active == 0
    assert len(model.sent[-1].ends) == 1, "other requests get the blocks at once"
    model.run()
    assert sequence.generated_tokens == solo(case).tokens
    check_whole(call, case)
    assert [len(step.ends) for step in model.sent] == [0, 0, 0, 0, 1]
    model.check_idle()


def test_a_cancelled_request_has_what_was_completed_before(new_model: NewModel) -> None:
    model = completed(new_model, RequestCase(max_tokens=9, keep_s=5.0))
    call = model._calls[0]
    model.engine.cancel(call.stream.request.id)
    call.read_all()
    assert call.tokens() == solo(CASE).tokens[:3]
    model.run()
    assert model.totals == (0, 1, 0)
    model.check_idle()


def test_a_request_whose_end_is_not_delivered_yet_has_finished_for_every_call(new_model: NewModel) -> None:
    case = RequestCase(max_tokens=3)
    model = completed(new_model, case)
    call = model._calls[0]
    with pytest.raises(RequestNotFound):
        model.engine.cancel(call.stream.request.id)
    again = model.submit(case.request(request_id=call.stream.request.id))
    model.run()
    for each in (call, again):
        check_whole(each, case)
    assert model.totals == (2, 0, 0)
    model.check_idle()


def test_another_call_attaches_behind_what_was_completed(new_model: NewModel) -> None:
    model = completed(new_model)
    request = model._calls[0].stream.request
    call = model.attach(request.id, from_token=3)
    model.run()
    call.read_all()
    assert call.tokens() == solo(CASE).tokens[3:]
    assert call.stream.num_unread_tokens == 0
    model.check_idle()


def test_a_stop_string_is_found_before_the_next_result_of_its_sequence(new_model: NewModel) -> None:
    case = RequestCase(max_tokens=9, stops=(solo(CASE).text[1:3],))
    model = completed(new_model, case)
    assert model.advance(0)
    model.complete()
    model.run()
    check_whole(model._calls[0], case)
    assert model._calls[0].stream.request.choices[0].sequence.num_generated_tokens == 3
    model.check_idle()


@pytest.mark.parametrize("is_attributed", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_results_of_a_lost_epoch_are_delivered_before_it_ends(
    new_model: NewModel, ends: bool, is_attributed: bool
) -> None:
    case = RequestCase(max_tokens=3 if ends else 9)
    model = completed(new_model, case)
    if is_attributed:
        model.die()
    else:
        model.stop()
    assert model._calls[0].stream.request.is_live is not ends
    model.start(64)
    model.run()
    check_whole(model._calls[0], case)
    assert model.totals == (1, 0, 0)
    model.check_idle()


def test_two_results_in_one_turn_keep_their_order(new_model: NewModel) -> None:
    model = new_model(num_stages=2)
    call = model.submit(RequestCase(max_tokens=9, n=3).request())
    while len(model.results) < 2:
        assert any(model.advance(stage) for stage in reversed(range(2)))
        if len(model.results) == 1 and not any(model.queues):
            model.complete()
    model.complete()
    model.complete()
    model.run()
    check_whole(call, RequestCase(max_tokens=9, n=3))
    model.check_idle()


def test_a_delivery_with_a_defect_fails_its_request_alone(
    new_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = OutputBuffer.append

    def broken_append(buffer: OutputBuffer, *arguments: Any) -> bool:
        if buffer is bad.stream.request.choices[0].buffer:
            raise KeyError("a defect")
        return append(buffer, *arguments)

    model = new_model()
    bad, good = model.submit(CASE.request()), model.submit(CASE.request(arrival=1))
    monkeypatch.setattr(OutputBuffer, "append", broken_append)
    model.run()
    bad.read_all()
    assert isinstance(bad.error, InvariantBroken)
    assert str(bad.error) == "output could not be stored"
    check_whole(good, CASE)
    model.check_idle()


def test_a_crash_before_the_delivery_loses_and_repeats_nothing(tmp_path: Path) -> None:
    world = Coordinators(tmp_path)
    call = world.submit(CASE)
    for _ in range(2):
        world.model.run_step()
    call.read_all()
    while not world.model.results:
        assert any(world.model.advance(stage) for stage in (1, 0))
    world.model.complete()
    assert len(call.tokens()) == 2
    world.crash()
    again = world.model.attach(call.stream.request.id, from_token=2)
    world.model.run()
    again.read_all()
    assert call.tokens() + again.tokens() == solo(CASE).tokens
    world.model.check_idle()
    world.close()


def test_a_stop_before_the_delivery_delivers_first(tmp_path: Path) -> None:
    world = Coordinators(tmp_path)
    call = world.submit(RequestCase(max_tokens=1))
    while not world.model.results:
        assert any(world.model.advance(stage) for stage in (1, 0))
    world.model.complete()
    world.model.engine.suspend()
    check_whole(call, RequestCase(max_tokens=1))
    world.close()
