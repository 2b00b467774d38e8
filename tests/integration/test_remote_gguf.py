"""Workers fetch the bytes of their own tensors of a GGUF file, and serve the tokens of the file."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, stage_tensor_names
from checkpoint.gguf.files import read_gguf_file
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.gguf_files import quantised, write_gguf
from tests.integration.cluster import Cluster
from tests.integration.test_remote_weights import LAYERS, NOT_VERIFIED, SHAPE, tokens_of
from tests.integration.test_weight_peers import serve_from_the_coordinator
from tests.range_server import range_server
from weights.location import remote_model
from weights.source import FIRST_BYTES

ENDS = [0, *itertools.accumulate(LAYERS)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("made") / "model", "llama", **SHAPE | {"max_shard_size": "1GB"}
    )


def stage_bytes(path: Path) -> list[int]:
    checkpoint = Checkpoint.open(path)
    stages = [
        stage_tensor_names(checkpoint.config, begin, end, has_embeddings=begin == 0, has_head=end == ENDS[-1])
        for begin, end in itertools.pairwise(ENDS)
    ]
    return [sum(checkpoint.tensors[name].num_bytes for name in names) for names in stages]


def header_bytes(path: Path) -> int:
    """Of all files, with what is read after a short header."""
    files = {entry.file for entry in Checkpoint.open(path).tensors.values()}
    return sum(max(FIRST_BYTES, read_gguf_file(path.with_name(file)).header_bytes) for file in files)


def remote_cluster(location: str, directory: Path, **settings: object) -> Cluster:
    return Cluster(
        remote_model(location),
        layers=LAYERS,
        self_check=False,
        cache_directory=directory / "coordinator",
        weights_directory=directory / "workers",
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_tensors", [0, 7], ids=["one file", "shards"])
async def test_each_worker_fetches_only_its_tensors(made: Path, tmp_path: Path, num_tensors: int) -> None:
    (source := tmp_path / "source").mkdir()
    path = write_gguf(source / "llama.gguf", made, split_max_tensors=num_tensors)
    async with Cluster(path, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
        name = (await cluster.client.model()).name
    with range_server(source) as server:
        location = f"{server.url}/{path.name}"
        async with remote_cluster(location, tmp_path, waits=False, num_workers=0) as cluster:
            opened = server.sent_bytes
            for index in range(len(LAYERS)):
                await cluster.start_worker(f"w{index}")
            status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            assert await tokens_of(cluster) == expected
            assert (await cluster.client.model()).name == name == "llama"
            assert [worker.weights for worker in status.workers] == [NOT_VERIFIED] * 3
            fetched = server.sent_bytes - opened
        sizes, headers = stage_bytes(path), header_bytes(path)
        assert opened <= headers, "the coordinator reads no weights"
        assert sum(sizes) < fetched <= 1.01 * sum(sizes) + len(LAYERS) * headers
        for index, size in enumerate(sizes):
            blocks = sum(file.stat().st_blocks for file in (tmp_path / "workers" / f"w{index}").rglob("*"))
            assert size <= blocks * 512 <= 1.1 * (size + headers), "bytes on the disk are those of the stage"

        # Workers that start again with their caches fetch nothing at all.
        before = server.sent_bytes
        async with remote_cluster(location, tmp_path) as cluster:
            assert await tokens_of(cluster) == expected
        assert server.sent_bytes == before


@pytest.mark.full
async def test_workers_without_the_file_fetch_it_from_the_coordinator(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "llama.gguf", made, quantised("Q8_0"))
    await serve_from_the_coordinator(path, tmp_path, monkeypatch)


@pytest.mark.full
async def test_texts_and_structured_output_of_a_remote_file(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    path = write_gguf(source / "stories.gguf", MODEL_DIRECTORY, quantised("BF16"), pre="gpt-2")
    texts = []
    with range_server(source) as server:
        location = f"{server.url}/{path.name}"
        for cluster in (
            Cluster(path, layers=(4, 8), max_kv_tokens=4096, has_text=True),
            Cluster(
                remote_model(location),
                layers=(4, 8),
                max_kv_tokens=4096,
                has_text=True,
                cache_directory=tmp_path / "coordinator",
                weights_directory=tmp_path / "workers",
            ),
        ):
            async with cluster:
                answers = await asyncio.gather(
                    cluster.client.complete("Once upon a time", max_tokens=24, timeout_s=120),
                    cluster.client.complete("Once", regex=r"[a-c]{3}-\d{2}", timeout_s=120),
                )
                texts.append([answer.text for (answer,) in answers])
    assert texts[0] == texts[1]
    assert texts[0][0]
