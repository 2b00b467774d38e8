"""Full-file hashes: correct, computed in slices while idle, cached until the file changes."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
import xxhash

from checkpoint import Checkpoint, hashes
from checkpoint.errors import BadHeader, FileChanged
from checkpoint.files import stat_files
from checkpoint.hashes import HashCache, TensorHasher, Urgency, hash_when_idle
from tests.checkpoints import flip_byte, make_checkpoint

FILE = "model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(make_checkpoint(tmp_path / "model", "llama", num_layers=1))


@pytest.fixture
def cache(tmp_path: Path) -> HashCache:
    return HashCache(tmp_path / "cache" / "weights")


def hashed(checkpoint: Checkpoint, cache: HashCache | None = None, *names: str) -> TensorHasher:
    hasher = TensorHasher(checkpoint, names or checkpoint.tensors, cache=cache)
    while not hasher.advance():
        pass
    return hasher


@pytest.mark.parametrize("slice_bytes", [100, 4096, hashes.SLICE_BYTES])
def test_every_byte_of_every_tensor_is_hashed(
    slice_bytes: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SLICE_BYTES", slice_bytes)
    data = (checkpoint.directory / FILE).read_bytes()
    assert hashed(checkpoint).hashes == {
        name: xxhash.xxh3_128_digest(data[entry.begin : entry.end])
        for name, entry in checkpoint.tensors.items()
    }


def test_a_slice_is_bounded_and_read_with_each_call(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SLICE_BYTES", 1000)
    hasher = TensorHasher(checkpoint, [EMBEDDINGS])
    for count in range(1, 4):
        assert not hasher.advance()
        assert hasher.read_bytes == 1000 * count


def test_hashes_are_kept_until_the_file_changes(checkpoint: Checkpoint, cache: HashCache) -> None:
    first = hashed(checkpoint, cache, EMBEDDINGS)
    assert hashed(checkpoint, cache, EMBEDDINGS).read_bytes == 0
    both = hashed(checkpoint, cache, EMBEDDINGS, NORM)
    assert both.read_bytes == 256, "the norm only"
    assert both.hashes[EMBEDDINGS] == first.hashes[EMBEDDINGS]

    file = checkpoint.directory / FILE
    times = file.stat()
    flip_byte(file, checkpoint.tensors[EMBEDDINGS].begin + 5)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = hashed(checkpoint, cache, EMBEDDINGS)
    assert again.read_bytes == first.read_bytes
    assert again.hashes != first.hashes


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"status": [1], "hashes": {}}', b'{"hashes": {"a": "00"}}', None]
)
def test_a_damaged_cache_is_not_used(
    content: bytes | None, checkpoint: Checkpoint, cache: HashCache, tmp_path: Path
) -> None:
    expected = hashed(checkpoint, cache)
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_bytes(
        kept.read_bytes().replace(b'"hashes": {"', b'"hashes": {"x') if content is None else content
    )
    again = hashed(checkpoint, cache)
    assert again.read_bytes == expected.read_bytes
    assert again.hashes == expected.hashes
    assert hashed(checkpoint, cache).read_bytes == 0, "it was rewritten"


def test_without_a_cache_directory_hashes_are_still_computed(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert len(hashed(checkpoint, HashCache(tmp_path / "file" / "weights")).hashes) == len(
            checkpoint.tensors
        )
    assert "cannot cache hashes of model.safetensors" in caplog.text


def test_a_file_replaced_since_loading_is_not_hashed(checkpoint: Checkpoint) -> None:
    files = stat_files(checkpoint.directory, [FILE])
    assert not TensorHasher(checkpoint, [NORM], files=files).advance()
    flip_byte(checkpoint.directory / FILE, checkpoint.tensors[NORM].begin)
    with pytest.raises(FileChanged, match="has changed since its weights were loaded"):
        TensorHasher(checkpoint, [NORM], files=files).advance()


def test_a_file_that_changes_while_it_is_hashed_is_noticed(checkpoint: Checkpoint, cache: HashCache) -> None:
    hasher = TensorHasher(checkpoint, [NORM, EMBEDDINGS], cache=cache)
    assert not hasher.advance()
    flip_byte(checkpoint.directory / FILE, checkpoint.tensors[EMBEDDINGS].begin)
    while hasher.read_bytes < 256 + 32768:
        hasher.advance()
    with pytest.raises(FileChanged, match="changed while it was hashed"):
        hasher.advance()
    assert not cache.load(*stat_files(checkpoint.directory, [FILE]))


def test_a_file_that_became_shorter_is_rejected(checkpoint: Checkpoint) -> None:
    os.truncate(checkpoint.directory / FILE, checkpoint.tensors[NORM].begin)
    with pytest.raises(BadHeader, match="ended at byte"):
        TensorHasher(checkpoint, [NORM]).advance()


async def test_nothing_is_read_while_work_is_in_flight(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SLICE_BYTES", 4096)
    hasher = TensorHasher(checkpoint, [EMBEDDINGS])
    activity: list[object | None] = [None]
    num_asked = 0

    def busy_after_two_slices() -> object | None:
        nonlocal num_asked
        num_asked += 1
        if hasher.read_bytes == 2 * 4096:
            activity[0] = None
        return activity[0]

    task = asyncio.create_task(hash_when_idle(hasher, busy_after_two_slices, idle_s=0.001))

    async def asked(times: int) -> None:
        wanted = num_asked + times
        async with asyncio.timeout(30):
            while num_asked < wanted:
                await asyncio.sleep(0.001)

    await asked(3)
    assert hasher.read_bytes == 0
    activity[0] = "idle"
    async with asyncio.timeout(30):
        while activity[0] is not None:
            await asyncio.sleep(0.001)
    await asked(3)
    assert hasher.read_bytes == 2 * 4096
    task.cancel()


async def test_a_step_between_two_ticks_counts_as_activity(checkpoint: Checkpoint) -> None:
    """The idle time restarts whenever the number of steps has changed."""
    hasher = TensorHasher(checkpoint, [NORM])
    looks = 0

    def activity() -> object:
        nonlocal looks
        looks += 1
        return min(looks, 5)

    assert await hash_when_idle(hasher, activity, idle_s=0.001) == hasher.hashes
    assert looks > 6


async def test_urgent_hashes_do_not_wait_for_idle_time(checkpoint: Checkpoint) -> None:
    hasher = TensorHasher(checkpoint, [EMBEDDINGS])
    async with asyncio.timeout(30):
        assert await hash_when_idle(hasher, lambda: Urgency.AT_ONCE, idle_s=3600.0) == hasher.hashes
