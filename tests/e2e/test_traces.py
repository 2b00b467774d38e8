"""Spans of a request through real processes, as received by a collector."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from telemetry.spans import Attr, SpanName
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT
from tests.otlp_collector import CollectedSpan, Collector, collector
from tests.traces import Tree, check_explained

pytestmark = pytest.mark.asyncio(loop_scope="package")

CALLER = "b7ad6b7169203331"
LEAST_CHUNKS = 4
"""Where steps take longer than the target of `--itl-target`, chunks are smaller."""
NUM_TOKENS = 60
NUM_REQUESTS = 4


@pytest.mark.full
async def test_spans_of_all_processes_form_one_trace(tmp_path: Path) -> None:
    """The built-in model, prompts in four chunks or more, each under a trace of its caller."""
    async with collector() as collecting:
        config = LocalClusterConfig(
            num_workers=3,
            coordinator_arguments=("--block-size", "16", "--max-step-tokens", "64"),
            environment={**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collecting.address}"},
            log_directory=tmp_path / "logs",
        )
        async with LocalCluster(config) as cluster:
            await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
            trees = [await _traced(cluster.address, collecting, number) for number in range(NUM_REQUESTS)]
    for tree in trees:
        _check_spans(tree)
    check_explained(trees)


def _work(tree: Tree) -> list[CollectedSpan]:
    """The chunks of the prompt in their order, then the decodes."""
    work = tree.named(SpanName.PREFILL_CHUNK, SpanName.DECODE)
    return sorted(work, key=lambda span: span.span.start_time_unix_nano)


def _check_spans(tree: Tree) -> None:
    tree.check_connected()
    tree.check_nested(slack_us=2)
    assert tree.root.span.parent_span_id.hex() == CALLER
    processes = {(span.resource["service.name"], span.resource["service.instance.id"]) for span in tree.spans}
    workers = {instance for name, instance in processes if name == "stageline-worker"}
    assert workers == {"worker-0", "worker-1", "worker-2"}
    assert len(processes) == 4
    assert tree.num_generated == NUM_TOKENS == tree.root.attributes[Attr.COMPLETION_TOKENS]
    assert len(tree.named(SpanName.PREFILL_CHUNK)) >= LEAST_CHUNKS
    assert _work(tree)[-1].name == SpanName.DECODE
    for work in _work(tree):
        assert {span.attributes[Attr.WORKER] for span in tree.children(work)} == workers


async def _traced(address: str, collecting: Collector, number: int) -> Tree:
    """Of a request whose prompt no other has."""
    trace_id = f"0af7651916cd43dd8448eb211c80319{number:x}"
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(5 + number, 205 + number)),
        max_tokens=NUM_TOKENS,
        sampling=inference_pb2.SamplingParameters(ignore_eos=True),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            request, metadata=(("traceparent", f"00-{trace_id}-{CALLER}-01"),), timeout=60
        )
        async for _ in call:
            pass
    return await _tree(collecting, trace_id)


async def _tree(collecting: Collector, trace_id: str) -> Tree:
    def is_complete(_: object) -> bool:
        """The request's span comes after those of its work."""
        tree = Tree.of(collecting.spans, trace_id)
        stages = tree.named(SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)
        traced = sum(span.attributes[Attr.NUM_STEPS] for span in stages)
        num_steps = len(tree.named(SpanName.PREFILL_CHUNK)) + NUM_TOKENS - 1
        return bool(tree.named(SpanName.GENERATE)) and traced >= 3 * num_steps

    await collecting.wait_until(is_complete)
    return Tree.of(collecting.spans, trace_id)
