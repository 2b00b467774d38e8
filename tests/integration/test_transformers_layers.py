"""A family without native layers in a whole cluster: same tokens as transformers, said in log and status."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import coordinator.model
from checkpoint import Checkpoint, UnsupportedModel
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from stageline.cli.tables import describe_cluster
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import edit_config, make_checkpoint
from tests.integration.cluster import Cluster, RequestCase
from tests.unit.stage_worker.model.test_families import greedy_tokens

LAYERS = (1, 2, 1)
NUM_TOKENS = 16
PROMPTS = (tuple(range(20, 70)), (7,), (*range(20, 52), 3, 1, 4))


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("helium") / "model"
    return make_checkpoint(
        directory, "helium", num_layers=sum(LAYERS), initializer_range=0.3, pad_token_id=None, seed=3
    )


async def test_a_family_without_native_layers_is_served_with_a_warning(
    helium: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In chunks and with prefix hits; KV accounting is checked at the end."""
    with caplog.at_level(logging.WARNING):
        async with Cluster(helium, layers=LAYERS, dtype="f32", block_size=8, max_step_tokens=24) as cluster:
            first = await cluster.generate(RequestCase(prompt=PROMPTS[0], max_tokens=NUM_TOKENS))
            cases = [RequestCase(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
            answers = await cluster.generate_all(cases)
            status = await cluster.wait_drained()
    expected = [greedy_tokens(helium, list(prompt))[:NUM_TOKENS] for prompt in PROMPTS]
    assert len(set(expected[0])) > 4, "a degenerate model proves nothing"
    assert [first.tokens, *(answer.tokens for answer in answers)] == [expected[0], *expected]
    assert status.implementation == cluster_pb2.IMPLEMENTATION_TRANSFORMERS
    assert "by transformers' layers (slower and less tested)" in describe_cluster(status)
    assert status.kv.integrity != cluster_pb2.KV_INTEGRITY_VERDICT_INCONSISTENT
    assert sum(worker.kv.blocks_hit for worker in status.workers) > 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("'helium' has no native ones: they are slower and less tested" in text for text in warnings)


@pytest.mark.full
async def test_native_families_are_served_natively(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=2)
    async with Cluster(tmp_path, layers=(1, 1), dtype="f32") as cluster:
        status = await cluster.client.status()
        native = await cluster.generate(RequestCase(prompt=PROMPTS[0], max_tokens=NUM_TOKENS))
    assert status.implementation == cluster_pb2.IMPLEMENTATION_NATIVE
    async with Cluster(tmp_path, layers=(1, 1), dtype="f32", implementation="transformers") as cluster:
        status = await cluster.client.status()
        other = await cluster.generate(RequestCase(prompt=PROMPTS[0], max_tokens=NUM_TOKENS))
    assert status.implementation == cluster_pb2.IMPLEMENTATION_TRANSFORMERS
    assert native.tokens == other.tokens


async def test_workers_say_what_they_cannot_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator with torch refuses the model; where it has none, its workers do."""
    make_checkpoint(tmp_path, "helium", num_layers=2)
    edit_config(tmp_path, sliding_window=9)
    problem = "layer 0 has window None, its config says 9"
    with pytest.raises(UnsupportedModel, match=problem):
        open_model(CoordinatorConfig(model=tmp_path, num_stages=2))
    monkeypatch.setattr(coordinator.model, "examine_layers", _without_torch)
    async with Cluster(tmp_path, layers=(1, 1), dtype="f32", waits=False) as cluster:
        status = await cluster.wait_status(lambda status: problem in str(status))
    assert status.state != cluster_pb2.CLUSTER_STATE_SERVING


def _without_torch(checkpoint: Checkpoint) -> None:
    raise ImportError("No module named 'torch'")
