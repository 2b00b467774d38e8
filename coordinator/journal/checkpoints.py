"""Moves what is committed from the log that SQLite writes ahead into the file, beside the event loop."""

import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from coordinator.journal.database import connect

PAGE_BYTES = 4096
PROBE_BYTES = 256 * 1024
"""Room that a journal needs to be written again after a failure: enough for some requests and steps."""
EVERY_PAGES = 512
MOST_PAGES = 4096
"""Beyond 16 MiB, writers wait for the log to be emptied: it begins anew only when nothing is left in it."""


class Checkpoints:
    """One at a time, on a thread and a connection of its own; the writer goes on meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._running: Future[int] | None = None
        self._num_pages = 0

    def note_write(self, size_bytes: int) -> None:
        """One more transaction is in the log, with so many bytes of values."""
        self._num_pages += 2 + size_bytes // PAGE_BYTES

    def run_if_due(self, writer: sqlite3.Connection) -> None:
        """Begins a checkpoint if there is enough to do. Raises sqlite3.Error, also for the one before."""
        if self._running is not None:
            if not self._running.done():
                return
            running, self._running = self._running, None
            if running.result() > MOST_PAGES:
                writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        if self._num_pages >= EVERY_PAGES:
            self._num_pages = 0
            self._running = self._thread.submit(self._checkpoint)

    def probe(self) -> Future[None]:
        """Writes and deletes `PROBE_BYTES`, and empties the log, on the thread. Its future raises
        sqlite3.Error while that is not possible.
        """
        self._running = None
        return self._thread.submit(self._probe)

    def close(self) -> None:
        """Waits for the one that runs."""
        self._thread.shutdown()

    def _probe(self) -> None:
        with closing(connect(self._path)) as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?))", (PROBE_BYTES,))
            connection.execute("DELETE FROM meta WHERE key = 'probe'")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _checkpoint(self) -> int:
        """Returns how many pages the log has."""
        with closing(connect(self._path)) as connection:
            _, num_pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return int(num_pages)
