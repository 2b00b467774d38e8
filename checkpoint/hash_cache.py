"""Hashes of tensors in the user's cache, for as long as the file that they are of does not change."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import xxhash

from checkpoint.errors import CheckpointError
from checkpoint.file_identity import FileIdentity
from checkpoint.json_files import read_json_object

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
