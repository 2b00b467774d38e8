"""Models of a hub: revisions, tokens, redirects to signed addresses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from checkpoint.headers import read_headers
from checkpoint.pins import Pins
from tests.gguf_files import quantised, write_gguf
from tests.hub import COMMIT, SIGNATURE, TOKEN, Hub
from tests.range_server import range_server
from weights.cache import TensorCache
from weights.cached_model import CachedModel
from weights.errors import SourceRefused
from weights.fetching import TensorFetcher
from weights.location import remote_model
from weights.progress import FetchProgress
from weights.remote import open_remote, open_source
from weights.source import WeightSource


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with range_server(tmp_path) as api, range_server(tmp_path) as store:
        found = Hub(MODEL_DIRECTORY, api, store)
        found.use(monkeypatch)
        yield found


def opened(pins: Pins, directory: Path) -> tuple[TensorCache, CachedModel, WeightSource]:
    """As a worker opens a model."""
    source = open_source(remote_model(pins.source))
    cache = TensorCache(directory)
    return cache, cache.model(source, pins), source


def test_a_model_is_fetched_at_its_commit_and_secrets_stay_secret(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.num_expired = 1  # a signed address that has ended is asked for again
    with caplog.at_level(logging.DEBUG):
        remote = open_remote(remote_model("hf://org/name@main"), tmp_path / "coordinator")
        assert remote.pins.source == f"hf://org/name@{COMMIT}"
        cache, model, source = opened(remote.pins, tmp_path / "cache")
        names = list(read_headers(MODEL_DIRECTORY).tensors)
        fetcher = TensorFetcher(cache, source, remote.pins, progress=FetchProgress(), check=lambda: None)
        fetcher.fetch(model, names)
        cache.close()
        source.close()
    written = Checkpoint.open(model.directory).tensors
    assert written == Checkpoint.open(MODEL_DIRECTORY).tensors
    shard = "model.safetensors"
    assert (model.directory / shard).read_bytes() == (MODEL_DIRECTORY / shard).read_bytes()
    assert TOKEN not in caplog.text and SIGNATURE not in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text("latin-1")]


@pytest.mark.parametrize(
    ("address", "token", "text"),
    [
        ("hf://org/name", "other", "does not exist, or is private: give an HF_TOKEN"),
        ("hf://org/name@v9", TOKEN, "has no such revision"),
    ],
)
def test_refusals_of_the_hub_say_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, token: str, text: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceRefused, match=text):
        open_remote(remote_model(address), tmp_path)


def test_a_gguf_file_in_a_folder_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    hub.files = tmp_path / "repository"
    (folder := hub.files / "UD" / "BF16").mkdir(parents=True)
    first = write_gguf(folder / "stories.gguf", MODEL_DIRECTORY, quantised("BF16"), split_max_tensors=60)
    address = f"hf://org/name/UD/BF16/{first.name}"
    remote = open_remote(remote_model(address), tmp_path / "coordinator")
    assert remote.pins.source == f"{address}@{COMMIT}"
    assert len(remote.pins.files) > 1
    local = Checkpoint.open(first)
    assert remote.checkpoint.tensors == local.tensors
    cache, model, source = opened(remote.pins, tmp_path / "cache")
    fetcher = TensorFetcher(cache, source, remote.pins, progress=FetchProgress(), check=lambda: None)
    fetcher.fetch(model, [name := "blk.7.ffn_up.weight"])
    cache.close()
    source.close()
    entry = local.tensors[name]
    expected, found = ((parent / entry.file).read_bytes() for parent in (folder, model.directory))
    assert found[entry.begin : entry.end] == expected[entry.begin : entry.end]
    assert model.units() == {"blk.7": [name]}


def test_a_worker_with_a_full_cache_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    remote = open_remote(remote_model("hf://org/name"), tmp_path)
    first, _, source = opened(remote.pins, tmp_path / "cache")
    first.close()
    source.close()
    num_requests = len(hub.api.requests) + len(hub.store.requests)
    again, _, _ = opened(remote.pins, tmp_path / "cache")
    again.close()
    assert len(hub.api.requests) + len(hub.store.requests) == num_requests
