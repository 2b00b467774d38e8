"""Database files that only their owner may read: they have prompts and outputs in plain."""

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

OWNER_ONLY = 0o600
_BESIDE = ("", "-wal", "-shm", "-journal")


def create_private(path: Path) -> None:
    """Creates an empty file with mode 0600 for SQLite to open, unless there is one. Raises OSError.

    The files that SQLite makes beside it get the same mode, whatever the umask.
    """
    try:
        descriptor = os.open(
            os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY
        )
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, OWNER_ONLY)  # a umask may have taken rights from the owner, too
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Takes all rights of others from an existing database and the files beside it. Raises OSError.

    Opens nothing: to close a file that SQLite has open, too, would release SQLite's locks on it.
    """
    for suffix in _BESIDE:
        file = f"{os.path.realpath(path)}{suffix}"
        try:
            mode = stat.S_IMODE(os.stat(file).st_mode)
        except FileNotFoundError:
            continue
        if mode & ~OWNER_ONLY:
            os.chmod(file, OWNER_ONLY)
            log.warning(
                "changed mode of %s from %04o to %04o: it has prompts in plain", file, mode, OWNER_ONLY
            )
