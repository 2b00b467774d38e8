"""`--quantize` in whole clusters: all stages agree, the self-check knows the format, the plan is smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint import Blueprint, DType, WeightFormat
from stage_worker.loading import stage_loader
from stage_worker.model.decoder import DecoderStage
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import Cluster, RequestCase
from tests.local_pipeline import LocalPipeline

LAYERS = (2, 1, 1)
CASE = RequestCase(prompt=tuple(range(20, 60)), max_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rounded") / "model"
    return make_checkpoint(
        directory,
        "qwen2",
        num_layers=sum(LAYERS),
        intermediate_size=96,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
async def test_a_checked_cluster_serves_rounded_weights(
    form: WeightFormat, dtype: DType, model: Path
) -> None:
    async with Cluster(
        model, layers=LAYERS, dtype=dtype.value, quantize=form.value, self_check=True
    ) as cluster:
        status = await cluster.client.status()
        answer = await cluster.generate(CASE)
    assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
    assert status.weights == cluster_pb2.WeightFormat.Value(f"WEIGHT_FORMAT_{form.name}")
    if dtype is DType.F32:
        pipeline = LocalPipeline(model, LAYERS, weights=form)
        assert answer.tokens == pipeline.generate([list(CASE.prompt)], max_tokens=CASE.max_tokens)[0]
        plain = LocalPipeline(model, LAYERS)
        assert answer.tokens != plain.generate([list(CASE.prompt)], max_tokens=CASE.max_tokens)[0]


@pytest.mark.full
async def test_a_stage_with_other_weights_than_assigned_does_not_pass_the_check(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PlainStage(DecoderStage):
        def __init__(self, config: Blueprint, **options: Any) -> None:
            super().__init__(config.with_weights(None), **options)

        def load(self, checkpoint: Any, **options: Any) -> Any:
            return super().load(checkpoint.with_weights(None), **options)

    monkeypatch.setattr(stage_loader, "DecoderStage", PlainStage)
    async with Cluster(model, layers=LAYERS, quantize="int4", self_check=True, waits=False) as cluster:
        status = await cluster.wait_status(lambda status: status.state == cluster_pb2.CLUSTER_STATE_BLOCKED)
    assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED
