"""Full hashes of tensors, computed while idle and cached per file.

XXH3-128 instead of a cryptographic hash: it detects accidents and costs less than reading.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from enum import Enum, auto
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkpoint.directory import Checkpoint
from checkpoint.errors import BadHeader, CheckpointError, CheckpointNotFound, FileChanged
from checkpoint.files import FileIdentity, identity_of_open, open_regular, read_json_object, replace_file

log = logging.getLogger(__name__)


CACHE_FOLDER = "weights"
"""Folder in the user's cache directory."""
MAX_BYTES = 16 * 1024 * 1024
MAX_FILES = 1024
"""Maximum cache files, one per weights file; the least recently written are removed first."""


class HashCache:
    """Cache with one small file per weights file, keyed by its identity: changed files are rehashed.

    Several processes may share the directory. Unreadable entries are recomputed.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is created when an entry is stored."""
        self._directory = directory

    def load(self, identity: FileIdentity) -> dict[str, bytes]:
        """Return the known hashes (16 bytes) of this file by tensor name."""
        path = self._path(identity)
        if not path.exists():
            return {}
        try:
            content = read_json_object(path, max_bytes=MAX_BYTES)
            if content.get("checksum") != _checksum(content):
                raise ValueError("its checksum does not match")
            return _parse_hashes(content.get("hashes")) if content["status"] == _status(identity) else {}
        except (CheckpointError, ValueError) as error:
            log.warning("ignoring hash cache %s: %s", path, error)
            return {}

    def store(self, identity: FileIdentity, hashes: Mapping[str, bytes]) -> None:
        """Atomically replace the entry of this file."""
        content: dict[str, object] = {
            "status": _status(identity),
            "hashes": {name: digest.hex() for name, digest in hashes.items()},
        }
        content["checksum"] = _checksum(content)
        path = self._path(identity)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps(content))
            self._prune()
        except OSError as error:
            log.warning("cannot cache hashes of %s, they will be recomputed: %s", identity.name, error)

    def _path(self, identity: FileIdentity) -> Path:
        text = json.dumps([identity.name, _status(identity)])
        return self._directory / f"{xxhash.xxh3_64_hexdigest(text.encode())}.json"

    def _prune(self) -> None:
        files = list(self._directory.glob("*.json"))
        if len(files) > MAX_FILES:
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-MAX_FILES]:
                file.unlink(missing_ok=True)


def _status(identity: FileIdentity) -> list[int]:
    return list(identity.status or ())


def _checksum(content: Mapping[str, object]) -> str:
    """Guard against damaged entries, which would look like damaged weights."""
    checked = json.dumps([content.get("status"), content.get("hashes")], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(checked.encode())


def _parse_hashes(value: object) -> dict[str, bytes]:
    """Parse hashes of 16 bytes. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("it has no hashes")
    hashes = {name: bytes.fromhex(text) for name, text in value.items() if isinstance(text, str)}
    if len(hashes) != len(value) or any(len(digest) != 16 for digest in hashes.values()):
        raise ValueError("it has values other than hashes of 16 bytes")
    return hashes


SLICE_BYTES = 8 * 1024 * 1024
MAX_PAUSE_S = 0.25

Hashes = dict[str, bytes]
"""16 bytes by tensor name."""


class Urgency(Enum):
    """An activity for `hash_when_idle`."""

    AT_ONCE = auto()
    """Do not wait for idleness, and do not pause between slices."""


class TensorHasher:
    """Hashes some tensors of a checkpoint. Not thread-safe."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Iterable[str],
        *,
        files: Iterable[FileIdentity] = (),
        cache: HashCache | None = None,
    ) -> None:
        """`files` are the expected identities, if known; `cache` supplies known hashes."""
        self.hashes: Hashes = {}
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._names_by_file: dict[str, list[str]] = {}
        for name in names:
            self._names_by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
        self._files = {identity.name: identity for identity in files}
        self._cache = cache
        self._buffer = memoryview(bytearray(SLICE_BYTES))
        self._slices = self._hash_all()

    def advance(self) -> bool:
        """Hash one more slice; return True when `hashes` is complete.

        Raises FileChanged for a file that differs from its expected identity, CheckpointNotFound,
        NotRegularFile or BadHeader for one that cannot be read. Do not call it again after an error.
        """
        return next(self._slices, None) is None

    def close(self) -> None:
        """Close the file that is being hashed; another thread that hashes a slice of it keeps it open."""
        with suppress(ValueError):
            self._slices.close()

    def _hash_all(self) -> Generator[int, None, None]:
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
                    raise FileChanged(f"{path} changed while it was hashed")
            if missing and self._cache is not None:
                self._cache.store(identity, known | {name: self.hashes[name] for name in names})

    def _hash_tensors(self, stream: BinaryIO, file: str, names: list[str]) -> Iterator[int]:
        """Hash in file order; yield the size of each slice read."""
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
    """Compute all hashes on a thread while idle, using at most half of the time.

    A slice starts once `activity` has returned the same value other than None (busy) for `idle_s`, or
    Urgency.AT_ONCE. Raises like `TensorHasher.advance`.
    """
    loop = asyncio.get_running_loop()
    seen, since_s = activity(), loop.time()
    with closing(hasher):
        while True:
            now = activity()
            if now is None or now != seen:
                seen, since_s = now, loop.time()
            is_urgent = now is Urgency.AT_ONCE
            if not is_urgent and (now is None or loop.time() - since_s < idle_s):
                await asyncio.sleep(min(idle_s, MAX_PAUSE_S))
                continue
            began_s = loop.time()
            if await loop.run_in_executor(None, hasher.advance):
                return hasher.hashes
            await asyncio.sleep(0.0 if is_urgent else loop.time() - began_s)
