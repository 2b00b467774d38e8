"""Traces through the coordinator's port: export, client queries and spans of a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData

from coordinator.api import telemetry_service
from coordinator.api.intake import BURST_BYTES, Intake
from coordinator.api.message_limits import MessageLimits
from coordinator.api.telemetry_service import MetricsService, TraceService
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from coordinator.observability.trace_store import StoreLimits, TraceStore
from coordinator.server import CoordinatorServer
from stageline.client.client import Client
from stageline.client.errors import InvalidRequest, RequestNotFound, StatusDetails
from stageline_rpc.v1 import telemetry_pb2, telemetry_pb2_grpc
from telemetry.trace_view.explain import explain, slowest_stage
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace
from tests.integration.cluster import DEADLINE_S, RequestCase
from tests.integration.test_mock_cluster import mock_cluster
from tests.otlp_spans import REQUEST_ID, served
from wire.channels import new_server
from wire.ids import id_text
from wire.transport import PLAIN


def export_request(spans: list[ResourceSpans]) -> trace_service_pb2.ExportTraceServiceRequest:
    return trace_service_pb2.ExportTraceServiceRequest(resource_spans=spans)


def config() -> CoordinatorConfig:
    return CoordinatorConfig(
        mock_model="layers=2,hidden=32,vocab=512",
        listen="127.0.0.1:0",
        http=None,
        num_stages=2,
        block_size=8,
        max_step_tokens=32,
        max_step_sequences=4,
        queue_size=4,
    )


async def started(config: CoordinatorConfig) -> CoordinatorServer:
    server = CoordinatorServer(config, open_model(config))
    await server.start()
    return server


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorServer]:
    """Without workers, so that only exported spans are stored."""
    server = await started(config())
    yield server
    await server.stop()


@pytest.fixture
async def channel(coordinator: CoordinatorServer) -> AsyncIterator[grpc.aio.Channel]:
    async with PLAIN.channel(coordinator.address) as channel:
        yield channel


def read(data: bytes, request_id: str) -> RequestTrace:
    return request_trace(read_spans(TracesData.FromString(data)), request_id)


async def test_exported_spans_are_returned_to_clients(
    coordinator: CoordinatorServer, channel: grpc.aio.Channel
) -> None:
    maker = served((0.2, 0.4, 0.2))
    response = await trace_service_pb2_grpc.TraceServiceStub(channel).Export(
        export_request(maker.spans), timeout=DEADLINE_S
    )
    assert not response.HasField("partial_success")
    async with Client(coordinator.address) as client:
        found = await client.trace(REQUEST_ID)
        by_part = await client.trace(REQUEST_ID[:9])
        listed = await client.traces()
    assert found.request_id == by_part.request_id == REQUEST_ID
    assert found.trace_id == maker.trace_id.hex()
    assert read(found.traces_data, REQUEST_ID) == maker.trace()
    [line] = listed.traces
    assert (line.request_id, line.prompt_tokens, line.completion_tokens) == (REQUEST_ID, 100, 50)
    assert (line.slowest_stage.worker, line.slowest_stage.ratio_to_median) == (
        "worker-1",
        pytest.approx(2.0),
    )
    assert line.duration.ToMicroseconds() / 1e6 == pytest.approx(maker.trace().duration_s)


async def test_the_trace_list_has_the_requested_length_and_order(
    coordinator: CoordinatorServer,
) -> None:
    makers = [
        served(request_id=_id(number), trace_id=bytes([number] * 16), begin_ns=number * 10**9)
        for number in (1, 2, 3)
    ]
    late = makers[2].spans.pop(5)
    for maker in makers:
        coordinator.trace_store.add(maker.spans)
    async with Client(coordinator.address) as client:
        assert [trace.request_id for trace in (await client.traces(2)).traces] == [_id(3), _id(2)]
        before = (await client.traces()).traces
        coordinator.trace_store.add([late])
        after = (await client.traces(1)).traces
        again = (await client.traces()).traces
    newest_first = [_id(3), _id(2), _id(1)]
    assert [trace.request_id for trace in before] == [trace.request_id for trace in again] == newest_first
    assert after[0].spans == again[0].spans == before[0].spans + 1
    assert again[1:] == before[1:]


async def test_an_unknown_trace_is_not_found_and_an_ambiguous_one_rejected(
    coordinator: CoordinatorServer,
) -> None:
    for number in (1, 2):
        coordinator.trace_store.add(served(request_id=_id(number), trace_id=bytes([number] * 16)).spans)
    async with Client(coordinator.address) as client:
        with pytest.raises(RequestNotFound, match="no trace of request other is stored"):
            await client.trace("other")
        with pytest.raises(InvalidRequest, match="01890a5d matches 2 requests"):
            await client.trace("01890a5d")


async def test_invalid_spans_are_counted_in_the_response(
    coordinator: CoordinatorServer, channel: grpc.aio.Channel
) -> None:
    scope = InstrumentationScope(name="stageline")
    bad = ResourceSpans(
        scope_spans=[ScopeSpans(scope=scope, spans=[Span(trace_id=b"short", span_id=b"s" * 8)])]
    )
    foreign = ResourceSpans(scope_spans=[ScopeSpans(spans=[Span(trace_id=b"t" * 16, span_id=b"s" * 8)])])
    export = trace_service_pb2_grpc.TraceServiceStub(channel).Export
    response = await export(export_request([*served().spans, bad, foreign, bad]), timeout=DEADLINE_S)
    assert response.partial_success.rejected_spans == 3
    assert response.partial_success.error_message == (
        "2 spans without a trace id of 16 bytes and a span id of 8, 1 spans of a scope that is not stageline"
    )
    assert len(coordinator.trace_store.find(REQUEST_ID).spans) == len(served().spans)


async def test_spans_of_an_evicted_trace_are_counted_in_the_response() -> None:
    store = TraceStore(StoreLimits(num_traces=1))
    first, *late = served(trace_id=b"1" * 16).spans
    async with _serving(store) as export:
        await export(export_request([first]), timeout=DEADLINE_S)
        await export(export_request(served(trace_id=b"2" * 16).spans), timeout=DEADLINE_S)
        response = await export(export_request(late), timeout=DEADLINE_S)
    assert response.partial_success.rejected_spans == len(late)
    assert "spans of evicted traces" in response.partial_success.error_message


async def test_a_batch_that_is_too_large_is_rejected_whole(
    coordinator: CoordinatorServer, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_service, "MAX_EXPORT_BYTES", 1000)
    export = trace_service_pb2_grpc.TraceServiceStub(channel).Export
    with pytest.raises(grpc.aio.AioRpcError, match="the limit is 1000: send smaller batches") as caught:
        await export(export_request(served().spans), timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "exporters retry other statuses"
    assert coordinator.trace_store.num_traces == 0


async def test_metrics_are_accepted_and_passed_on() -> None:
    seen: list[metrics_service_pb2.ExportMetricsServiceRequest] = []

    def on_metrics(request: metrics_service_pb2.ExportMetricsServiceRequest) -> int:
        seen.append(request)
        return 2

    point = NumberDataPoint(as_int=1)
    metric = Metric(name="x", gauge=Gauge(data_points=[point, point, point]))
    request = metrics_service_pb2.ExportMetricsServiceRequest(
        resource_metrics=[ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[metric])])]
    )
    async with _serving_metrics(MetricsService(Intake(), on_metrics)) as export:
        response = await export(request, timeout=DEADLINE_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(telemetry_service, "MAX_EXPORT_BYTES", 10)
            with pytest.raises(grpc.aio.AioRpcError, match="the limit is 10: send smaller batches"):
                await export(request, timeout=DEADLINE_S)
    assert seen == [request]
    assert response.partial_success.rejected_data_points == 2


async def test_a_server_without_metrics_accepts_and_drops_them() -> None:
    async with _serving_metrics(MetricsService(Intake())) as export:
        response = await export(metrics_service_pb2.ExportMetricsServiceRequest(), timeout=DEADLINE_S)
    assert not response.HasField("partial_success")


async def test_the_coordinator_rejects_metrics_of_strangers(channel: grpc.aio.Channel) -> None:
    stub = metrics_service_pb2_grpc.MetricsServiceStub(channel)
    metric = Metric(name="x", gauge=Gauge(data_points=[NumberDataPoint(as_int=1)] * 7))
    message = ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[metric, metric])])
    request = metrics_service_pb2.ExportMetricsServiceRequest(resource_metrics=[message])
    response = await stub.Export(request, timeout=DEADLINE_S)
    assert response.partial_success.rejected_data_points == 14
    assert "14 points" in response.partial_success.error_message


async def test_a_slow_stage_is_named() -> None:
    case = RequestCase(prompt=tuple(range(40)), max_tokens=20)
    async with mock_cluster(4, "step=4ms", "step=4ms", "step=8ms", "step=4ms") as cluster:
        async with cluster.generating([case, case.again(), case.again()]):
            pass
        trace = await _whole_trace(
            cluster.client, id_text(case.request_id), num_decode_steps=19, num_stages=4
        )
    slow = slowest_stage(trace)
    assert slow is not None
    assert (slow.place.worker, slow.place.index, slow.stands_out) == ("w2", 2, True)
    assert "stage 2 (w2, layers 4-5)" in explain(trace)


def _id(number: int) -> str:
    return f"01890a5d-0000-7000-8000-{number:012x}"


async def _whole_trace(
    client: Client, request_id: str, *, num_decode_steps: int, num_stages: int
) -> RequestTrace:
    """Wait for the spans of all processes of a request."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                found = await client.trace(request_id)
            except RequestNotFound:
                await asyncio.sleep(0.02)
                continue
            trace = read(found.traces_data, request_id)
            num_steps = [work.num_steps for work in trace.stages]
            if len(num_steps) == num_stages and min(num_steps) > num_decode_steps:
                return trace
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _serving(store: TraceStore, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Any]:
    """`Export` of a server with only a TraceService."""
    server = new_server(interceptors=(MessageLimits(),))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TraceService(store, Intake(clock)), server)
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    async with PLAIN.channel(f"127.0.0.1:{port}") as channel:
        yield trace_service_pb2_grpc.TraceServiceStub(channel).Export
    await server.stop(0)


@asynccontextmanager
async def _serving_metrics(service: MetricsService) -> AsyncIterator[Any]:
    """`Export` of a server with only this service."""
    server = new_server(interceptors=(MessageLimits(),))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(service, server)
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    async with PLAIN.channel(f"127.0.0.1:{port}") as channel:
        yield metrics_service_pb2_grpc.MetricsServiceStub(channel).Export
    await server.stop(0)


async def test_the_telemetry_of_each_sender_is_limited() -> None:
    now = [100.0]
    store = TraceStore()
    maker = served(request_id=_id(1), trace_id=bytes([1] * 16), begin_ns=10**9)
    request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=maker.spans)
    request.resource_spans[0].resource.attributes.add(key="large").value.string_value = "x" * 3_000_000
    exports = BURST_BYTES // request.ByteSize()
    async with _serving(store, lambda: now[0]) as export:
        for _ in range(exports):
            await export(request, timeout=DEADLINE_S)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"host 127\.0\.0\.1 exports more than 8388608 bytes"
        ) as refused:
            await export(request, timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = StatusDetails.of(refused.value)
        assert details.reason == "OVERLOADED"
        assert details.retry_after_s is not None
        now[0] += details.retry_after_s + 0.001
        await export(request, timeout=DEADLINE_S)


async def test_pages_continue_after_the_previous_one_despite_new_traces(
    coordinator: CoordinatorServer, channel: grpc.aio.Channel
) -> None:
    def add(number: int) -> None:
        maker = served(request_id=_id(number), trace_id=bytes([number] * 16), begin_ns=number * 10**9)
        coordinator.trace_store.add(maker.spans)

    for number in (1, 2, 3):
        add(number)
    stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
    first = await stub.ListTraces(telemetry_pb2.ListTracesRequest(page_size=2), timeout=DEADLINE_S)
    assert [trace.request_id for trace in first.traces] == [_id(3), _id(2)]
    add(4)
    request = telemetry_pb2.ListTracesRequest(page_size=2, page_token=first.next_page_token)
    second = await stub.ListTraces(request, timeout=DEADLINE_S)
    assert [trace.request_id for trace in second.traces] == [_id(1)]
    assert second.next_page_token == ""
    assert first.traces[0].started_at.ToNanoseconds() == 3 * 10**9


@pytest.mark.parametrize("token", ["x", "1", "-1.x", f"{10**20}.x"])
async def test_an_invalid_page_token_is_rejected(channel: grpc.aio.Channel, token: str) -> None:
    stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ListTraces(telemetry_pb2.ListTracesRequest(page_token=token), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
