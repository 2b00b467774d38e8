"""Tells whether a file is still the one that was read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Status = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """One file of a checkpoint as it was when it was looked at. Whoever writes to it or puts another in its
    place changes `status`: device, inode, size in bytes, and time of the last change in ns; None: not there.

    The fingerprint may not tell apart two checkpoints that differ in few values.
    """

    name: str
    status: Status | None


def look_at(directory: Path, names: Iterable[str]) -> tuple[FileIdentity, ...]:
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
