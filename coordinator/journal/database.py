"""The journal's SQLite file, opened by one coordinator at a time."""

import fcntl
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.journal.clock import ClockAnchor, is_same_boot
from coordinator.journal.committed import CommittedState, committed_state
from coordinator.journal.records import INVALID, JournalUnusable
from coordinator.journal.tables import Changes, RowChecksums, schema

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


SCHEMA_VERSION = 6
APPLICATION_ID = 0x53474A4C  # "SGJL"
WRITER_BUSY_TIMEOUT_S = 0.1
"""Short, because the writer runs on the event loop, which another program's lock must not block."""


@dataclass(frozen=True, slots=True)
class ServedIdentity:
    """Model fingerprint and dtype of the journalled tokens."""

    fingerprint: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.fingerprint} in {self.dtype}"


class FileLock:
    """Lock of a file by its inode, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError when the lock is held, OSError when the file cannot be opened or created."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Call once."""
        os.close(self._descriptor)


def checkpoint(connection: sqlite3.Connection, mode: str) -> int:
    """Copy the log into the database, which then says that a log follows; only the log denies it.

    So a database whose log was lost differs from one that was closed, by whichever program.
    Returns the number of pages in the log. Raises sqlite3.Error.
    """
    connection.execute("INSERT OR IGNORE INTO log_follows VALUES (1)")
    _, num_pages, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    connection.execute("DELETE FROM log_follows")
    return int(num_pages)


def empty_log(connection: sqlite3.Connection) -> None:
    """Copy the log into the database, which says that none follows, and empty it. Raises sqlite3.Error."""
    connection.execute("DELETE FROM log_follows")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


class JournalFile:
    """A journal's file, locked. Read `committed` before `open`, which is the first to change the file."""

    def __init__(self, path: Path, identity: ServedIdentity, boot_id: str) -> None:
        """Lock the file and check all of it. Raises JournalUnusable."""
        self.path = path
        self.rows = RowChecksums()
        self._file = Path(os.path.realpath(path))  # leaves a loop of links to the first open, which names it
        self._identity = identity
        self._locks: list[FileLock] = []
        self._connection: sqlite3.Connection | None = None
        try:
            with self._readable():
                self._lock()
                self.committed = self._checked(committed_state(self._file), boot_id)
        except BaseException:
            self.close()
            raise

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection that writes."""
        assert self._connection is not None, "the file is not open"
        return self._connection

    def open(self, clock: ClockAnchor) -> None:
        """Connect to the file for writing; create its tables if it has none. Raises JournalUnusable."""
        with self._readable():
            self._connection = self.connect()
            make_private(self._file)
            self._prepare(self._connection, clock)

    def connect(self, *, busy_timeout_s: float = 5.0) -> sqlite3.Connection:
        """Connect in autocommit mode; a power failure may lose the last commits, nothing else."""
        connection = sqlite3.connect(self._file, isolation_level=None, timeout=busy_timeout_s)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        # A log that begins again is cut to its new content, so that no former one follows its last frame.
        connection.execute("PRAGMA journal_size_limit = 0")
        return connection

    def reconnect(self) -> None:
        """Replace the connection, which may have stale state after a failure. Raises sqlite3.Error."""
        connection = self.connect(busy_timeout_s=WRITER_BUSY_TIMEOUT_S)
        try:
            # Opens the log before the old connection closes, which would otherwise empty and delete it.
            connection.execute("SELECT count(*) FROM meta").fetchone()
        except BaseException:
            connection.close()
            raise
        with suppress(sqlite3.Error):
            self.connection.close()
        self._connection = connection

    @contextmanager
    def transaction(self) -> Iterator[Changes]:
        """Commit the changes of the block with their seal. Raises sqlite3.Error; nothing is changed then."""
        connection = self.connection
        changes = self.rows.begin(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield changes
            changes.seal()
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite ends some failed transactions itself
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise
        self.rows.apply(changes)

    def close(self) -> None:
        """Close the file and release its locks. Call once."""
        if self._connection is not None:
            with suppress(sqlite3.Error):  # failed writes were already reported
                # After a failed checkpoint; a log that is copied is written over, even if the disk is full.
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._connection.execute("DELETE FROM log_follows")
            with suppress(sqlite3.Error):
                self._connection.close()
        while self._locks:  # after the connection: closing the file releases SQLite's locks of it
            self._locks.pop().release()

    def damaged(self, what: object) -> JournalUnusable:
        """The error for damage, with the remedy."""
        return JournalUnusable(
            f"journal {self.path} is damaged: {what}; move it away with its -wal file to start without it"
        )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Convert errors of the file."""
        try:
            yield
        except BlockingIOError:
            raise JournalUnusable(f"journal {self.path} is in use by another coordinator") from None
        except OSError as error:
            raise JournalUnusable(f"journal {self.path} cannot be written: {error.strerror}") from error
        except sqlite3.OperationalError as error:
            raise JournalUnusable(f"journal {self.path} cannot be written: {error}") from error
        except (sqlite3.Error, ValueError) as error:
            raise self.damaged(error) from error

    def _lock(self) -> None:
        """Lock the name, by which SQLite finds the log, and the inode, which links and mounts share."""
        self._locks.append(FileLock(self._file.with_name(f"{self._file.name}.lock")))
        wal = Path(f"{self._file}-wal")
        if self._file.exists() or not wal.exists() or not wal.stat().st_size:
            create_private(self._file)
            self._locks.append(FileLock(self._file))

    def _checked(self, state: CommittedState, boot_id: str) -> sqlite3.Connection | None:
        """The state in memory, None for a new file. Raises JournalUnusable."""
        connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            if state.image:
                connection.deserialize(state.image)
            is_new = not _number(connection, "SELECT count(*) FROM sqlite_master")
            if not is_new:
                self._check_kind(connection, state)
            self._check_end_of_log(state, None if is_new else connection, boot_id)
            if is_new:
                connection.close()
                return None
            self._check_rows(connection)
        except (sqlite3.Error, ValueError) as error:
            connection.close()
            raise self.damaged(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_kind(self, connection: sqlite3.Connection, state: CommittedState) -> None:
        if _number(connection, "PRAGMA application_id") != APPLICATION_ID:
            raise JournalUnusable(f"{self.path} is another program's database, not a journal")
        if (version := _number(connection, "PRAGMA user_version")) != SCHEMA_VERSION:
            raise JournalUnusable(
                f"journal {self.path} has version {version}, this coordinator supports version "
                f"{SCHEMA_VERSION}: finish its requests with the release that wrote it, or move it away "
                "to start without it"
            )
        if not state.has_log_mode:
            raise self.damaged("its header denies that it has a log")

    def _check_end_of_log(
        self, state: CommittedState, connection: sqlite3.Connection | None, boot_id: str
    ) -> None:
        """Raises JournalUnusable for lost transactions that no crash explains."""
        damage, may_be_power_loss = state.damage, state.may_be_power_loss
        if not state.has_log and connection is not None and _says_log_follows(connection):
            num_links = os.stat(self._file).st_nlink
            damage, may_be_power_loss = _missing_log(self._file, num_links), num_links == 1
        if damage is None:
            return
        if not may_be_power_loss or is_same_boot(_anchor(connection), boot_id):
            raise self.damaged(damage)
        log.warning("journal %s: %s: the last steps before a power failure", self.path, damage)

    def _check_rows(self, connection: sqlite3.Connection) -> None:
        """Raises JournalUnusable, ValueError or sqlite3.Error."""
        verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            raise self.damaged(verdict.splitlines()[-1])
        if sorted(_statements(connection)) != sorted(schema()):
            raise self.damaged("its tables are not those of a journal")
        self.rows.read(connection)
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        written = ServedIdentity(str(meta.get("fingerprint")), str(meta.get("dtype")))
        if written != self._identity:
            raise JournalUnusable(f"journal {self.path} is of another model: {written}, not {self._identity}")

    def _prepare(self, connection: sqlite3.Connection, clock: ClockAnchor) -> None:
        """Create what is missing, and empty the log, whose end may have parts of a transaction."""
        if self.committed is None:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        if self.committed is not None:
            empty_log(connection)
        with self.transaction() as changes:  # fails now, not at the first request, if the file is read-only
            if self.committed is None:
                for statement in schema():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                changes.put("meta", "fingerprint", self._identity.fingerprint)
                changes.put("meta", "dtype", self._identity.dtype)
                changes.put("meta", "epoch", 0)
            elif (seal := _number(connection, "SELECT total FROM seal")) != self.rows.total:
                raise ValueError(f"it has the seal {seal}, its checked copy {self.rows.total}")
            changes.put("meta", "clock", clock.encode())
        checkpoint(connection, "PASSIVE")
        connection.execute(f"PRAGMA busy_timeout = {round(WRITER_BUSY_TIMEOUT_S * 1000)}")


def _statements(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
    return [statement for (statement,) in connection.execute(query)]


def _says_log_follows(connection: sqlite3.Connection) -> bool:
    """False for a database without the table, which other checks reject."""
    try:
        return _number(connection, "SELECT count(*) FROM log_follows") > 0
    except sqlite3.OperationalError:
        return False


def _missing_log(file: Path, num_links: int) -> str:
    name = f"{file.name}-wal"
    if num_links > 1:
        return (
            f"its log {name} is missing or empty, and it has {num_links} names (hard links): continue it by "
            "the name with which it was used"
        )
    return f"its log {name} is missing or empty, and its coordinator did not close it: restore {name}"


def _anchor(connection: sqlite3.Connection | None) -> ClockAnchor | None:
    """The clocks in a database, None if it has none that can be read; its rows may not be checked yet."""
    if connection is None:
        return None
    try:
        [(text,)] = connection.execute("SELECT value FROM meta WHERE key = 'clock'").fetchall()
        return ClockAnchor.decode(text)
    except (*INVALID, sqlite3.Error):
        return None


def _number(connection: sqlite3.Connection, query: str) -> int:
    [number] = connection.execute(query).fetchone()
    assert isinstance(number, int)
    return number
