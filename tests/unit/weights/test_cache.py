"""The cache of tensors: what it has, survives, evicts and refuses."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.range_server import Handler, RangeServer, Request, range_server
from tests.repository import REPOSITORY
from tests.unit.weights.remote_files import SMALL, Fetch, layer_names, write_shards
from weights.cache import PINS_FILE, SERVED_FILE, ModelState, StoredModel, TensorCache, stored_model
from weights.cached_model import disk_bytes
from weights.errors import BadManifest, CacheFull, CacheInUse, PieceDamaged, TensorDamaged
from weights.metadata import HASHES_FOLDER
from weights.pieces import TransferPolicy, ranges_of
from weights.transfer import Transfer

LAYER_BYTES = 4 * 42_500
FIRST = "model-00001-of-00002.safetensors"
ALL = layer_names(*range(6))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(write_shards(tmp_path / "source")) as running:
        yield running


def manifest_of(fetch: Fetch) -> dict[str, bytes]:
    """SHA-256 of the tensors at the source."""
    return {
        tensor: hashlib.sha256(
            (fetch.server.directory / entry.file).read_bytes()[entry.begin : entry.end]
        ).digest()
        for tensor, entry in fetch.model.headers.tensors.items()
    }


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_the_disk_has_only_what_was_fetched(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        empty = disk_bytes(fetch.model.directory)
        fetch.run(layer_names(2))
        assert LAYER_BYTES <= disk_bytes(fetch.model.directory) - empty <= LAYER_BYTES + 16 * 1024
        sizes = {file.name: file.size_bytes for file in fetch.pins.files}
        assert (fetch.model.directory / FIRST).stat().st_size == sizes[FIRST], "offsets are the source's"


def test_layers_that_were_not_used_for_longest_are_evicted(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("weights.cached_model.time.time", lambda: now_s[0])
    limit = 3 * LAYER_BYTES + 128 * 1024
    with Fetch(server, tmp_path / "cache", limit_bytes=limit) as fetch:
        for layer in (0, 1, 2, 0):
            now_s[0] += 1
            fetch.run(layer_names(layer))
        now_s[0] += 1
        assert fetch.run(layer_names(3)) == LAYER_BYTES
        assert disk_bytes(tmp_path / "cache") <= limit
        assert set(fetch.model.units()) == {f"model.layers.{layer}" for layer in (0, 2, 3)}
        assert not fetch.wrong(layer_names(0, 2, 3)), "neighbours of the hole are whole"
        assert fetch.run(layer_names(0)) == 0
        assert fetch.run(layer_names(1)) == LAYER_BYTES


def test_a_prefetch_evicts_no_layer_of_the_last_stage(server: RangeServer, tmp_path: Path) -> None:
    limit = 3 * LAYER_BYTES + 128 * 1024
    with Fetch(server, tmp_path / "cache", limit_bytes=limit) as fetch:
        fetch.run(layer_names(0, 1))
        fetch.cache.record_served(fetch.pins, layer_names(0, 1))
    with Fetch(server, tmp_path / "cache", limit_bytes=limit) as again:
        assert again.run(layer_names(2), keeps_served=True) == LAYER_BYTES
        assert again.run(layer_names(3), keeps_served=True) == LAYER_BYTES, "another prefetched layer goes"
        assert set(again.model.units()) == {f"model.layers.{layer}" for layer in (0, 1, 3)}
        with pytest.raises(CacheFull, match=r"beside .* that stay in"):
            again.run(layer_names(4, 5), keeps_served=True)
        assert again.run(layer_names(0, 1)) == 0, "its own rejoin reads the disk"
        again.run(layer_names(2, 3, 4))  # a load has the whole cache
        assert set(again.model.units()) == {f"model.layers.{layer}" for layer in (2, 3, 4)}


def test_a_damaged_model_stays_until_another_one_needs_its_room(server: RangeServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with Fetch(server, cache) as fetch:
        fetch.run(layer_names(0))
        damaged = fetch.model.directory
    flip(damaged / FIRST, 5)  # the length of its header
    with range_server(write_shards(tmp_path / "other")) as other:
        with Fetch(other, cache) as fetch:
            assert fetch.run(layer_names(0)) == LAYER_BYTES
            assert disk_bytes(damaged) > LAYER_BYTES / 2
            kept = disk_bytes(cache) - disk_bytes(damaged.parent)
        with Fetch(other, cache, limit_bytes=kept + LAYER_BYTES + 64 * 1024) as fetch:
            assert fetch.run(layer_names(0, 1)) == LAYER_BYTES
            assert not damaged.exists()


def test_an_unreadable_record_of_the_last_stage_is_a_warning(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.cache.record_served(fetch.pins, layer_names(0))
        (tmp_path / "cache" / SERVED_FILE).write_text("{")
        assert fetch.run(layer_names(1), keeps_served=True) == LAYER_BYTES
    assert "the layers of the last stage are not known" in caplog.text


def test_a_damaged_record_of_the_last_stage_is_written_again(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache" / SERVED_FILE
    limit = 2 * LAYER_BYTES + 128 * 1024
    with Fetch(server, tmp_path / "cache", limit_bytes=limit) as fetch:
        fetch.run(layer_names(0))
        path.write_bytes(b"\xff\xfe{")
        fetch.cache.record_served(fetch.pins, layer_names(0))
        assert "the layers of the last stage are not known" in caplog.text
        fetch.run(layer_names(1), keeps_served=True)
        fetch.run(layer_names(2), keeps_served=True)
        assert "model.layers.0" in fetch.model.units(), "it is known again"
        path.unlink()
        path.mkdir()
        fetch.cache.record_served(fetch.pins, layer_names(0))
    assert f"{path} cannot be written" in caplog.text


def test_a_cache_that_is_too_small_says_how_much_is_needed(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", limit_bytes=2 * LAYER_BYTES) as fetch:
        fetch.run(layer_names(0))
        with pytest.raises(CacheFull) as caught:
            fetch.run(layer_names(0, 1, 2))
        assert "332.0 KiB of weights must be fetched beside" in str(caught.value)
        assert str(caught.value).endswith("but --cache-size is 332.0 KiB: raise it, or use more workers")
        assert fetch.run(layer_names(0)) == 0, "nothing was evicted for nothing"


def test_a_disk_that_is_too_small_is_found_before_the_fetch(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        monkeypatch.setattr("weights.cache.free_bytes", lambda directory: 64 * 2**20 + 1000)
        before = server.sent_bytes
        with pytest.raises(CacheFull, match=r"166\.0 KiB of weights .* but 64\.0 MiB of the disk are free"):
            fetch.run(layer_names(0))
        assert server.sent_bytes == before


def test_a_disk_that_fills_meanwhile_ends_the_fetch_and_loses_nothing(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.pwrite, [100_000]

    def pwrite(descriptor: int, data: memoryview, position: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    with Fetch(server, tmp_path / "cache") as fetch:
        monkeypatch.setattr("weights.cached_model.os.pwrite", pwrite)
        with pytest.raises(CacheFull, match=r"is full: \d+ bytes of model\.layers\.\d\.[ab] could not"):
            fetch.run(ALL)
        monkeypatch.undo()
        assert fetch.run(ALL) < fetch.size(ALL), "what was written counts"
        assert not fetch.wrong(ALL)


def test_one_process_uses_a_cache(server: RangeServer, tmp_path: Path) -> None:
    text = f"in use by process {os.getpid()}: give each worker its own --name or --cache-dir"
    with Fetch(server, tmp_path / "cache"), pytest.raises(CacheInUse, match=text):
        TensorCache(tmp_path / "cache")
    TensorCache(tmp_path / "cache").close()


def test_a_flipped_byte_in_the_cache_is_named_and_fetched_again(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(ALL)
        entry = fetch.model.headers.tensors["model.layers.4.b"]
        flip(fetch.model.directory / entry.file, entry.begin + 50_000)
        with caplog.at_level(logging.WARNING):
            sent = fetch.run(ALL)
        assert "tensor model.layers.4.b differs from the recorded hash" in caplog.text
        assert sent == fetch.size(["model.layers.4.b"]) and not fetch.wrong(ALL)


@pytest.mark.parametrize("position", [0, 12], ids=["length", "names"])
def test_damaged_metadata_is_named_and_fetched_again(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, position: int
) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(layer_names(0))
        directory = fetch.model.directory
    names = ("config.json", FIRST)
    for name in names:
        flip(directory / name, position if name == FIRST else 0)
    stored = stored_model(directory.parent)
    assert (stored.state, stored.problem) == (ModelState.DAMAGED, f"not as fetched: config.json, {FIRST}")
    with Fetch(server, tmp_path / "cache") as again:
        for name in names:
            assert f"{directory / name} differs from its recorded hash: fetched again" in caplog.text
        assert stored_model(directory.parent).state is ModelState.USABLE
        assert (directory / "config.json").read_bytes() == (server.directory / "config.json").read_bytes()
        assert again.run(layer_names(0)) == 0, "tensors behind the header stay"
        assert not again.wrong(layer_names(0))


def test_damaged_records_and_pins_are_written_again(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(layer_names(0))
        folder = fetch.model.directory.parent
    (folder / HASHES_FOLDER / "config.json").write_bytes(b"\xff")
    (folder / HASHES_FOLDER / FIRST).unlink()
    (folder / PINS_FILE).write_bytes(b"{")
    assert stored_model(folder).state is ModelState.DAMAGED
    with Fetch(server, tmp_path / "cache") as again:
        assert stored_model(folder) == StoredModel(folder=folder, source=server.url, state=ModelState.USABLE)
        assert again.run(layer_names(0)) == 0
        sent = server.sent_bytes
        again.cache.model(again.source, again.pins)
        assert server.sent_bytes == sent, "what is whole is not fetched again"


def test_a_limit_of_file_sizes_is_named(server: RangeServer, tmp_path: Path) -> None:
    text = r"00002\.safetensors in .* is larger than files may be: raise `ulimit -f`"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Fetch(server, tmp_path / "cache") as fetch, closing(TensorCache(tmp_path / "small")) as cache:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CacheFull, match=text):
                cache.model(fetch.source, fetch.pins)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_that_do_not_fit_on_the_disk_are_named_and_lose_nothing(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.write, [2000]

    def write(descriptor: int, data: bytes) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with Fetch(server, tmp_path / "cache") as fetch, monkeypatch.context() as patched:
        patched.setattr("weights.piece_log.os.write", write)
        with pytest.raises(CacheFull, match=r"the disk of .* is full: \d+ bytes of model\.layers\.\d"):
            fetch.run(layer_names(0, 1))
    with Fetch(server, tmp_path / "cache") as again:
        again.run(layer_names(0, 1))
        assert not again.wrong(layer_names(0, 1))


def test_a_flipped_byte_on_the_wire_is_named_and_fetched_again(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.sha256s = manifest_of(fetch)
        entry = fetch.model.headers.tensors["model.layers.1.a"]
        server.flip[entry.file] = entry.begin + 7

        def heal(handler: Handler, request: Request) -> bool:
            is_second = request.begin == entry.begin and server.sent_of(entry.file) > LAYER_BYTES
            if is_second:
                server.flip.clear()
            return False

        server.misbehave = heal
        with caplog.at_level(logging.WARNING):
            fetch.run(layer_names(1))
        assert not fetch.wrong(layer_names(1))
        assert "tensor model.layers.1.a differs from the manifest" in caplog.text
        assert all(fetch.model.is_verified(tensor) for tensor in layer_names(1))


def test_a_flipped_byte_at_the_source_is_never_served(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.sha256s = manifest_of(fetch)
        entry = fetch.model.headers.tensors["model.layers.1.a"]
        server.flip[entry.file] = entry.begin + 7
        with pytest.raises(TensorDamaged) as caught:
            fetch.run(layer_names(1))
        assert "tensor model.layers.1.a differs from the manifest after 3 fetches from" in str(caught.value)
        assert server.url in str(caught.value)
        assert not fetch.model.is_verified("model.layers.1.a")
        assert "model.layers.1.a" not in fetch.model.units().get("model.layers.1", []), "it is not kept"


def test_a_manifest_without_a_tensor_is_refused(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.sha256s = {"model.layers.0.a": bytes(32)}
        with pytest.raises(BadManifest, match=r"lacks 1 tensors, such as model\.layers\.0\.b"):
            fetch.run(layer_names(0))


def test_a_torn_record_costs_only_its_piece(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(ALL)
        records = fetch.model.directory.parent / "pieces.log"
    with records.open("r+b") as file:
        file.truncate(records.stat().st_size - 5)
    with Fetch(server, tmp_path / "cache") as fetch:
        assert 0 < fetch.run(ALL) <= SMALL.piece_bytes
        assert not fetch.wrong(ALL)


def test_other_sizes_of_pieces_begin_again(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(layer_names(0))
    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, piece_bytes=10_000)) as fetch:
        fetch.run(layer_names(0, 1))
        assert not fetch.wrong(layer_names(0, 1))


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.range_server import RangeServer
from tests.unit.weights.remote_files import Fetch
from weights import metadata
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
metadata.NUM_READERS = 1
if sys.argv[3] == "files":
    import weights.cache
    weights.cache.write_pins = lambda *arguments: None
Fetch(RangeServer(Path(sys.argv[1]), address=sys.argv[2]), Path(sys.argv[4]))
"""


@pytest.mark.parametrize("place", ["model", "files"])
def test_files_that_a_kill_leaves_without_their_names_are_removed(
    server: RangeServer, tmp_path: Path, place: str
) -> None:
    cache = tmp_path / "cache"
    arguments = [str(server.directory), server.address, place, str(cache)]
    killed = subprocess.run([sys.executable, "-c", _KILLED, *arguments], cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = [path for path in cache.rglob(".*") if path.is_file()]
    assert left.parent.name == "files" or place == "model"
    kept = left.parent / ".hidden.safetensors"
    kept.touch()
    with Fetch(server, cache) as fetch:
        assert not left.exists() and kept.exists()
        fetch.run(layer_names(0))
        assert not fetch.wrong(layer_names(0))


def end_within_a_piece(fetch: Fetch, tensors: list[str], num_bytes: int, *, timeout_s: float = 30.0) -> None:
    """Fetch until `num_bytes`, which the server sends, are recorded but for a part; then end."""
    is_sent, release = threading.Event(), threading.Event()
    deadline_s = time.monotonic() + timeout_s

    def stall(handler: Handler, request: Request) -> bool:
        path = fetch.server.directory / FIRST
        handler.begin_file(request, path, status=206)
        handler.send_range(request, path, end=request.begin + num_bytes)
        is_sent.set()
        release.wait(60)
        handler.cut()
        return True

    def check() -> None:
        if is_sent.is_set() and fetch.model.num_bytes(tensors[0]) > num_bytes - fetch.policy.min_part_bytes:
            raise Ended
        if time.monotonic() > deadline_s:
            raise TimeoutError

    fetch.server.misbehave = stall
    transfer = Transfer(fetch.source, fetch.pins, fetch.model, fetch.policy)
    try:
        with pytest.raises(Ended):
            transfer.run(ranges_of(fetch.model.missing(tensors), fetch.policy), check)
    finally:
        fetch.server.misbehave = None
        release.set()


class Ended(Exception):
    pass


ONE = replace(SMALL, num_connections=1, min_part_s=0.0)
PART_BYTES = SMALL.piece_bytes + 10_000
"""A piece and a part of the next one."""


def test_a_fetch_goes_on_within_a_piece(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", policy=ONE) as fetch:
        end_within_a_piece(fetch, layer_names(1), PART_BYTES)
    with Fetch(server, tmp_path / "cache", policy=ONE) as fetch:
        recorded = fetch.model.num_bytes("model.layers.1.a")
        assert recorded > PART_BYTES - ONE.min_part_bytes
        assert fetch.run(layer_names(1)) == LAYER_BYTES - recorded
        assert not fetch.wrong(layer_names(1))
        assert fetch.run(layer_names(1)) == 0 and not fetch.model.damaged(layer_names(1), lambda _: None)


def test_a_damaged_part_of_a_piece_is_named_and_fetched_again(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fetch(server, tmp_path / "cache", policy=ONE) as fetch:
        end_within_a_piece(fetch, layer_names(1), PART_BYTES)
        entry = fetch.model.headers.tensors["model.layers.1.a"]
        flip(fetch.model.directory / entry.file, entry.begin + SMALL.piece_bytes + 10)
        missing = fetch.model.missing(layer_names(1))
        with pytest.raises(PieceDamaged, match=r"tensor model\.layers\.1\.a in .* differs from the recorded"):
            Transfer(fetch.source, fetch.pins, fetch.model, ONE).run(ranges_of(missing, ONE), lambda: None)
        # The server may still be sending the last bytes of the request that ended.
        assert fetch.run(layer_names(1)) >= LAYER_BYTES
        assert "tensor model.layers.1.a differs from the recorded hash" in caplog.text
        assert not fetch.wrong(layer_names(1))


def test_parts_of_pieces_of_another_size_begin_again(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", policy=ONE) as fetch:
        end_within_a_piece(fetch, layer_names(1), 10_000)
    with Fetch(server, tmp_path / "cache", policy=replace(ONE, piece_bytes=5_000)) as fetch:
        assert not fetch.model.units()
        assert fetch.run(layer_names(1)) == LAYER_BYTES and not fetch.wrong(layer_names(1))


def test_parts_are_recorded_at_most_once_in_an_interval(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", policy=replace(ONE, min_part_s=600.0)) as fetch:
        with pytest.raises(TimeoutError):
            end_within_a_piece(fetch, layer_names(1), PART_BYTES, timeout_s=0.5)
        assert fetch.model.num_bytes("model.layers.1.a") == SMALL.piece_bytes


def test_smaller_fetches_record_smaller_parts() -> None:
    policy = TransferPolicy(num_connections=10, piece_bytes=2**20, max_lost=0.01, min_part_bytes=4096)
    assert policy.part_bytes(10**9) == 1_000_000
    assert policy.part_bytes(10**10) == 2**20
    assert policy.part_bytes(10**6) == 4096
