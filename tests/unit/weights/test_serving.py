"""What a process serves of its weights: proven bytes of one model, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import xxhash

from checkpoint.headers import read_headers
from tests.range_server import RangeServer, range_server
from tests.unit.weights.peer_files import FINGERPRINT, flip, held_of, peer, serving
from tests.unit.weights.remote_files import Fetch, layer_names, write_shards
from weights import serving as serving_module
from weights.manifest import index_directory
from weights.peers import PeerConnections
from weights.serving import DirectoryFiles

LAYER = layer_names(1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(write_shards(tmp_path / "source")) as running:
        yield running


@pytest.fixture
def fetch(server: RangeServer, tmp_path: Path) -> Iterator[Fetch]:
    with Fetch(server, tmp_path / "cache") as made:
        yield made


def ask(
    address: str, path: str, begin: int | None = None, end: int = 0, *, method: str = "GET"
) -> tuple[int, bytes, str]:
    """Status, body and Content-Range of an answer."""
    headers = {} if begin is None else {"Range": f"bytes={begin}-{end - 1}"}
    request = Request(f"http://{address}{path}", headers=headers, method=method)
    try:
        with urlopen(request, timeout=10) as response:
            return response.status, response.read(), response.headers["Content-Range"]
    except HTTPError as error:
        with error:
            return error.code, error.read(), ""


def reason_of(answer: tuple[int, bytes, str]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["reason"]


def test_a_range_of_the_cache_is_served_up_to_what_is_not_there(server: RangeServer, fetch: Fetch) -> None:
    fetch.run(LAYER)
    entries = [fetch.model.headers.tensors[name] for name in LAYER]
    file, begin, end = entries[0].file, min(e.begin for e in entries), max(e.end for e in entries)
    content = (server.directory / file).read_bytes()
    path = f"/weights/{FINGERPRINT}/{file}"
    with serving(held_of(fetch)) as address:
        status, body, place = ask(address, path, begin + 5, end + 1000)
        assert (status, body) == (206, content[begin + 5 : end])
        assert place == f"bytes {begin + 5}-{end - 1}/{len(content)}"
        assert reason_of(ask(address, path, end, end + 10)) == (416, "NOT_HELD"), "another layer"
        assert reason_of(ask(address, path, 0, 8)) == (416, "NOT_HELD"), "a header has no hash"
        for outside in ((end, end), (end, len(content) + 1)):
            assert reason_of(ask(address, path, *outside)) == (416, "RANGE")
        assert reason_of(ask(address, path)) == (416, "RANGE"), "no whole files"
        assert reason_of(ask(address, f"/weights/other/{file}", begin, end)) == (404, "UNKNOWN_MODEL")
        assert reason_of(ask(address, f"/weights/{FINGERPRINT}/pins.json", 0, 1)) == (404, "UNKNOWN_FILE")
        escaped = f"/weights/{FINGERPRINT}/..%2Fpins.json"
        assert reason_of(ask(address, escaped, 0, 1)) == (404, "UNKNOWN_FILE")
        assert reason_of(ask(address, "/other", 0, 1)) == (404, "UNKNOWN_PATH")
        assert reason_of(ask(address, path, begin, end, method="DELETE")) == (405, "METHOD")
        fetch.model.drop(LAYER)
        assert reason_of(ask(address, path, begin, end)) == (416, "NOT_HELD"), "it was evicted"


def test_long_ranges_are_answered_in_part(
    server: RangeServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "MAX_ANSWER_BYTES", 10_000)
    fetch.run(LAYER)
    entry = fetch.model.headers.tensors[LAYER[1]]
    content = (server.directory / entry.file).read_bytes()
    with serving(held_of(fetch)) as address:
        path = f"/weights/{FINGERPRINT}/{entry.file}"
        assert ask(address, path, entry.begin, entry.end)[1] == content[entry.begin : entry.begin + 10_000]


def test_a_flipped_byte_on_the_disk_is_named_and_not_served(
    fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    fetch.run(LAYER)
    entry = fetch.model.headers.tensors[LAYER[1]]
    flip(fetch.model.directory / entry.file, entry.begin + 100)
    with serving(held_of(fetch)) as address, caplog.at_level(logging.ERROR):
        answer = ask(address, f"/weights/{FINGERPRINT}/{entry.file}", entry.begin, entry.begin + 50)
    assert reason_of(answer) == (410, "DAMAGED")
    assert f"tensor {LAYER[1]}" in caplog.text and "differs from the recorded hash" in caplog.text


def test_with_a_manifest_only_tensors_that_equal_it_are_served(server: RangeServer, fetch: Fetch) -> None:
    entry = fetch.model.headers.tensors[LAYER[0]]
    path = f"/weights/{FINGERPRINT}/{entry.file}"
    fetch.run(LAYER)
    held = held_of(fetch, has_manifest=True)
    with serving(held) as address:
        assert reason_of(ask(address, path, entry.begin, entry.end)) == (416, "NOT_HELD")
        assert held.units() == frozenset()
        headers = read_headers(server.directory)
        fetch.sha256s = index_directory(server.directory, headers, lambda num_bytes: None).sha256s
        fetch.run(LAYER)
        assert ask(address, path, entry.begin, entry.end)[0] == 206
        assert held.units() == {"model.layers.1"}


def test_units_are_those_that_are_there_whole(fetch: Fetch) -> None:
    fetch.run([*layer_names(0), *layer_names(3)])
    assert held_of(fetch).units() == {"model.layers.0", "model.layers.3"}
    first, second = list(fetch.model.pieces(layer_names(2)))[:2]
    fetch.model.write(first, first.begin, memoryview(bytes(first.num_bytes)), xxhash.xxh3_128())
    assert second.tensor == first.tensor
    assert held_of(fetch).units() == {"model.layers.0", "model.layers.3"}


def test_a_directory_is_served_until_its_files_change(server: RangeServer) -> None:
    directory = server.directory
    held = DirectoryFiles(directory, read_headers(directory).tensors, FINGERPRINT)
    (directory / "secret.txt").write_text("not of the model")
    with serving(held) as address:
        index = (directory / "model.safetensors.index.json").read_bytes()
        path = f"/weights/{FINGERPRINT}/model.safetensors.index.json"
        assert ask(address, path, 0, len(index))[1] == index
        assert reason_of(ask(address, f"/weights/{FINGERPRINT}/secret.txt", 0, 1)) == (404, "UNKNOWN_FILE")
        (directory / "model.safetensors.index.json").write_bytes(index)
        assert reason_of(ask(address, path, 0, len(index))) == (410, "DAMAGED")


def test_a_tracker_names_the_peers_of_its_model_only() -> None:
    known = [peer("gpu-a", "10.0.0.1:7485", units=["model.layers.1"]), peer("gpu-b", "10.0.0.2:7485")]
    with serving(None, lambda fingerprint: known if fingerprint == FINGERPRINT else None) as address:
        with closing(PeerConnections(FINGERPRINT, None)) as connections:
            assert connections.ask_tracker(address) == known
        assert reason_of(ask(address, "/weights/other")) == (404, "UNKNOWN_MODEL")
