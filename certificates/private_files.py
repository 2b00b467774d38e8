"""Files with keys, tokens and other secrets, which only this process's user may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_private(path: Path, *, max_bytes: int) -> bytes:
    """Read a file. Raises OSError; PermissionError if users may read it who should not.

    As for PostgreSQL's keys: mode 0600 or stricter for a file of this user, 0640 for one of root. The latter
    is how systemd shows a credential of a service that does not run as root.
    """
    content, status = read_regular(path, max_bytes=max_bytes)
    allowed = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
    if (mode := stat.S_IMODE(status.st_mode)) & ~allowed & 0o777:
        raise PermissionError(
            f"{path} has mode {mode:04o}, must be {allowed:04o} or stricter: run chmod {allowed:o} {path}"
        )
    return content


def read_regular(path: Path, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a file that is no pipe, device or directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(f"{path} is too large, the limit is {max_bytes} bytes")
    return content, status
