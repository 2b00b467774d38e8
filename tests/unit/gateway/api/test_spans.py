"""Spans of HTTP requests: what they say, when they are recorded, and what goes on to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from gateway.spans import GatewaySpans
from stageline_rpc.v1 import inference_pb2
from telemetry.settings import StandardSampler
from telemetry.spans import SPANS, Attr
from tests.unit.gateway.fake_upstream import Item, Served, answer, failure, serve
from tests.unit.telemetry.recording import ListSink, recorder_into
from wire.trace_context import parse_traceparent

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "xylophone"
"""Part of every prompt, and of no span."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}]},
    "/v1/responses": {"input": SECRET},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
}
PATH = "/v1/completions"
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def traced(
    script: Any = None, *, ratio: float = 1.0, **settings: Any
) -> AsyncIterator[tuple[Served, ListSink]]:
    sink, sampler = ListSink(), StandardSampler("parentbased_traceidratio", ratio)
    spans = GatewaySpans(recorder_into(sink), lambda: sampler)
    async with serve(script, spans=spans, **settings) as served:
        yield served, sink


def broken(request: inference_pb2.GenerateRequest) -> list[Item]:
    return [*answer(" a bird")(request)[:2], failure(UNAVAILABLE, "CLUSTER_UNAVAILABLE")]


def traceparent(*, is_sampled: bool) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{CALLER}-0{int(is_sampled)}", "tracestate": "vendor=1"}


def attributes_of(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    (span,) = spans
    found = dict(span.attributes or {})
    assert found.keys() <= {key for spec in SPANS if spec.name == span.name for key in spec.attributes}
    assert span.kind is SpanKind.SERVER
    assert span.context.trace_flags.sampled, "exporters drop it"
    assert SECRET not in f"{span.name} {span.status.description} {found}"
    return found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_is_one_span_above_the_coordinators(path: str, streams: bool) -> None:
    async with traced() as (served, sink):
        body = BODIES[path] | {"stream": streams}
        response = await served.client.post(path, json=body, headers=traceparent(is_sampled=True))
        assert response.status_code == 200, response.text
        attributes = attributes_of(sink.spans)
        (span,) = sink.spans
        below = parse_traceparent(served.upstream.traceparents[-1])
    assert below is not None
    assert span.name == f"POST {path}"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == CALLER
    assert (below.trace_id, below.span_id) == (span.context.trace_id, span.context.span_id)
    assert (f"{below.trace_id:032x}", below.trace_flags.sampled) == (TRACE_ID, True)
    assert span.context.trace_state.get("vendor") == "1"
    assert span.status.status_code is StatusCode.UNSET
    expected = {
        Attr.HTTP_METHOD: "POST",
        Attr.HTTP_ROUTE: path,
        Attr.HTTP_STATUS: 200,
        Attr.URL_PATH: path,
        Attr.URL_SCHEME: "http",
        Attr.REQUEST_ID: served.request.request_id,
        Attr.REQUEST_MODEL: "tiny",
        Attr.STREAM: streams,
        Attr.OUTCOME: "finished",
    }
    assert {key: attributes.get(key) for key in expected} == expected
    assert Attr.ERROR_TYPE not in attributes


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_parts_of_a_request_lie_in_its_span(path: str, streams: bool) -> None:
    async with traced() as (served, sink):
        await served.client.post(path, json=BODIES[path] | {"stream": streams})
    attributes = attributes_of(sink.spans)
    (span,) = sink.spans
    parts = (Attr.BODY_DURATION, Attr.PROMPT_DURATION, Attr.ACCEPT_DURATION)
    assert all(attributes[part] > 0 for part in parts)
    before_s, first_s = sum(attributes[part] for part in parts), attributes[Attr.TIME_TO_OUTPUT]
    assert span.end_time is not None
    assert span.start_time is not None
    assert before_s <= first_s <= (span.end_time - span.start_time) / 1e9 + 1e-5
    assert attributes[Attr.TEXT_DURATION] > 0
    assert attributes[Attr.TEXT_WAIT_DURATION] > 0


async def test_without_a_caller_the_ratio_of_the_coordinator_decides() -> None:
    async with traced(ratio=0.5) as (served, sink):
        for _ in range(40):
            await served.client.post(PATH, json=BODIES[PATH])
        below = [parse_traceparent(header) for header in served.upstream.traceparents]
    recorded = {span.context.span_id for span in sink.spans}
    assert all(span.parent is None for span in sink.spans)
    assert recorded == {each.span_id for each in below if each is not None and each.trace_flags.sampled}
    assert 0 < len(recorded) < 40 == len({each.trace_id for each in below if each is not None})


@pytest.mark.parametrize("streams", [False, True])
async def test_an_unsampled_caller_has_no_span_and_the_coordinator_knows(streams: bool) -> None:
    async with traced() as (served, sink):
        body = BODIES[PATH] | {"stream": streams}
        await served.client.post(PATH, json=body, headers=traceparent(is_sampled=False))
        below = parse_traceparent(served.upstream.traceparents[-1])
    assert below is not None
    assert (f"{below.trace_id:032x}", below.trace_flags.sampled) == (TRACE_ID, False)
    assert not sink.spans


async def test_refused_requests_are_no_errors_of_the_server() -> None:
    async with traced() as (served, sink):
        for body, status, kind in (
            ({"prompt": SECRET, "temperature": -1}, 400, "400"),
            ({"prompt": SECRET, "model": SECRET}, 404, "model_not_found"),
            ({"prompt": SECRET, "max_tokens": 10**6}, 400, "context_length_exceeded"),
        ):
            sink.spans.clear()
            assert (await served.client.post(PATH, json=body)).status_code == status
            attributes = attributes_of(sink.spans)
            assert (attributes[Attr.HTTP_STATUS], attributes[Attr.ERROR_TYPE]) == (status, kind)
            assert attributes[Attr.OUTCOME] == "failed"
            assert sink.spans[0].status.status_code is StatusCode.UNSET
            assert Attr.TIME_TO_OUTPUT not in attributes


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_refusals_of_the_coordinator_are_recorded_always(ratio: float) -> None:
    async with traced(ratio=ratio) as (served, sink):
        for status, code, kind in (
            (UNAVAILABLE, 503, "unavailable"),
            (EXHAUSTED, 429, "rate_limit_exceeded"),
        ):
            sink.spans.clear()
            served.upstream.refusal = failure(status)
            assert (await served.client.post(PATH, json=BODIES[PATH])).status_code == code
            attributes = attributes_of(sink.spans)
            assert (attributes[Attr.HTTP_STATUS], attributes[Attr.ERROR_TYPE]) == (code, kind)
            expected = StatusCode.ERROR if code >= 500 else StatusCode.UNSET
            assert sink.spans[0].status.status_code is expected


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_fails_is_an_error_after_its_status(path: str, ratio: float) -> None:
    async with traced(broken, ratio=ratio) as (served, sink):
        response = await served.client.post(path, json=BODIES[path] | {"stream": True})
        assert response.status_code == 200
    attributes = attributes_of(sink.spans)
    assert attributes[Attr.HTTP_STATUS] == 200
    assert (attributes[Attr.ERROR_TYPE], attributes[Attr.OUTCOME]) == ("unavailable", "failed")
    assert sink.spans[0].status.status_code is StatusCode.ERROR
    assert sink.spans[0].status.description == "it failed"


async def test_an_unsampled_request_that_the_gateway_refuses_is_not_recorded() -> None:
    async with traced(ratio=0.0) as (served, sink):
        assert (await served.client.post(PATH, json={"prompt": []})).status_code == 400
        served.gateway.is_draining = True
        assert not sink.spans
        assert (await served.client.post(PATH, json=BODIES[PATH])).status_code == 503
        assert attributes_of(sink.spans)[Attr.HTTP_STATUS] == 503


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_cancels_its_span(streams: bool) -> None:
    async with traced(over_tcp=True) as (served, sink):
        served.upstream.gate.clear()
        body = BODIES[PATH] | {"stream": streams}
        posting = asyncio.create_task(served.client.post(PATH, json=body))
        async with asyncio.timeout(20):
            while not served.upstream.streams:
                await asyncio.sleep(0.005)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            while not sink.spans:
                await asyncio.sleep(0.005)
    attributes = attributes_of(sink.spans)
    assert attributes[Attr.OUTCOME] == "cancelled"
    assert attributes[Attr.HTTP_STATUS] == (200 if streams else 499)
    assert sink.spans[0].status.status_code is StatusCode.UNSET


async def test_requests_that_do_not_generate_have_no_span() -> None:
    async with traced() as (served, sink):
        await served.client.get("/v1/models", headers=traceparent(is_sampled=True))
        await served.client.post("/tokenize", json={"prompt": "a"})
        await served.client.post("/v1/messages/count_tokens", json=BODIES["/v1/messages"])
        await served.client.get(PATH)
        assert not sink.spans
