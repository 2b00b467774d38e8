"""Full hashes of tensors, computed when idle and cached per file.

XXH3-128 and not a cryptographic hash: it is against accidents, and costs less than reading.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkpoint.directory import Checkpoint
from checkpoint.errors import BadHeader, CheckpointError, CheckpointNotFound, FileChanged
from checkpoint.files import FileIdentity, identity_of_open, open_regular, read_json_object

log = logging.getLogger(__name__)


CACHE_FOLDER = "weights"
"""Of the user's cache directory."""
MAX_BYTES = 16 * 1024 * 1024
MAX_FILES = 1024
"""One for each file of a checkpoint; the least recently written ones go first."""


class HashCache:
    """One small file for each file of weights, named after its identity: a touched one is hashed again.

    Several processes may use the same directory. What cannot be read or written is computed again.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is made when something is stored."""
        self._directory = directory

    def load(self, identity: FileIdentity) -> dict[str, bytes]:
        """What is known of this very file: 16 bytes by name of the tensor."""
        path = self._path(identity)
        if not path.exists():
            return {}
        try:
            content = read_json_object(path, max_bytes=MAX_BYTES)
            if content.get("checksum") != _checksum(content):
                raise ValueError("its checksum does not match")
            return _parse_hashes(content.get("hashes")) if content["status"] == _status(identity) else {}
        except (CheckpointError, ValueError) as error:
            log.warning("%s is not used: %s", path, error)
            return {}

    def store(self, identity: FileIdentity, hashes: Mapping[str, bytes]) -> None:
        """Replaces at once what is known of this file."""
        content: dict[str, object] = {
            "status": _status(identity),
            "hashes": {name: each.hex() for name, each in hashes.items()},
        }
        content["checksum"] = _checksum(content)
        path = self._path(identity)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(path, json.dumps(content))
            self._prune()
        except OSError as error:
            log.warning("hashes of %s are not kept, they are computed again: %s", identity.name, error)

    def _path(self, identity: FileIdentity) -> Path:
        text = json.dumps([identity.name, _status(identity)])
        return self._directory / f"{xxhash.xxh3_64_hexdigest(text.encode())}.json"

    def _prune(self) -> None:
        files = list(self._directory.glob("*.json"))
        if len(files) > MAX_FILES:
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-MAX_FILES]:
                file.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    """Readable by its owner only. Raises OSError; then nothing has changed."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _status(identity: FileIdentity) -> list[int]:
    return list(identity.status or ())


def _checksum(content: Mapping[str, object]) -> str:
    """A damaged hash would look like damaged weights."""
    checked = json.dumps([content.get("status"), content.get("hashes")], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(checked.encode())


def _parse_hashes(value: object) -> dict[str, bytes]:
    """Raises ValueError for anything but hashes of 16 bytes."""
    if not isinstance(value, dict):
        raise ValueError("it holds no hashes")
    hashes = {name: bytes.fromhex(text) for name, text in value.items() if isinstance(text, str)}
    if len(hashes) != len(value) or any(len(each) != 16 for each in hashes.values()):
        raise ValueError("it holds something else than hashes of 16 bytes")
    return hashes


SLICE_BYTES = 8 * 1024 * 1024
MAX_PAUSE_S = 0.25

Hashes = dict[str, bytes]
"""16 bytes by name of the tensor."""


class TensorHasher:
    """The hashes of some tensors of a checkpoint. Used by one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        *,
        files: Iterable[FileIdentity] = (),
        cache: HashCache | None = None,
    ) -> None:
        """`files` are what the files must be, as far as they are given; `cache` has what is known already."""
        self.hashes: Hashes = {}
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._names_by_file: dict[str, list[str]] = {}
        for name in names:
            self._names_by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
        self._files = {each.name: each for each in files}
        self._cache = cache
        self._buffer = memoryview(bytearray(SLICE_BYTES))
        self._slices = self._hash_all()

    def advance(self) -> bool:
        """Hashes one slice more; True when `hashes` is complete.

        Raises FileChanged for a file that is not, or not any more, what it must be, CheckpointNotFound,
        NotRegularFile or BadHeader for one that cannot be read. Then it must not be used any more.
        """
        return next(self._slices, None) is None

    def _hash_all(self) -> Iterator[int]:
        for file, names in sorted(self._names_by_file.items()):
            path = self._checkpoint.directory / file
            with open_regular(path) as stream:
                identity = identity_of_open(file, stream.fileno())
                if self._files.get(file, identity) != identity:
                    raise FileChanged(f"{path} has changed since its weights were loaded")
                known = {} if self._cache is None else self._cache.load(identity)
                self.hashes |= {name: known[name] for name in names if name in known}
                missing = [name for name in names if name not in known]
                yield from self._hash_tensors(stream, file, missing)
                if identity_of_open(file, stream.fileno()) != identity:
                    raise FileChanged(f"{path} has changed while it was hashed")
            if missing and self._cache is not None:
                self._cache.store(identity, known | {name: self.hashes[name] for name in names})

    def _hash_tensors(self, stream: BinaryIO, file: str, names: list[str]) -> Iterator[int]:
        """In the order in which they lie in the file. Yields after each slice how many bytes it has."""
        for name in sorted(names, key=lambda name: self._checkpoint.tensors[name].begin):
            entry, state = self._checkpoint.tensors[name], xxhash.xxh3_128()
            for begin in range(entry.begin, entry.end, SLICE_BYTES):
                part = self._buffer[: min(SLICE_BYTES, entry.end - begin)]
                try:
                    num_read = os.preadv(stream.fileno(), [part], begin)
                except OSError as error:
                    raise CheckpointNotFound(f"{file} cannot be read: {error.strerror}") from error
                if num_read != len(part):
                    raise BadHeader(f"{file} ended at byte {begin + num_read}, expected {entry.end}")
                state.update(part)
                self.read_bytes += num_read
                yield num_read
            self.hashes[name] = state.digest()


async def hash_when_idle(
    hasher: TensorHasher, activity: Callable[[], object | None], *, idle_s: float
) -> Hashes:
    """All hashes of `hasher`, computed on a thread while nothing else is done, half of the time at most.

    A slice is begun when `activity` has returned the same value for `idle_s`, and not None, which means that
    something is under way. Raises what `TensorHasher.advance` raises.
    """
    loop = asyncio.get_running_loop()
    seen, since_s = activity(), loop.time()
    while True:
        now = activity()
        if now is None or now != seen:
            seen, since_s = now, loop.time()
        if now is None or loop.time() - since_s < idle_s:
            await asyncio.sleep(min(idle_s, MAX_PAUSE_S))
            continue
        began_s = loop.time()
        if await loop.run_in_executor(None, hasher.advance):
            return hasher.hashes
        await asyncio.sleep(loop.time() - began_s)
