"""Reads regular files only, detects changed files, parses small JSON files strictly, replaces files whole."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from checkpoint.errors import BadConfig, CheckpointError, CheckpointNotFound, FileTooLarge, NotRegularFile
from checkpoint.links import TEXT_SUFFIXES, check_link

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
CONFIG_FILE = "config.json"
PARAMS_FILE = "params.json"
"""Describes a checkpoint in Mistral's own format, which has no config.json."""
TOKENIZER_FILE = "tokenizer.json"
TEKKEN_FILE = "tekken.json"
"""The tokenizer in Mistral's own format."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    TEKKEN_FILE,
    "tiktoken.model",
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Names of files beside config.json that a tokenizer may consist of."""
_LFS_POINTER = re.compile(
    rb"version https?://(git-lfs\.github\.com|hawser\.github\.com|git-media\.io)/|# git-media\b"
)
"""Beginning of a pointer of Git LFS, also of the versions before its release."""
_MAX_POINTER_BYTES = 1024
"""By the specification of Git LFS."""


def has_params(directory: Path) -> bool:
    """Whether a directory is in Mistral's own format, as config.json would take precedence."""
    return is_named(directory / PARAMS_FILE) and not is_named(directory / CONFIG_FILE)


def is_named(path: Path) -> bool:
    """Whether the directory has an entry of this name, even a broken link."""
    return os.path.lexists(path)


def check_regular(path: Path) -> None:
    """Raise NotRegularFile or CheckpointNotFound unless `path` is a regular file. Follows links."""
    try:
        _check_mode(path, path.stat())
    except OSError as error:
        raise _unreadable(path, error) from error


def check_directory(directory: Path, *, max_bytes: int) -> None:
    """Check the entries of `directory` before a library reads them: none blocks, no text file is too large.

    Raises NotRegularFile for an entry other than a file or directory, FileTooLarge for JSON, a vocabulary or
    a template above `max_bytes`, and like `check_link` and `open_regular` for one of these. Broken links are
    skipped.
    """
    for entry in sorted(directory.iterdir()):
        try:
            status = entry.stat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            continue
        _check_mode(entry, status)
        if entry.suffix in TEXT_SUFFIXES:
            _check_size(entry, status, max_bytes)
            check_link(entry)
            open_regular(entry).close()


def open_regular(path: Path) -> BinaryIO:
    """Open `path` for reading without blocking.

    Raises NotRegularFile, and CheckpointNotFound also for a pointer of Git LFS in place of the file.

    The type is checked before opening, because opening a device can have side effects, and again after,
    because the file may have been replaced.
    """
    check_regular(path)
    try:
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        try:
            _check_mode(path, status := os.fstat(stream.fileno()))
            _check_pointer(path, stream.fileno(), status)
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        raise _unreadable(path, error) from error
    return stream


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Read all of `path`. Raises like `open_regular`, and FileTooLarge with size and limit."""
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


def _check_pointer(path: Path, descriptor: int, status: os.stat_result) -> None:
    if status.st_size > _MAX_POINTER_BYTES:
        return
    if _LFS_POINTER.match(os.pread(descriptor, _MAX_POINTER_BYTES, 0)):
        raise CheckpointNotFound(
            f"{path} is a Git LFS pointer of {status.st_size} bytes, not the file: run git lfs pull in its"
            " directory"
        )


def _check_size(path: Path, status: os.stat_result, max_bytes: int) -> None:
    if status.st_size > max_bytes:
        raise FileTooLarge(f"{path} has {status.st_size} bytes, the limit is {max_bytes}")


def _unreadable(path: Path, error: OSError) -> CheckpointNotFound:
    link = f" (it is a link to {os.readlink(path)})" if path.is_symlink() else ""
    return CheckpointNotFound(f"{path} cannot be read: {error.strerror}{link}")


Status = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of a checkpoint file; any write or replacement changes `status`.

    `status` is device, inode, size in bytes and time of the last change in ns; None for a missing file. It
    detects changes of a few values, which the fingerprint may not.
    """

    name: str
    status: Status | None


def stat_files(directory: Path, names: Iterable[str]) -> tuple[FileIdentity, ...]:
    """Return the current identity of each named file."""
    return tuple(FileIdentity(name=name, status=_status_at(directory / name)) for name in names)


def identity_of_open(name: str, descriptor: int) -> FileIdentity:
    """Return the identity of an open file, even if its name now refers to another file."""
    return FileIdentity(name=name, status=_status(os.fstat(descriptor)))


def _status_at(path: Path) -> Status | None:
    try:
        return _status(path.stat())
    except OSError:
        return None


def _status(found: os.stat_result) -> Status:
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Limit for config.json and generation_config.json, which have some kB."""


def read_json_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """Read the JSON object in `path`.

    Raises CheckpointNotFound, NotRegularFile, FileTooLarge, and BadConfig unless the file is a UTF-8 JSON
    object without duplicate keys.
    """
    return parse_json_object(read_regular(path, max_bytes=max_bytes), str(path), BadConfig)


MAX_DIGITS = 64
"""Limit for an integer in a file; tokenizers write 10^30 for an unlimited length."""


def parse_json_object(text: bytes, source: str, error_type: type[CheckpointError]) -> dict[str, object]:
    """Parse a JSON object; `source` names it in an error of `error_type`."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys, parse_int=_bounded_int
        )
    except (ValueError, RecursionError) as error:
        raise error_type(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_type(f"{source} holds a JSON {type(value).__name__}, not an object")
    return value


def _bounded_int(digits: str) -> int:
    """Raises ValueError for a long number, of which Python's conversions take quadratic time."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result


def replace_file(path: Path, text: str) -> None:
    """Write ASCII text with mode 0600. Raises OSError and then leaves the old file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
