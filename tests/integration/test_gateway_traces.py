"""Traces from an HTTP request to the stages: one chain of spans, sampled by one decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from telemetry.settings import TelemetrySettings
from telemetry.spans import GATEWAY, HTTP_SPANS, Attr, SpanName
from telemetry.trace_view.read_model import RequestTrace, read_spans, request_trace
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.test_traces import CALLER, MOCK_MODEL, SPEC, TRACE_ID, settings_of
from tests.otlp_collector import CollectedSpan, Collector, collector
from tests.traces import Tree

STAGES = (SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)
BODY = {"prompt": [3, 14, 15], "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    async with collector() as servicer:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{servicer.address}")
        yield servicer


@asynccontextmanager
async def serving(
    telemetry: TelemetrySettings, **settings: Any
) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    """A coordinator with two mock stages, and a gateway in front of it."""
    cluster = Cluster(None, layers=(2, 1), mock=SPEC, mock_model=MOCK_MODEL, telemetry=telemetry, **settings)
    async with cluster:
        config = GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0", telemetry=telemetry)
        gateway = GatewayServer(config, template=None)
        await gateway.start()
        try:
            async with AsyncClient(base_url=f"http://{gateway.address}", timeout=DEADLINE_S) as http:
                yield cluster, http
        finally:
            await gateway.stop()


def headers(*, is_sampled: bool) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{CALLER}-0{int(is_sampled)}"}


def is_whole(spans: list[CollectedSpan], *, num_requests: int = 1) -> bool:
    """Roots, the gateway, and the last step of both stages have arrived."""
    names = [span.name for span in spans]
    steps = [span.attributes[Attr.NUM_STEPS] for span in spans if span.name in STAGES]
    return (
        names.count(SpanName.GENERATE) == num_requests
        and sum(steps) == 2 * 20 * num_requests
        and any(name in HTTP_SPANS for name in names)
    )


@pytest.mark.matrix(2)
@pytest.mark.parametrize("has_caller", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_trace_goes_from_the_http_request_to_every_stage(
    collecting: Collector, streams: bool, has_caller: bool
) -> None:
    async with serving(settings_of(collecting)) as (_, http):
        given = headers(is_sampled=True) if has_caller else {}
        response = await http.post("/v1/completions", json=BODY | {"stream": streams}, headers=given)
        assert response.status_code == 200, response.text
        await collecting.wait_until(is_whole)
    (span,) = (span for span in collecting.spans if span.name in HTTP_SPANS)
    tree = Tree.of(collecting.spans, span.span.trace_id.hex())
    tree.check_connected()
    tree.check_nested(slack_us=2)
    assert len(tree.spans) == len(collecting.spans)
    assert tree.gateway is span
    assert span.span.parent_span_id.hex() == (CALLER if has_caller else "")
    assert (span.span.trace_id.hex() == TRACE_ID) == has_caller
    assert span.process.startswith(GATEWAY)
    assert len({span.process for span in tree.spans}) == 4
    assert {span.attributes[Attr.STAGE_INDEX] for span in tree.named(*STAGES)} == {0, 1}
    assert span.attributes[Attr.REQUEST_ID] == tree.root.attributes[Attr.REQUEST_ID]


async def test_the_coordinator_shows_the_gateways_part(collecting: Collector) -> None:
    async with serving(TelemetrySettings()) as (cluster, http):
        response = await http.post("/v1/completions", json=BODY | {"prompt": [[3, 14], [15, 92]]})
        request_id = response.headers["x-request-id"]
        store = cluster.server.trace_store

        def traces() -> list[RequestTrace]:
            return [request_trace(read_spans(found.data()), found.request_id) for found in store.recent()]

        async with asyncio.timeout(DEADLINE_S):
            while len(found := traces()) < 2 or not all(trace.gateway for trace in found):
                await asyncio.sleep(0.02)
    assert len({trace.trace_id for trace in found}) == 1
    (named,) = (trace for trace in found if trace.request_id == request_id)
    for trace in found:
        assert trace.gateway is not None
        assert trace.gateway.text(Attr.REQUEST_ID) == request_id
        assert trace.root.parent_id == trace.gateway.span_id
        assert trace.duration_s >= trace.root.duration_s
    assert named.gateway == found[0].gateway == found[1].gateway


@pytest.mark.parametrize("streams", [False, True])
async def test_the_coordinators_ratio_holds_at_the_gateway(collecting: Collector, streams: bool) -> None:
    async with serving(settings_of(collecting), trace_sample=0.0) as (_, http):
        body = BODY | {"stream": streams}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        unsampled = headers(is_sampled=False)
        assert (await http.post("/v1/completions", json=body, headers=unsampled)).status_code == 200
        sampled = headers(is_sampled=True)
        assert (await http.post("/v1/completions", json=body, headers=sampled)).status_code == 200
        await collecting.wait_until(is_whole)
    assert {span.span.trace_id.hex() for span in collecting.spans} == {TRACE_ID}
    Tree.of(collecting.spans, TRACE_ID).check_connected()


async def test_an_unsampled_callers_request_leaves_no_span(collecting: Collector) -> None:
    async with serving(settings_of(collecting)) as (_, http):
        unsampled = headers(is_sampled=False)
        assert (await http.post("/v1/completions", json=BODY, headers=unsampled)).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await collecting.wait_until(is_whole)
    assert TRACE_ID not in {span.span.trace_id.hex() for span in collecting.spans}


async def test_a_request_that_the_coordinator_refuses_is_one_trace_although_unsampled(
    collecting: Collector,
) -> None:
    async with serving(settings_of(collecting), trace_sample=0.0) as (_, http):
        body = BODY | {"guided_grammar": "not a grammar"}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 400, refused.text
        await collecting.wait_until(lambda spans: len(spans) == 2)
    (root,) = (span for span in collecting.spans if span.name == SpanName.GENERATE)
    (above,) = (span for span in collecting.spans if span.name in HTTP_SPANS)
    assert root.span.parent_span_id == above.span.span_id
    assert root.span.trace_id == above.span.trace_id
    assert (root.span.status.code, above.span.status.code) == (2, 0)
    assert above.attributes[Attr.HTTP_STATUS] == 400


async def test_without_telemetry_a_callers_span_is_the_coordinators_parent(collecting: Collector) -> None:
    async with serving(settings_of(collecting)) as (cluster, _):
        config = GatewayConfig(
            coordinator=cluster.address,
            listen="127.0.0.1:0",
            telemetry=TelemetrySettings(is_disabled=True),
        )
        gateway = GatewayServer(config, template=None)
        await gateway.start()
        try:
            async with AsyncClient(base_url=f"http://{gateway.address}", timeout=DEADLINE_S) as http:
                given = headers(is_sampled=True)
                assert (await http.post("/v1/completions", json=BODY, headers=given)).status_code == 200
        finally:
            await gateway.stop()
        await collecting.wait_until(lambda spans: any(span.name == SpanName.GENERATE for span in spans))
    root = Tree.of(collecting.spans, TRACE_ID).root
    assert root.span.parent_span_id.hex() == CALLER
    assert not any(span.name in HTTP_SPANS for span in collecting.spans)
