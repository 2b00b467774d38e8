"""Models in an object store, by a server that speaks as much of S3 as reading needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.range_server import Handler, RangeServer, Request, range_server
from tests.unit.weights.remote_files import SMALL, layer_names, write_shards
from weights.cache import TensorCache
from weights.errors import LibraryMissing, SourceChanged, SourceRefused
from weights.fetching import TensorFetcher
from weights.location import remote_model
from weights.metadata import pin
from weights.progress import FetchProgress
from weights.store_source import StoreSource

SECRET = "averysecretkeyofabucket"
MODEL = "s3://bucket/models/llama"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    with range_server(write_shards(tmp_path / "source"), prefix="/bucket/models/llama") as running:
        for name, value in {
            "ENDPOINT_URL": f"http://{running.address}",
            "ALLOW_HTTP": "true",
            "VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "REGION": "eu-west-1",
            "ACCESS_KEY_ID": "reader",
            "SECRET_ACCESS_KEY": SECRET,
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield running


def fetch(directory: Path, source: StoreSource, tensors: list[str]) -> list[bytes]:
    """Fetch tensors; return their bytes in the cache."""
    pins = pin(source)
    cache = TensorCache(directory, policy=SMALL)
    try:
        model = cache.model(source, pins)
        fetcher = TensorFetcher(
            cache, source, pins, progress=FetchProgress(), check=lambda: None, policy=SMALL
        )
        fetcher.fetch(model, tensors)
        entries = [model.headers.tensors[tensor] for tensor in tensors]
        return [(model.directory / entry.file).read_bytes()[entry.begin : entry.end] for entry in entries]
    finally:
        cache.close()


def test_a_gguf_file_is_found_in_its_folder(server: RangeServer) -> None:
    (server.directory / "llama.gguf").write_bytes(b"GGUF")
    pins = pin(StoreSource(remote_model(f"{MODEL}/llama.gguf")))
    assert [(file.name, file.size_bytes) for file in pins.files] == [("llama.gguf", 4)]
    assert pins.source == f"{MODEL}/llama.gguf"


def test_tensors_are_fetched_by_signed_ranges(server: RangeServer, tmp_path: Path) -> None:
    source = StoreSource(remote_model(MODEL))
    entries = fetch(tmp_path / "cache", source, layer_names(1, 4))
    assert [len(entry) for entry in entries] == [40_000, 130_000] * 2
    whole = b"".join(path.read_bytes() for path in sorted(server.directory.glob("*.safetensors")))
    assert all(entry in whole for entry in entries)
    assert 340_000 <= server.sent_of(".safetensors") <= 343_400 + 2_000, "and headers"
    ranges = [request for request in server.requests if "range" in request.headers]
    assert all("AWS4-HMAC-SHA256" in request.headers["authorization"] for request in ranges)
    assert all("if-match" in request.headers for request in ranges)


def test_an_object_that_changes_is_named(server: RangeServer, tmp_path: Path) -> None:
    source = StoreSource(remote_model(MODEL))
    file = pin(source).file("model-00001-of-00002.safetensors")
    write_shards(server.directory, seed=1)
    with pytest.raises(SourceChanged, match=f"{MODEL}/{file.name} has changed since the model was opened"):
        source.read(file, 0, 8)


def test_a_refusal_names_the_environment_and_no_secret(server: RangeServer) -> None:
    def refuse(handler: Handler, request: Request) -> bool:
        handler.answer(403, {})
        return True

    source = StoreSource(remote_model(MODEL))
    file = pin(source).file("config.json")
    server.misbehave = refuse
    with pytest.raises(SourceRefused, match="check the credentials in the environment") as caught:
        source.read(file, 0, 2)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["nonsense", "", "https://", "ftp://store", "https://store:80 80"])
def test_an_endpoint_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SourceRefused, match="AWS_ENDPOINT_URL in the environment is not https://HOST"):
        StoreSource(remote_model(MODEL))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(LibraryMissing, match=r"pip install 'obstore>=0\.8,<1'"):
        StoreSource(remote_model(MODEL))
