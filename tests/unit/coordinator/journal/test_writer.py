"""Pending writes and retries while a journal cannot be written."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from coordinator.journal.journal import Journal
from coordinator.journal.records import Entry, JournalFailed, RequestProgress
from coordinator.journal.writer import JournalWriter
from coordinator.recovery.policy import DEFAULT_POLICY
from tests.unit.coordinator.journal.faulty_disk import FULL, FaultyDisk
from tests.unit.coordinator.journal.journals import IDENTITY, accepted_request, left_in, opened


class FakeJournal:
    """Probes succeed or fail at once, per `error`."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.written: list[str] = []
        self.num_probes = 0

    def write(self, what: str) -> None:
        if self.error is not None:
            raise self.failed(sqlite3.OperationalError(self.error))
        self.written.append(what)

    def probe(self) -> Future[None]:
        self.num_probes += 1
        future: Future[None] = Future()
        if self.error is None:
            future.set_result(None)
        else:
            future.set_exception(sqlite3.OperationalError(self.error))
        return future

    def reconnect(self) -> None:
        self.write("reconnected")

    def failed(self, error: BaseException) -> JournalFailed:
        return JournalFailed(f"journal j cannot be written: {error}")


class Written:
    """A writer over a journal with injected failures."""

    def __init__(self) -> None:
        self.journal = FakeJournal()
        self.changes: list[str | None] = []
        self.writer = JournalWriter(
            cast(Journal, self.journal),
            lambda: self.changes.append(self.writer.failure),
            DEFAULT_POLICY,
        )

    def write(self, what: str, *, key: str | None = None) -> None:
        self.writer.write(key or what, lambda: self.journal.write(what))


@pytest.fixture
def written() -> Written:
    return Written()


def test_pending_writes_are_written_in_order_after_an_outage(written: Written) -> None:
    written.write("a")
    written.journal.error = FULL
    for what in "bcd":
        written.write(what)
    assert written.writer.failure == f"journal j cannot be written: {FULL}"
    assert written.writer.num_waiting == 3
    written.journal.error = None
    written.write("e")
    assert written.journal.written == ["a"], "nothing overtakes what waits"
    written.writer.retry(0.0)
    written.writer.retry(0.1)
    assert written.journal.written == ["a", "reconnected", "b", "c", "d", "e"]
    assert written.changes == [f"journal j cannot be written: {FULL}", None]
    written.write("f")
    assert written.journal.written[-1] == "f"


def test_of_two_writes_with_one_key_the_later_is_kept(written: Written) -> None:
    written.journal.error = FULL
    for number in range(1000):
        written.write(f"deadline {number}", key="deadline")
        written.write(f"step {number}", key=f"step {number % 3}")
    assert written.writer.num_waiting == 4
    written.journal.error = None
    written.writer.retry(0.0)
    written.writer.retry(0.0)
    assert written.journal.written[1:] == ["step 997", "step 998", "deadline 999", "step 999"]


def test_probe_intervals_grow_and_reset_after_a_recovery(written: Written) -> None:
    def probed_at(until_s: int) -> list[int]:
        times = []
        for now_s in range(until_s):
            before = written.journal.num_probes
            written.writer.retry(float(now_s))
            times += [now_s] * (written.journal.num_probes - before)
        return times

    written.journal.error = FULL
    written.write("a")
    times = probed_at(60)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= DEFAULT_POLICY.max_journal_retry_s + 2, (
        "one sweep begins a probe, the next one takes its result"
    )
    written.journal.error = None
    written.writer.retry(100.0)
    written.writer.retry(100.0)
    assert written.writer.failure is None
    written.journal.error = FULL
    written.write("b")
    before = written.journal.num_probes
    written.writer.retry(101.0)
    assert written.journal.num_probes == before + 1


def test_a_write_that_fails_after_a_probe_that_succeeded_keeps_the_rest_waiting(written: Written) -> None:
    written.journal.error = FULL
    written.write("a")
    written.write("b")
    written.journal.error = None
    written.writer.retry(0.0)
    written.journal.error = "disk I/O error"
    written.writer.retry(0.0)
    assert written.writer.failure == "journal j cannot be written: disk I/O error"
    assert written.writer.num_waiting == 2


# With a real database


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    with pytest.MonkeyPatch.context() as patch:
        yield FaultyDisk(patch)


def test_a_request_that_could_not_be_forgotten_can_be_accepted_again(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    path, old, new = tmp_path / "j.db", accepted_request(), accepted_request()
    with opened(path) as journal:
        journal.accept(old)
        journal.accept(new)
        disk.error = FULL
        with pytest.raises(JournalFailed):
            journal.forget([old.request_id])
        assert journal.has(old.request_id), "its row is still there"
        disk.error = None
        again = accepted_request(old.request_id, num_tokens=1)
        journal.accept(again)
        assert journal.ids == [new.request_id, old.request_id]
    assert [request.accepted for request in left_in(path)] == [new, again]


def test_a_transaction_that_fails_at_its_end_leaves_none_open(tmp_path: Path, disk: FaultyDisk) -> None:
    path, accepted = tmp_path / "j.db", accepted_request()
    entry = Entry(request_id=accepted.request_id, choice=0, token=7)
    with opened(path) as journal:
        journal.accept(accepted)
        journal.add_step([entry], at=1.0)
        disk.error, disk.only = FULL, "COMMIT"
        with pytest.raises(JournalFailed):
            journal.compact([(accepted.request_id, RequestProgress())])
        disk.error = None
        journal.add_step([entry], at=2.0)
    [left] = left_in(path)
    assert left.progress.choices[0].tokens == [7, 7], "what was not compacted is not lost"


def test_a_checkpoint_that_fails_is_a_write_that_fails_and_a_probe_makes_up_for_it(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    path, accepted = tmp_path / "j.db", accepted_request(num_tokens=600_000)
    with opened(path) as journal:
        journal.accept(accepted)
        disk.error, disk.only = "disk I/O error", "wal_checkpoint"
        with pytest.raises(JournalFailed, match="disk I/O error"):
            trim_until_failed(journal)
        with pytest.raises(sqlite3.OperationalError):
            journal.probe().result()
        disk.error = None
        journal.probe().result()
        journal.reconnect()
        journal.trim()
        journal.forget([accepted.request_id])
    assert left_in(path) == []


def trim_until_failed(journal: Journal) -> None:
    """The checkpoint runs on another thread; a later call gets its outcome."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        journal.trim()


def test_another_program_that_locks_the_file_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with opened(path) as journal:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalFailed, match="database is locked"):
            journal.accept(accepted_request())
        [timeout_ms] = journal._connection.execute("PRAGMA busy_timeout").fetchone()
        assert timeout_ms <= 100
        other.execute("ROLLBACK")
        other.close()
        journal.accept(accepted_request())


def test_the_next_coordinator_ignores_entries_of_probes(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with opened(path) as journal:
        journal._connection.execute("INSERT INTO probe VALUES (1, zeroblob(10))")
    journal = Journal(path, IDENTITY)
    assert journal.epoch == 0
    journal.probe().result()
    journal.close()
