"""Fetches from peers: what they lack, fail to send or send wrong comes from elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.headers import read_headers
from tests.range_server import Handler, RangeServer, Request, range_server
from tests.unit.weights.peer_files import FINGERPRINT, flip, held_of, peer, run_shared, serving
from tests.unit.weights.remote_files import Fetch, layer_names, write_shards
from weights.errors import SourceUnavailable, TensorDamaged
from weights.manifest import index_directory
from weights.peers import CoordinatorSource, PeerConnections
from weights.serving import DirectoryFiles

ALL = layer_names(*range(6))
CLOSED = "127.0.0.1:1"
"""No process listens there."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(write_shards(tmp_path / "source")) as running:
        yield running


@pytest.fixture
def fetch(server: RangeServer, tmp_path: Path) -> Iterator[Fetch]:
    """An empty cache."""
    with Fetch(server, tmp_path / "empty") as made:
        yield made


@pytest.fixture
def other(server: RangeServer, tmp_path: Path) -> Iterator[Fetch]:
    """The cache of a peer."""
    with Fetch(server, tmp_path / "other") as made:
        yield made


def test_bytes_that_peers_have_do_not_come_from_the_source(
    server: RangeServer, fetch: Fetch, other: Fetch, tmp_path: Path
) -> None:
    other.run(layer_names(0, 1, 2))
    with Fetch(server, tmp_path / "third") as third:
        third.run(layer_names(3, 4))
        before = server.sent_bytes
        first, second = held_of(other), held_of(third)
        with serving(first) as one, serving(second) as two:
            source = run_shared(
                fetch, ALL, peer("a", one, units=first.units()), peer("b", two, units=second.units())
            )
    assert not fetch.wrong(ALL) and not source.left
    assert server.sent_bytes - before == fetch.size(layer_names(5))
    assert source.peer_bytes == fetch.size(layer_names(0, 1, 2, 3, 4))


def test_a_peer_that_lacks_what_it_announced_is_asked_for_the_rest(
    server: RangeServer, fetch: Fetch, other: Fetch
) -> None:
    other.run(layer_names(1, 4))
    before = server.sent_bytes
    with serving(held_of(other)) as address:
        source = run_shared(fetch, ALL, peer("a", address))
    assert not fetch.wrong(ALL) and not source.left
    assert source.peer_bytes == fetch.size(layer_names(1, 4))
    assert server.sent_bytes - before == fetch.size(layer_names(0, 2, 3, 5))


def test_a_peer_that_is_gone_is_named_and_left(
    fetch: Fetch, other: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    other.run(ALL)
    with serving(held_of(other)) as address, caplog.at_level(logging.WARNING):
        units = held_of(other).units()
        source = run_shared(fetch, ALL, peer("a", CLOSED, units=units), peer("b", address))
    assert not fetch.wrong(ALL)
    assert len(source.left) == 1 and source.left[0].startswith("a: http://127.0.0.1:1/weights/")
    assert source.peer_bytes == fetch.size(ALL), "the other peer has all of it"
    assert "stopped fetching weights from a" in caplog.text


@pytest.mark.parametrize("is_stall", [False, True], ids=["cut", "stall"])
def test_a_peer_that_ends_in_the_middle_is_survived(
    server: RangeServer, fetch: Fetch, tmp_path: Path, is_stall: bool
) -> None:
    def misbehave(handler: Handler, request: Request) -> bool:
        path = bad.directory / request.path.rpartition("/")[2]
        handler.begin_file(request, path, status=206)
        handler.send_range(request, path, end=request.begin + 20_000)
        if is_stall:
            time.sleep(1.0)
        handler.cut()
        return True

    with range_server(server.directory, prefix=f"/weights/{FINGERPRINT}") as bad:
        bad.misbehave = misbehave
        source = run_shared(fetch, ALL, peer("bad", bad.address), timeout_s=0.3)
    assert not fetch.wrong(ALL)
    assert len(source.left) == 1 and "ended after 20000 of" in source.left[0]
    assert 0 < source.peer_bytes < fetch.size(ALL)


def test_a_damaged_peer_is_named_and_its_bytes_come_from_elsewhere(
    server: RangeServer, fetch: Fetch, other: Fetch
) -> None:
    other.run(ALL)
    entry = other.model.headers.tensors["model.layers.2.b"]
    flip(other.model.directory / entry.file, entry.begin + 1)
    with serving(held_of(other)) as address:
        source = run_shared(fetch, ALL, peer("a", address, units=held_of(other).units()))
    assert not fetch.wrong(ALL)
    assert len(source.left) == 1 and "tensor model.layers.2.b" in source.left[0]


def test_wrong_bytes_of_peers_are_found_by_the_manifest_and_fetched_elsewhere(
    server: RangeServer, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    headers = read_headers(server.directory)
    fetch.sha256s = index_directory(server.directory, headers, lambda num_bytes: None).sha256s
    tensor = "model.layers.1.b"
    entry = headers.tensors[tensor]
    prefix = f"/weights/{FINGERPRINT}"
    with (
        range_server(server.directory, prefix=prefix) as one,
        range_server(server.directory, prefix=prefix) as two,
        range_server(server.directory, prefix=prefix) as three,
        range_server(server.directory, prefix=prefix) as four,
    ):
        liars = [one, two, three, four]
        for liar in liars:
            liar.flip[entry.file] = entry.begin + 1000
        peers = [peer(f"liar-{number}", liar.address) for number, liar in enumerate(liars)]
        with caplog.at_level(logging.WARNING):
            source = run_shared(fetch, ALL, *peers)
        assert not fetch.wrong(ALL)
        assert all(fetch.model.is_verified(name) for name in ALL)
        assert len(source.left) == 4, "more than the tries that a source has"
        assert all(f"sent wrong bytes of tensor {tensor}" in left for left in source.left)

        fetch.model.drop(ALL)
        server.flip[entry.file] = entry.begin + 1000
        with pytest.raises(TensorDamaged, match=f"tensor {tensor} differs from the manifest"):
            run_shared(fetch, ALL, *peers)


def test_a_directory_of_the_coordinator_is_the_last_source(server: RangeServer, fetch: Fetch) -> None:
    directory = server.directory
    held = DirectoryFiles(directory, read_headers(directory).tensors, FINGERPRINT)
    connections = PeerConnections(FINGERPRINT, None)
    before = server.sent_bytes
    with serving(held) as address:
        source = CoordinatorSource(address, "/models/llama", connections)
        file = fetch.pins.file("model-00001-of-00002.safetensors")
        size = file.size_bytes
        assert source.read(file, 3, size) == (directory / file.name).read_bytes()[3:]
        source.close()
    with pytest.raises(SourceUnavailable, match="does not respond"):
        source.read(file, 0, 8)
    assert server.sent_bytes == before
