"""Opens files of a checkpoint: regular files only, so that no FIFO blocks and no device is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from checkpoint.errors import CheckpointNotFound, FileTooLarge, NotRegularFile

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
