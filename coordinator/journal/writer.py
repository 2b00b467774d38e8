"""Writes the journal; queues writes while it cannot be written, and retries."""

import logging
import sqlite3
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from coordinator.journal.journal import Journal
from coordinator.journal.records import JournalFailed
from coordinator.recovery.policy import RecoveryPolicy

log = logging.getLogger(__name__)


class JournalWriter:
    """Writes immediately, or, after a failure (`failure`), queues writes until a probe succeeds.

    The queue is bounded by the number of distinct keys: a later write replaces an earlier one.
    """

    def __init__(self, journal: Journal, on_change: Callable[[], None], policy: RecoveryPolicy) -> None:
        """`on_change` is called after `failure` was set or cleared."""
        self.failure: str | None = None
        self._journal = journal
        self._on_change = on_change
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._probe: Future[None] | None = None
        self._next_probe_s = 0.0
        self._policy = policy
        self._pause_s = policy.journal_retry_s

    @property
    def num_waiting(self) -> int:
        """Number of queued writes."""
        return len(self._waiting)

    def write(self, key: Hashable, write: Callable[[], None]) -> None:
        """Call `write` now, or once the journal can be written again."""
        if not self.try_write(write):
            self._waiting.pop(key, None)
            self._waiting[key] = write

    def try_write(self, write: Callable[[], None]) -> bool:
        """Call `write` if the journal can be written. Returns whether it succeeded."""
        if self.failure is not None:
            return False
        try:
            write()
        except JournalFailed as error:
            self._fail(error)
            return False
        return True

    def retry(self, now_s: float) -> None:
        """Probe, and write the queue after success; to be called periodically. Does not block."""
        if self.failure is None:
            return
        if self._probe is None:
            if now_s >= self._next_probe_s:
                self._probe = self._journal.probe()
            return
        if not self._probe.done():
            return
        probe, self._probe = self._probe, None
        try:
            self._recover(probe)
        except JournalFailed as error:
            self.failure = str(error)
            self._next_probe_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._policy.max_journal_retry_s)

    def flush(self) -> None:
        """Try to write the queue now, without a probe."""
        try:
            self._write_waiting()
        except JournalFailed as error:
            log.error("failed to write %d journal records: %s", len(self._waiting), error)

    def _recover(self, probe: Future[None]) -> None:
        """Raises JournalFailed."""
        try:
            probe.result()
        except sqlite3.Error as error:
            raise self._journal.failed(error) from error
        self._journal.reconnect()
        num_waiting = len(self._waiting)
        self._write_waiting()
        self.failure, self._next_probe_s, self._pause_s = None, 0.0, self._policy.journal_retry_s
        log.info("journal recovered: wrote %d records, accepting new requests", num_waiting)
        self._on_change()

    def _write_waiting(self) -> None:
        for key in list(self._waiting):
            self._waiting[key]()
            del self._waiting[key]

    def _fail(self, error: JournalFailed) -> None:
        self.failure = str(error)
        log.error("%s: rejecting new requests, pausing running ones until it recovers", error)
        self._on_change()
