"""Sinks store spans up to their capacity and count the dropped ones."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import telemetry.span_sinks
from telemetry.span_recorder import new_span_id, new_trace_id
from telemetry.span_sinks import CoordinatorSink, QueueSink, SpanSink, StoreSink
from telemetry.spans import SpanName
from tests.otlp_collector import collector
from tests.unit.telemetry.recording import recorder_into
from wire.trace_context import span_context

ROOM = 20


@pytest.fixture(autouse=True)
def _small_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.span_sinks, "QUEUED_SPANS", ROOM)
    monkeypatch.setattr(telemetry.span_sinks, "DELAY_S", 0.01)
    monkeypatch.setattr(telemetry.span_sinks, "SEND_TIMEOUT_S", 0.3)


def fill(sink: SpanSink, num_spans: int) -> None:
    recorder = recorder_into(sink)
    for _ in range(num_spans):
        context = span_context(new_trace_id(), new_span_id())
        recorder.record(SpanName.QUEUE, context, None, start_s=1.0, end_s=2.0, attributes={})


class SlowSink(QueueSink):
    """Stores a batch when released."""

    def __init__(self) -> None:
        super().__init__()
        self.may_take = asyncio.Event()
        self.num_taken = 0

    async def deliver(self, request: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        await self.may_take.wait()
        self.num_taken += num_spans(request.resource_spans)
        return True


def num_spans(resource_spans: object) -> int:
    return sum(len(scope.spans) for resource in resource_spans for scope in resource.scope_spans)  # type: ignore[attr-defined]


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_everything_reaches_a_store() -> None:
    taken: list[int] = []
    sink = StoreSink(lambda spans: taken.append(num_spans(spans)))
    sink.start()
    fill(sink, ROOM)
    await sink.close()
    assert sum(taken) == ROOM
    assert sink.num_dropped == 0


async def test_spans_beyond_the_queue_are_counted() -> None:
    sink = SlowSink()
    sink.start()
    fill(sink, ROOM + 7)
    assert sink.num_dropped == 7
    sink.may_take.set()
    await sink.close()
    assert sink.num_taken + sink.num_dropped == ROOM + 7


async def test_spans_not_accepted_at_shutdown_are_counted() -> None:
    sink = SlowSink()
    sink.start()
    fill(sink, ROOM)
    await sink.close()
    assert sink.num_taken == 0
    assert sink.num_dropped == ROOM


async def test_spans_reach_the_coordinator() -> None:
    async with collector() as coordinator:
        sink = CoordinatorSink(coordinator.address)
        sink.start()
        fill(sink, ROOM)
        await coordinator.wait_until(lambda spans: len(spans) == ROOM)
        await sink.close()
    assert sink.num_dropped == 0


async def test_spans_are_dropped_during_an_outage_and_later_ones_arrive() -> None:
    async with collector() as coordinator:
        coordinator.may_answer.clear()
        sink = CoordinatorSink(coordinator.address)
        sink.start()
        fill(sink, ROOM)
        await until(lambda: sink.num_dropped == ROOM)
        coordinator.may_answer.set()
        fill(sink, 3)
        await coordinator.wait_until(lambda spans: len(spans) >= 3)
        await sink.close()
    assert sink.num_dropped == ROOM


async def test_an_unreachable_address_is_harmless(unused_tcp_port: int) -> None:
    sink = CoordinatorSink(f"127.0.0.1:{unused_tcp_port}")
    sink.start()
    fill(sink, ROOM)
    await until(lambda: sink.num_dropped == ROOM)
    await sink.close()
