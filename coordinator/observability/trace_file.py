"""Traces that survive the coordinator: an SQLite file, written beside the event loop."""

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coordinator.journal.database import FileLock, create_private, make_private
from coordinator.observability.kept_trace import KeptSpan

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
APPLICATION_ID = 0x53475452  # "SGTR"
DELAY_S = 0.2
"""How long spans wait for others, so that many are written at once."""
BATCH_SPANS = 512
PENDING_SPANS = 8192
PENDING_BYTES = 16 * 1024 * 1024
CLOSE_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE traces (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE, size_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE spans (
    trace INTEGER NOT NULL REFERENCES traces (number) ON DELETE CASCADE,
    id BLOB NOT NULL,
    parent_id BLOB NOT NULL,
    request_id TEXT,
    start_ns INTEGER NOT NULL,
    source BLOB NOT NULL,
    message BLOB NOT NULL,
    PRIMARY KEY (trace, id)
);
"""
_INSERT = """
INSERT OR IGNORE INTO spans
SELECT number, ?, ?, ?, ?, ?, ? FROM traces WHERE id = ?
"""


class TraceFileUnusable(Exception):
    """A file that cannot keep traces: one line that names it. Nothing was changed."""


class TraceFile:
    """Keeps the newest traces, `num_traces` and `size_bytes` at most. A write that fails loses its spans, and
    nothing else: `num_lost` counts them. Raises TraceFileUnusable.
    """

    def __init__(self, path: Path, *, num_traces: int, size_bytes: int) -> None:
        self.num_lost = 0
        self._path = path
        self._num_traces = num_traces
        self._size_bytes = size_bytes
        self._file_lock = _locked(path)
        try:
            self._connection = _opened(path)
        except BaseException:
            self._file_lock.release()
            raise
        self._pending_lock = threading.Lock()
        self._pending: deque[tuple[bytes, KeptSpan]] = deque()
        self._pending_bytes = 0
        self._dropped: deque[bytes] = deque(maxlen=PENDING_SPANS)
        self._has_failed = False
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace file", daemon=True)

    def read(self) -> Iterator[tuple[bytes, KeptSpan]]:
        """What is there, with the ids of traces, oldest trace first. To be read before the first write."""
        rows = self._connection.execute(
            "SELECT t.id, s.id, parent_id, request_id, start_ns, source, message"
            " FROM traces t JOIN spans s ON s.trace = t.number ORDER BY t.number, s.rowid"
        )
        for trace_id, span_id, parent_id, request_id, start_ns, source, message in rows:
            yield (
                trace_id,
                KeptSpan(
                    span_id=span_id,
                    parent_id=parent_id,
                    request_id=request_id,
                    start_ns=start_ns,
                    source=source,
                    message=message,
                ),
            )

    def write(self, trace_id: bytes, span: KeptSpan) -> None:
        """Has it written soon. Waits for nothing: what finds no room is lost."""
        with self._pending_lock:
            if len(self._pending) >= PENDING_SPANS or self._pending_bytes + _size_bytes(span) > PENDING_BYTES:
                self.num_lost += 1
                return
            self._pending.append((trace_id, span))
            self._pending_bytes += _size_bytes(span)
        self._tell()

    def drop(self, trace_id: bytes) -> None:
        """Has a trace removed soon, of which nothing is written any more."""
        with self._pending_lock:
            self._dropped.append(trace_id)
        self._tell()

    def _tell(self) -> None:
        if not self._news.is_set():
            self._news.set()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Writes what is pending, within a few seconds."""
        self._closing.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            with suppress(sqlite3.Error):  # what could not be written has been told already
                self._connection.close()
            self._file_lock.release()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            self._news.wait()
            is_closing = self._closing.wait(DELAY_S)
            self._news.clear()
            self._write_pending()

    def _write_pending(self) -> None:
        while self._pending or self._dropped:
            self._write_batch(*self._take_batch())

    def _take_batch(self) -> tuple[list[tuple[bytes, KeptSpan]], list[bytes]]:
        """Spans, and traces to remove after them. A trace whose spans are not all in the batch waits."""
        with self._pending_lock:
            batch = [self._pending.popleft() for _ in range(min(BATCH_SPANS, len(self._pending)))]
            self._pending_bytes -= sum(_size_bytes(span) for _, span in batch)
            waiting = {trace_id for trace_id, _ in self._pending}
            dropped = [trace_id for trace_id in self._dropped if trace_id not in waiting]
            self._dropped = deque(
                (trace_id for trace_id in self._dropped if trace_id in waiting), maxlen=PENDING_SPANS
            )
            return batch, dropped

    def _write_batch(self, batch: list[tuple[bytes, KeptSpan]], dropped: list[bytes]) -> None:
        try:
            with self._connection:
                self._insert(batch)
                self._connection.executemany(
                    "DELETE FROM traces WHERE id = ?", [(trace_id,) for trace_id in dropped]
                )
                self._make_room()
        except sqlite3.Error as error:
            self.num_lost += len(batch)
            if not self._has_failed:
                log.error(
                    "traces cannot be written to %s, and are kept in memory only: %s", self._path, error
                )
            self._has_failed = True

    def _insert(self, batch: list[tuple[bytes, KeptSpan]]) -> None:
        connection = self._connection
        connection.executemany(
            "INSERT OR IGNORE INTO traces (id) VALUES (?)", [(trace_id,) for trace_id, _ in batch]
        )
        connection.executemany(_INSERT, [_row(trace_id, span) for trace_id, span in batch])
        connection.executemany(
            "UPDATE traces SET size_bytes = size_bytes + ? WHERE id = ?",
            [(_size_bytes(span), trace_id) for trace_id, span in batch],
        )

    def _make_room(self) -> None:
        """The newest traces that are within both bounds stay."""
        self._connection.execute(
            """
            DELETE FROM traces WHERE number IN (
                SELECT number FROM (
                    SELECT number, row_number() OVER newest AS place, sum(size_bytes) OVER newest AS size
                    FROM traces WINDOW newest AS (ORDER BY number DESC)
                ) WHERE place > ? OR size > ?
            )
            """,
            (self._num_traces, self._size_bytes),
        )


def _size_bytes(span: KeptSpan) -> int:
    """Here every span has its source beside it."""
    return span.size_bytes + len(span.source)


def _row(trace_id: bytes, span: KeptSpan) -> tuple[object, ...]:
    return (
        span.span_id,
        span.parent_id,
        span.request_id,
        span.start_ns,
        span.source,
        span.message,
        trace_id,
    )


def _locked(path: Path) -> FileLock:
    try:
        return FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError:
        raise TraceFileUnusable(f"trace file {path} is in use by another coordinator") from None
    except OSError as error:
        raise TraceFileUnusable(f"trace file {path} cannot be written: {error.strerror}") from error


def _opened(path: Path) -> sqlite3.Connection:
    try:
        create_private(path)
        connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise TraceFileUnusable(f"trace file {path} cannot be opened: {error}") from error
    try:
        _prepare(connection, path)
    except (sqlite3.Error, OSError) as error:
        connection.close()
        raise TraceFileUnusable(
            f"trace file {path} cannot be used: {error}; move it away to start without it"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    num_tables = _number(connection, "SELECT count(*) FROM sqlite_master")
    if num_tables:
        _check(connection, path)
    make_private(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")  # says now that it cannot be written, and not with a span
    if not num_tables:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if _number(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise TraceFileUnusable(f"{path} is no trace file, but a database of something else")
    if (version := _number(connection, "PRAGMA user_version")) != SCHEMA_VERSION:
        raise TraceFileUnusable(
            f"trace file {path} has version {version}; this coordinator knows version {SCHEMA_VERSION}"
        )
    [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise TraceFileUnusable(f"trace file {path} is damaged: {verdict.splitlines()[-1]}; move it away")


def _number(connection: sqlite3.Connection, query: str) -> int:
    [number] = connection.execute(query).fetchone()
    assert isinstance(number, int)
    return number
