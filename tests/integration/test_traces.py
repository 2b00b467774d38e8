"""Spans received by a collector: one connected tree per request, also after failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, use_span

import telemetry.span_sinks
from stage_worker.backends.mock_spec import MockSpec
from stageline.client.errors import StagelineError
from telemetry.settings import TelemetrySettings, read_environment
from telemetry.spans import Attr, SpanName
from tests.integration.cluster import Cluster, RequestCase
from tests.otlp_collector import CollectedSpan, Collector, collector
from tests.traces import Tree, check_explained
from wire.ids import id_text
from wire.trace_context import parse_traceparent

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
MOCK_MODEL = "layers=3,hidden=64"
SPEC = MockSpec.parse("step=3ms,token=0.02ms")
SLOW = MockSpec.parse("step=12ms,token=0.02ms")
"""A busy machine delays most steps by less than 5 % of their time."""
NUM_TRACED = 4


@pytest.fixture
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    async with collector() as servicer:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{servicer.address}")
        yield servicer


def settings_of(servicer: Collector) -> TelemetrySettings:
    return read_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{servicer.address}"}, version="test")


def mock_cluster(
    servicer: Collector,
    *,
    mock: MockSpec = SPEC,
    max_kv_tokens: int = 1024,
    trace_sample: float | None = None,
) -> Cluster:
    return Cluster(
        None,
        layers=(1, 1, 1),
        mock=mock,
        mock_model=MOCK_MODEL,
        max_kv_tokens=max_kv_tokens,
        trace_sample=trace_sample,
        telemetry=settings_of(servicer),
    )


def roots(spans: list[CollectedSpan]) -> list[CollectedSpan]:
    return [span for span in spans if span.name == SpanName.GENERATE]


def num_traced_steps(spans: list[CollectedSpan], trace_id: str) -> int:
    stages = Tree.of(spans, trace_id).named(SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)
    return sum(span.attributes[Attr.NUM_STEPS] for span in stages)


async def test_a_callers_trace_continues_through_all_stages(collecting: Collector) -> None:
    trees = []
    for number in range(NUM_TRACED):
        # One that knows no durations yet, so that chunks have the size of a step.
        async with mock_cluster(collecting, mock=SLOW) as cluster:
            trees.append(await _traced(cluster, collecting, number))
    for tree in trees:
        _check_three_chunks(tree)
    check_explained(trees)


async def _traced(cluster: Cluster, collecting: Collector, number: int) -> Tree:
    """Of request `number`, under a trace of its caller."""
    trace_id = f"{TRACE_ID[:-1]}{number:x}"
    caller = parse_traceparent(f"00-{trace_id}-{CALLER}-01")
    assert caller is not None
    with use_span(NonRecordingSpan(caller)):
        answer = await cluster.generate(RequestCase(prompt=tuple(range(1, 76)), max_tokens=20))
    assert answer.usage is not None
    assert len(answer.tokens) == 20
    # Three chunks of at most 32 tokens, and a step for each token but the first, on three stages each.
    await collecting.wait_until(
        lambda spans: len(roots(spans)) == number + 1 and num_traced_steps(spans, trace_id) == 3 * (3 + 19)
    )
    return Tree.of(collecting.spans, trace_id)


def _check_three_chunks(tree: Tree) -> None:
    tree.check_connected()
    tree.check_nested(slack_us=2)
    assert tree.root.span.parent_span_id.hex() == CALLER
    assert len({span.process for span in tree.spans}) == 4
    assert tree.num_generated == tree.root.attributes[Attr.COMPLETION_TOKENS] == 20
    chunks = tree.named(SpanName.PREFILL_CHUNK)
    assert [chunk.attributes[Attr.TOKENS] for chunk in chunks] == [32, 32, 11]
    for work in (*chunks, *tree.named(SpanName.DECODE)):
        stages = tree.children(work)
        assert {span.attributes[Attr.STAGE_INDEX] for span in stages} == {0, 1, 2}
        assert sum(span.attributes[Attr.TOKENS] for span in stages) == 3 * work.attributes[Attr.TOKENS]


async def test_the_root_span_has_parameters_outcome_and_durations(collecting: Collector) -> None:
    case = RequestCase(prompt=(1, 2, 3), max_tokens=4, seed=5)
    async with mock_cluster(collecting) as cluster:
        await cluster.generate(case)
        await collecting.wait_until(lambda spans: len(roots(spans)) == 1)
    attributes = roots(collecting.spans)[0].attributes
    assert attributes[Attr.REQUEST_ID] == id_text(case.request_id)
    assert attributes[Attr.REQUEST_MAX_TOKENS] == 4
    assert attributes[Attr.REQUEST_TEMPERATURE] == 1.0
    assert attributes[Attr.PROMPT_TOKENS] == 3
    assert attributes[Attr.OUTCOME] == "finished"
    first_token = attributes[Attr.TIME_IN_QUEUE] + attributes[Attr.TIME_IN_PREFILL]
    assert attributes[Attr.TIME_TO_FIRST_TOKEN] == pytest.approx(first_token)
    assert attributes[Attr.E2E] == pytest.approx(first_token + attributes[Attr.TIME_IN_DECODE])


@pytest.mark.full
async def test_a_preempted_request_is_recorded_as_one_trace_although_unsampled(
    collecting: Collector,
) -> None:
    cases = [RequestCase(prompt=tuple(range(first, first + 24)), max_tokens=60) for first in (1, 100)]
    async with mock_cluster(collecting, max_kv_tokens=128, trace_sample=0.0) as cluster:
        await cluster.generate_all(cases)
        await collecting.wait_until(lambda spans: len(roots(spans)) == 1)
        await collecting.wait_until(
            lambda spans: any(span.name == SpanName.STAGE_DECODE for span in spans), timeout_s=10
        )
    (root,) = roots(collecting.spans)
    assert root.attributes[Attr.REQUEST_ID] == id_text(cases[1].request_id)
    assert root.attributes[Attr.NUM_PREEMPTIONS] >= 1
    tree = Tree.of(collecting.spans, root.span.trace_id.hex())
    tree.check_connected()
    assert len(tree.named(SpanName.PREEMPTION)) == root.attributes[Attr.NUM_PREEMPTIONS]
    assert tree.num_generated >= 60
    restart_counts = {span.attributes[Attr.RESTART_COUNT] for span in tree.named(SpanName.STAGE_DECODE)}
    assert 0 not in restart_counts, "spans before the preemption are not sampled"


@pytest.mark.full
async def test_a_trace_stays_connected_when_a_worker_fails(collecting: Collector) -> None:
    case = RequestCase(prompt=tuple(range(1, 40)), max_tokens=80)
    async with mock_cluster(collecting) as cluster:
        async with cluster.generating([case]) as (answer,):
            while len(answer.tokens) < 20:
                await asyncio.sleep(0.005)
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
        assert answer.succeeded
        await collecting.wait_until(lambda spans: len(roots(spans)) == 1)
        trace_id = roots(collecting.spans)[0].span.trace_id.hex()
        await collecting.wait_until(
            lambda spans: (
                {
                    span.attributes[Attr.STAGE_INDEX]
                    for span in Tree.of(spans, trace_id).named(SpanName.STAGE_DECODE)
                    if span.attributes[Attr.RESTART_COUNT] == 1
                }
                == {0, 1, 2}
            )
        )
    tree = Tree.of(collecting.spans, trace_id)
    tree.check_connected()
    (recovery,) = tree.named(SpanName.RECOVERY)
    assert "w1" in recovery.attributes[Attr.REASON]
    assert tree.root.attributes[Attr.NUM_RECOVERIES] == 1
    assert any(span.name == SpanName.CLUSTER_RECOVERY for span in collecting.spans)


async def test_a_rejected_request_is_recorded_although_unsampled(collecting: Collector) -> None:
    async with mock_cluster(collecting, trace_sample=0.0) as cluster:
        served = await cluster.generate(RequestCase(prompt=(1, 2), max_tokens=2))
        refused = await cluster.generate(RequestCase(prompt=(1, 2), max_tokens=10**6))
        assert served.succeeded
        assert isinstance(refused.error, StagelineError)
        await collecting.wait_until(lambda spans: len(roots(spans)) == 1)
    (root,) = roots(collecting.spans)
    assert root.span.status.code == 2
    assert root.attributes[Attr.OUTCOME] == "failed"
    assert root.attributes[Attr.REQUEST_ID] == id_text(refused.case.request_id)


def names_recorded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[SpanName]:
    """Names of the coordinator's spans recorded from now on."""
    names: list[SpanName] = []
    record = cluster.server.recorder.record

    def recording(name: SpanName, *positional: Any, **named: Any) -> None:
        names.append(name)
        record(name, *positional, **named)

    monkeypatch.setattr(cluster.server.recorder, "record", recording)
    return names


async def test_unsampled_requests_are_not_recorded(
    collecting: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mock_cluster(collecting, trace_sample=0.0) as cluster:
        recorded = names_recorded(cluster, monkeypatch)
        assert (await cluster.generate(RequestCase(prompt=(1, 2), max_tokens=20))).succeeded
        assert recorded == []


async def test_a_hung_collector_delays_no_request_and_lost_spans_are_counted(
    collecting: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry.span_sinks, "QUEUED_SPANS", 16)
    monkeypatch.setattr(telemetry.span_sinks, "COLLECTOR_BATCH_SPANS", 4)
    collecting.may_answer.clear()
    cases = [RequestCase(prompt=(1, 2, 3), max_tokens=8) for _ in range(12)]
    async with mock_cluster(collecting) as cluster:
        recorded = names_recorded(cluster, monkeypatch)
        answers = await cluster.generate_all(cases)
        assert all(answer.succeeded for answer in answers)
        # Each request has spans for intake, queue, a chunk, decode work and itself.
        assert len(recorded) >= 5 * len(cases)
        assert cluster.server.recorder.num_dropped >= len(recorded) - 16 - 4
        collecting.may_answer.set()
