"""A model of a hub in Mistral's own format: workers fetch their tensors, and texts are of its tekken.json."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from checkpoint import Checkpoint, stage_tensor_names
from tests.checkpoints import make_checkpoint
from tests.hub import Hub
from tests.integration.cluster import Cluster
from tests.integration.test_remote_weights import LAYERS, SHAPE, tokens_of
from tests.mistral_files import tekken, write_mistral
from tests.range_server import range_server
from weights.location import remote_model

ENDS = (0, *itertools.accumulate(LAYERS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("mistral")
    shape = SHAPE | {"max_shard_size": "1GB", "sliding_window": None, "vocab_size": 272}
    source = make_checkpoint(parent / "source", "mistral", **shape)
    directory = write_mistral(parent / "model", source, {}, num_shards=3)
    (directory / "tekken.json").write_text(json.dumps(tekken([b"hello", b"he", b"ll", b"llo"], reserved=12)))
    return directory


def weight_bytes(path: Path) -> int:
    """Of the tensors that stages read."""
    checkpoint = Checkpoint.open(path)
    return sum(
        checkpoint.tensors[name].num_bytes
        for begin, end in itertools.pairwise(ENDS)
        for name in stage_tensor_names(
            checkpoint.config, begin, end, has_embeddings=begin == 0, has_head=end == ENDS[-1]
        )
    )


@pytest.mark.full
async def test_a_model_of_a_hub_serves_tokens_texts_and_structured_output(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    with range_server(tmp_path) as api, range_server(tmp_path) as store:
        Hub(model, api, store).use(monkeypatch)
        for number, location in enumerate((model, remote_model("hf://org/name@main"))):
            async with Cluster(
                location,
                layers=LAYERS,
                self_check=False,
                has_text=True,
                cache_directory=tmp_path / f"coordinator-{number}",
                weights_directory=tmp_path / f"workers-{number}",
            ) as cluster:
                answers = await asyncio.gather(
                    cluster.client.complete("hello", max_tokens=12, timeout_s=120),
                    cluster.client.complete("he", regex=r"[a-c]{3}-\d{2}", timeout_s=120),
                )
                found.append((await tokens_of(cluster), [answer.text for (answer,) in answers]))
        assert store.sent_bytes >= weight_bytes(model)
        assert store.sent_bytes <= weight_bytes(model) * 1.05, "each worker fetches the tensors of its layers"
    assert found[0] == found[1]
