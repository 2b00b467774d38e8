"""Reads regular files only, detects changed files, parses small JSON files strictly."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from checkpoint.errors import BadConfig, CheckpointError, CheckpointNotFound, FileTooLarge, NotRegularFile

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_READ_WHOLE = frozenset({".json", ".jinja", ".model", ".txt"})


def is_named(path: Path) -> bool:
    """Whether the directory has an entry of this name, of any kind: a broken link is not absence."""
    return os.path.lexists(path)


def check_regular(path: Path) -> None:
    """Raises NotRegularFile for anything else, CheckpointNotFound for what is absent. Follows links."""
    try:
        _check_mode(path, path.stat())
    except OSError as error:
        raise _unreadable(path, error) from error


def check_directory(directory: Path, *, max_bytes: int) -> None:
    """For libraries that read what they find: nothing in `directory` blocks, and no text file is too large.

    Raises NotRegularFile for an entry that is neither a file nor a directory, FileTooLarge for JSON, a
    vocabulary or a template beyond `max_bytes`. A link to nothing is passed over: it cannot be read.
    """
    for entry in sorted(directory.iterdir()):
        try:
            status = entry.stat()
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            _check_mode(entry, status)
        if entry.suffix in _READ_WHOLE:
            _check_size(entry, status, max_bytes)


def open_regular(path: Path) -> BinaryIO:
    """`path` for reading; never blocks. Raises CheckpointNotFound or NotRegularFile.

    It is looked at before it is opened, because opening a device can have an effect, and again afterwards,
    because another file may have taken its place.
    """
    check_regular(path)
    try:
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        try:
            _check_mode(path, os.fstat(stream.fileno()))
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        raise _unreadable(path, error) from error
    return stream


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """All of `path`. Raises what `open_regular` raises, and FileTooLarge with both sizes."""
    with open_regular(path) as stream:
        _check_size(path, os.fstat(stream.fileno()), max_bytes)
        try:
            return stream.read(max_bytes)
        except OSError as error:
            raise _unreadable(path, error) from error


def _check_mode(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "another kind of file")
        raise NotRegularFile(f"{path} is {kind}, not a regular file")


def _check_size(path: Path, status: os.stat_result, max_bytes: int) -> None:
    if status.st_size > max_bytes:
        raise FileTooLarge(f"{path} has {status.st_size} bytes, the limit is {max_bytes}")


def _unreadable(path: Path, error: OSError) -> CheckpointNotFound:
    return CheckpointNotFound(f"{path} cannot be read: {error.strerror}")


Status = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """One file of a checkpoint as it was when it was looked at. Whoever writes to it or puts another in its
    place changes `status`: device, inode, size in bytes, and time of the last change in ns; None: not there.

    The fingerprint may not tell apart two checkpoints that differ in few values.
    """

    name: str
    status: Status | None


def stat_files(directory: Path, names: Iterable[str]) -> tuple[FileIdentity, ...]:
    """The files of these names as they are now."""
    return tuple(FileIdentity(name=name, status=_status_at(directory / name)) for name in names)


def identity_of_open(name: str, descriptor: int) -> FileIdentity:
    """The open file, whatever lies under its name by now."""
    return FileIdentity(name=name, status=_status(os.fstat(descriptor)))


def _status_at(path: Path) -> Status | None:
    try:
        return _status(path.stat())
    except OSError:
        return None


def _status(found: os.stat_result) -> Status:
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Of config.json and generation_config.json, which have some kB."""


def read_json_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The JSON object in `path`.

    Raises CheckpointNotFound when the file is absent or unreadable, NotRegularFile when it is no file,
    FileTooLarge, and BadConfig when it is not UTF-8, not JSON, not an object, or names a key twice.
    """
    return parse_json_object(read_regular(path, max_bytes=max_bytes), str(path), BadConfig)


def parse_json_object(text: bytes, source: str, error_type: type[CheckpointError]) -> dict[str, object]:
    """`text` as a JSON object; `source` names it in an error of `error_type`."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_type(f"{source} holds a JSON {type(value).__name__}, not an object")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result
