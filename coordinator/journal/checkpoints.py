"""Moves what is committed from the log that SQLite writes ahead into the file, beside the event loop."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from coordinator.journal.database import connect

EVERY_WRITES = 512
"""Writes between two checkpoints: some 2 MiB of pages."""


class Checkpoints:
    """One at a time, on a thread and a connection of its own; writers go on meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._running: Future[None] | None = None
        self._num_writes = 0

    def note_write(self) -> None:
        """One more transaction is in the log."""
        self._num_writes += 1

    def run_if_due(self) -> None:
        """Begins a checkpoint if there is enough to do. Raises sqlite3.Error if the last one failed."""
        if self._running is not None:
            if not self._running.done():
                return
            running, self._running = self._running, None
            running.result()
        if self._num_writes >= EVERY_WRITES:
            self._num_writes = 0
            self._running = self._thread.submit(self._checkpoint)

    def close(self) -> None:
        """Waits for the one that runs."""
        self._thread.shutdown()

    def _checkpoint(self) -> None:
        with closing(connect(self._path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
