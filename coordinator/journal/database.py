"""The journal's SQLite file, opened by one coordinator at a time."""

import fcntl
import logging
import os
import sqlite3
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.journal.records import JournalUnusable

log = logging.getLogger(__name__)


OWNER_ONLY = 0o600
_BESIDE = ("", "-wal", "-shm", "-journal")


def create_private(path: Path) -> None:
    """Create an empty file with mode 0600 if missing, as SQLite does with its others. Raises OSError."""
    try:
        descriptor = os.open(
            os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY
        )
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, OWNER_ONLY)  # the umask may also have removed rights of the owner
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Remove access of other users to an existing database and its files. Raises OSError.

    Opens no file: closing a file that SQLite has open would release SQLite's locks.
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
                "changed mode of %s from %04o to %04o: it contains prompts in plain text",
                file,
                mode,
                OWNER_ONLY,
            )


SCHEMA_VERSION = 5
APPLICATION_ID = 0x53474A4C  # "SGJL"
WRITER_BUSY_TIMEOUT_S = 0.1
"""Short, because the writer runs on the event loop, which another program's lock must not block."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    client TEXT NOT NULL,
    message BLOB NOT NULL,
    prompt BLOB NOT NULL,
    bad_words TEXT NOT NULL,
    grammar TEXT,
    grammar_checksum TEXT,
    arrived_at REAL NOT NULL,
    deadline_at REAL,
    traceparent TEXT NOT NULL,
    caller_traceparent TEXT NOT NULL,
    attach_digest BLOB NOT NULL,
    ended_at REAL,
    error_kind TEXT,
    error_text TEXT,
    compacted TEXT,
    compacted_until INTEGER NOT NULL
);
CREATE TABLE log (number INTEGER PRIMARY KEY, at REAL NOT NULL, entries TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class ServedIdentity:
    """Model fingerprint and dtype of the journalled tokens."""

    fingerprint: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.fingerprint} in {self.dtype}"


class FileLock:
    """Lock held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError when the lock is held, OSError when the file cannot be created."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Call once."""
        os.close(self._descriptor)


@dataclass(slots=True)
class OpenDatabase:
    """A validated journal database with its lock."""

    path: Path
    connection: sqlite3.Connection
    lock: FileLock

    def reconnect(self) -> None:
        """Replace the connection, which may have stale state after a failure. Raises sqlite3.Error."""
        connection = connect(self.path, busy_timeout_s=WRITER_BUSY_TIMEOUT_S)
        try:
            # Opens the log before the old connection closes, which would otherwise empty and delete it.
            connection.execute("SELECT count(*) FROM meta").fetchone()
        except BaseException:
            connection.close()
            raise
        with suppress(sqlite3.Error):
            self.connection.close()
        self.connection = connection

    def close(self) -> None:
        with suppress(sqlite3.Error):  # failed writes were already reported
            self.connection.close()
        self.lock.release()


def open_database(path: Path, identity: ServedIdentity) -> OpenDatabase:
    """Open or create the journal at `path`. Raises JournalUnusable; the file is then unchanged."""
    try:
        lock = FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError:
        raise JournalUnusable(f"journal {path} is in use by another coordinator") from None
    except OSError as error:
        raise JournalUnusable(f"journal {path} cannot be written: {error.strerror}") from error
    try:
        return OpenDatabase(path, _connected(path, identity), lock)
    except BaseException:
        lock.release()
        raise


def connect(path: Path, *, busy_timeout_s: float = 5.0) -> sqlite3.Connection:
    """Connect in autocommit mode; a power failure may lose the last commits, nothing else."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=busy_timeout_s)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


# The last one is for an error of SQLite with names of a damaged file that are not UTF-8.
_UNREADABLE = (sqlite3.Error, OSError, UnicodeDecodeError)


def _connected(path: Path, identity: ServedIdentity) -> sqlite3.Connection:
    try:
        create_private(path)
        connection = connect(path)
    except _UNREADABLE as error:
        raise _unusable(path, error) from error
    try:
        _prepare(connection, path, identity)
    except _UNREADABLE as error:
        connection.close()
        raise _unusable(path, error) from error
    except BaseException:
        connection.close()
        raise
    connection.execute(f"PRAGMA busy_timeout = {round(WRITER_BUSY_TIMEOUT_S * 1000)}")
    return connection


def _unusable(path: Path, error: Exception) -> JournalUnusable:
    if isinstance(error, OSError):
        return JournalUnusable(f"journal {path} cannot be written: {error.strerror}")
    if isinstance(error, sqlite3.OperationalError):
        return JournalUnusable(f"journal {path} cannot be written: {error}")
    return damaged(path, error)


def damaged(path: Path, what: object) -> JournalUnusable:
    return JournalUnusable(f"journal {path} is damaged: {what}; move it away to start without it")


def _prepare(connection: sqlite3.Connection, path: Path, identity: ServedIdentity) -> None:
    num_tables = _number(connection, "SELECT count(*) FROM sqlite_master")
    if num_tables:
        _check(connection, path, identity)
    make_private(path)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA journal_size_limit = 16777216")
    connection.execute("BEGIN IMMEDIATE")  # fails now, not at the first request, if the file is read-only
    if not num_tables:
        _create(connection, identity)
    connection.execute("COMMIT")


def _create(connection: sqlite3.Connection, identity: ServedIdentity) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    rows = {"fingerprint": identity.fingerprint, "dtype": identity.dtype, "epoch": 0}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _check(connection: sqlite3.Connection, path: Path, identity: ServedIdentity) -> None:
    if _number(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise JournalUnusable(f"{path} is another program's database, not a journal")
    if (version := _number(connection, "PRAGMA user_version")) != SCHEMA_VERSION:
        raise JournalUnusable(
            f"journal {path} has version {version}, this coordinator supports version {SCHEMA_VERSION}"
        )
    [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, verdict.splitlines()[-1])
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    written = ServedIdentity(str(meta.get("fingerprint")), str(meta.get("dtype")))
    if written != identity:
        raise JournalUnusable(f"journal {path} is of another model: {written}, not {identity}")


def _number(connection: sqlite3.Connection, query: str) -> int:
    [number] = connection.execute(query).fetchone()
    assert isinstance(number, int)
    return number
