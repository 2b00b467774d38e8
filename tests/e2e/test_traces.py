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
from tests.otlp_collector import Collector, collector
from tests.traces import Tree

pytestmark = pytest.mark.asyncio(loop_scope="package")

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = list(range(5, 205))
NUM_CHUNKS = 4
NUM_TOKENS = 60
NUM_REQUESTS = 4
"""A process that waits for a core between two readings of a clock belongs to no span, and not to every request."""


@pytest.mark.full
async def test_spans_of_all_processes_form_one_trace(tmp_path: Path) -> None:
    """The built-in model, a prompt in four chunks, under the caller's own trace."""
    async with collector() as collecting:
        config = LocalClusterConfig(
            num_workers=3,
            coordinator_arguments=("--block-size", "16", "--max-step-tokens", "64"),
            environment={**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collecting.address}"},
            log_directory=tmp_path / "logs",
        )
        async with LocalCluster(config) as cluster:
            await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
            num_tokens = await _generate(cluster.address)
            tree = await _tree(collecting, num_steps=NUM_CHUNKS + num_tokens - 1)
    tree.check_connected()
    tree.check_nested(slack_us=2)
    assert tree.root.span.parent_span_id.hex() == CALLER
    processes = {(span.resource["service.name"], span.resource["service.instance.id"]) for span in tree.spans}
    workers = {instance for name, instance in processes if name == "stageline-worker"}
    assert workers == {"worker-0", "worker-1", "worker-2"}
    assert len(processes) == 4
    assert tree.num_generated == num_tokens == tree.root.attributes[Attr.COMPLETION_TOKENS]
    for work in tree.named(SpanName.PREFILL_CHUNK, SpanName.DECODE):
        assert {span.attributes[Attr.WORKER] for span in tree.children(work)} == workers
        assert tree.unexplained_share(work) < 0.05


async def _generate(address: str) -> int:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        max_tokens=NUM_TOKENS,
        sampling=inference_pb2.SamplingParameters(ignore_eos=True),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            request, metadata=(("traceparent", f"00-{TRACE_ID}-{CALLER}-01"),), timeout=60
        )
        return sum([len(response.token_ids) async for response in call])


async def _tree(collecting: Collector, *, num_steps: int) -> Tree:
    def is_complete(_: object) -> bool:
        tree = Tree.of(collecting.spans, TRACE_ID)
        stages = tree.named(SpanName.STAGE_PREFILL, SpanName.STAGE_DECODE)
        traced = sum(span.attributes[Attr.NUM_STEPS] for span in stages)
        return bool(tree.named(SpanName.GENERATE)) and traced >= 3 * num_steps

    await collecting.wait_until(is_complete)
    return Tree.of(collecting.spans, TRACE_ID)
