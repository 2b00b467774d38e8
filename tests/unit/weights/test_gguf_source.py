"""GGUF files behind ranges: headers, the tensor that belongs to the config, shards, and wrong addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoint import Checkpoint, CheckpointError, stage_tensor_names
from checkpoint.errors import BadHeader, CheckpointNotFound
from checkpoint.gguf.families import ROPE_FACTORS
from checkpoint.gguf.files import checkpoint_in, read_bytes
from tests.checkpoints import make_checkpoint
from tests.gguf_files import QuantType, add_tensor, quantised, write_gguf
from tests.range_server import RangeServer, range_server
from weights.cache import TensorCache
from weights.fetching import TensorFetcher
from weights.location import remote_model
from weights.progress import FetchProgress
from weights.remote import RemoteCheckpoint, open_remote, open_source

FACTORS = np.linspace(1.0, 8.0, 8, dtype=np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "model", "qwen3_moe", num_layers=3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (source := tmp_path / "source").mkdir()
    with range_server(source) as running:
        yield running


def add_factors(writer: gguf.GGUFWriter) -> None:
    """Behind all other tensors."""
    add_tensor(writer, ROPE_FACTORS, FACTORS, QuantType.F32)


def fetch(remote: RemoteCheckpoint, directory: Path, names: list[str]) -> Checkpoint:
    """As a worker opens a model and fetches tensors of it."""
    cache = TensorCache(directory)
    source = open_source(remote_model(remote.pins.source))
    try:
        cached = cache.model(source, remote.pins)
        fetcher = TensorFetcher(cache, source, remote.pins, progress=FetchProgress(), check=lambda: None)
        fetcher.fetch(cached, names)
        return Checkpoint.open(checkpoint_in(cached.directory), pins=remote.pins)
    finally:
        cache.close()
        source.close()


def content_of(checkpoint: Checkpoint, name: str) -> bytes:
    entry = checkpoint.tensors[name]
    return read_bytes(checkpoint.directory / entry.file, entry.begin, entry.end)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_tensors", [0, 9], ids=["one file", "shards"])
def test_matrices_of_experts_are_fetched_one_by_one(
    made: Path, server: RangeServer, tmp_path: Path, num_tensors: int
) -> None:
    path = write_gguf(server.directory / "moe.gguf", made, quantised("Q8_0"), split_max_tensors=num_tensors)
    local = Checkpoint.open(path)
    remote = open_remote(remote_model(f"{server.url}/{path.name}"), tmp_path / "coordinator")
    assert remote.checkpoint.config == local.config
    assert remote.checkpoint.tensors == local.tensors == remote.headers.tensors
    stored = stage_tensor_names(local.config, 1, 2, has_embeddings=False, has_head=False)
    fetched = fetch(remote, tmp_path / "cache", stored)
    assert fetched.fingerprint == remote.checkpoint.fingerprint
    assert "blk.1.ffn_up_exps.3.weight" in stored
    assert all(content_of(fetched, name) == content_of(local, name) for name in stored)
    other = "blk.0.ffn_up_exps.3.weight"
    assert content_of(fetched, other) == bytes(local.tensors[other].num_bytes), "a hole"


def test_a_tensor_of_the_config_comes_with_the_header(server: RangeServer, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", num_layers=2)
    path = write_gguf(server.directory / "llama.gguf", made, extra=add_factors)
    remote = open_remote(remote_model(f"{server.url}/llama.gguf"), tmp_path / "coordinator")
    local = Checkpoint.open(path)
    assert remote.checkpoint.config == local.config
    assert ROPE_FACTORS not in remote.checkpoint.tensors
    fetched = fetch(remote, tmp_path / "cache", [])
    assert fetched.fingerprint == remote.checkpoint.fingerprint
    kept = next(fetched.directory.glob("*.rope_freqs"))
    assert kept.read_bytes()[: FACTORS.nbytes] == FACTORS.tobytes()
    kept.write_bytes(b"\1" + kept.read_bytes()[1:])
    with pytest.raises(BadHeader, match="differs from its hash"):
        Checkpoint.open(fetched.path, pins=remote.pins)


def test_all_shards_are_found_by_the_first_one(made: Path, server: RangeServer, tmp_path: Path) -> None:
    first = write_gguf(server.directory / "moe.gguf", made, split_max_tensors=9)
    names = sorted(path.name for path in server.directory.iterdir())
    address = f"{server.url}/{first.name}"
    assert [file.name for file in open_remote(remote_model(address), tmp_path).pins.files] == names
    with pytest.raises(BadHeader, match=f"give {first.name}"):
        open_remote(remote_model(f"{server.url}/{names[1]}"), tmp_path)
    (server.directory / names[-1]).unlink()
    with pytest.raises(CheckpointNotFound, match=f"{server.url}/{names[-1]} does not exist"):
        open_remote(remote_model(address), tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.gguf", b"GGML" + bytes(100), "begins with b'GGML'"),
        ("a.gguf", b"", "the magic number of 4 bytes at byte 0 goes beyond byte 0"),
        ("config.json", b"", r"/a\.gguf does not exist"),
    ],
)
def test_what_is_no_gguf_file_is_named(
    server: RangeServer, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    (server.directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_remote(remote_model(f"{server.url}/a.gguf"), tmp_path)


def test_a_folder_of_gguf_files_needs_the_name_of_one(server: RangeServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=f"a GGUF model is {server.url}/FILE.gguf"):
        open_remote(remote_model(server.url), tmp_path)


def test_a_header_that_ends_early_is_an_error(made: Path, server: RangeServer, tmp_path: Path) -> None:
    path = write_gguf(server.directory / "moe.gguf", made)
    content: Any = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadHeader, match="must end at"):
        open_remote(remote_model(f"{server.url}/moe.gguf"), tmp_path)
