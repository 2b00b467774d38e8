"""Traces survive the coordinator in a file, which never stops it from serving."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.observability import trace_file
from coordinator.observability.trace_file import TraceFile, TraceFileUnusable
from coordinator.observability.trace_store import StoreLimits, TraceStore
from tests.otlp_spans import SpanMaker
from tests.unit.coordinator.observability.trace_batches import batch, read, request, request_id

LIMITS = StoreLimits(num_traces=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "DELAY_S", 0.0)


def opened(path: Path, limits: StoreLimits = LIMITS) -> TraceStore:
    return TraceStore(limits, TraceFile(path, num_traces=limits.num_traces, size_bytes=limits.size_bytes))


def written(path: Path, *numbers: int, limits: StoreLimits = LIMITS) -> TraceStore:
    """A store that has kept these requests and is closed."""
    store = opened(path, limits)
    for number in numbers:
        store.add(batch(number))
    store.close()
    return store


def kept(store: TraceStore) -> list[str]:
    return [found.request_id for found in store.recent()]


@pytest.fixture
def reopened(path: Path) -> Iterator[TraceStore]:
    written(path, 1, 2)
    store = opened(path)
    yield store
    store.close()


def test_the_next_coordinator_has_what_the_former_one_kept(reopened: TraceStore) -> None:
    assert kept(reopened) == [request_id(2), request_id(1)]
    assert read(reopened.find(request_id(1))) == request(1).trace()
    assert reopened.counts.taken == 0


def test_spans_that_come_after_the_restart_join_theirs(path: Path) -> None:
    first, *rest = batch(1)
    store = opened(path)
    store.add([first])
    store.close()
    store = opened(path)
    store.add([first, *rest])
    store.close()
    assert store.counts.repeated == 1
    again = opened(path)
    assert read(again.find(request_id(1))) == request(1).trace()
    again.close()


def test_the_file_keeps_as_many_traces_as_the_store(path: Path) -> None:
    written(path, *range(1, 8))
    assert _count(path, "traces") == 3
    assert _count(path, "spans") == 3 * 10
    store = opened(path)
    assert kept(store) == [request_id(7), request_id(6), request_id(5)]
    store.close()


def test_the_file_keeps_as_many_bytes_as_the_store(path: Path) -> None:
    memory = TraceStore()
    memory.add(batch(1))
    spans = memory.find(request_id(1)).spans
    limits = StoreLimits(size_bytes=2 * sum(span.size_bytes + len(span.source) for span in spans))
    written(path, *range(1, 8), limits=limits)
    assert _count(path, "traces") == 2


def test_a_trace_that_made_room_in_the_store_leaves_the_file(path: Path) -> None:
    limits = StoreLimits(num_traces=4)
    store = opened(path, limits)
    for number in range(1, 5):
        store.add(batch(number))
    for number in range(100, 120):
        refused = SpanMaker(
            request_id=request_id(number), trace_id=number.to_bytes(16, "big"), outcome="failed"
        )
        refused.root(0.0, error="the queue is full")
        store.add(refused.spans)
    before = kept(store)
    store.close()
    assert len(before) == 4
    assert {request_id(2), request_id(3), request_id(4)} < set(before)
    store = opened(path, limits)
    assert sorted(kept(store)) == sorted(before)
    store.add(batch(5))
    store.add(batch(6))
    store.add(batch(7))
    assert kept(store)[:3] == [request_id(7), request_id(6), request_id(5)]
    store.close()


def test_smaller_bounds_hold_for_what_is_there_already(path: Path) -> None:
    written(path, 1, 2, 3)
    store = opened(path, StoreLimits(num_traces=1))
    assert kept(store) == [request_id(3)]
    store.add(batch(4))
    store.close()
    assert _count(path, "traces") == 1


def test_a_file_that_is_in_use_is_refused(path: Path) -> None:
    store = opened(path)
    with pytest.raises(TraceFileUnusable, match=f"trace file {path} is in use by another coordinator"):
        opened(path)
    store.close()
    opened(path).close()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileUnusable, match="cannot be written: No such file or directory"):
        opened(tmp_path / "missing" / "traces.db")


def test_a_file_that_is_no_database_is_refused_and_unchanged(path: Path) -> None:
    path.write_text("my notes, which nobody may overwrite " * 100)
    before = path.read_bytes()
    with pytest.raises(TraceFileUnusable, match=r"cannot be used: file is not a database; move it away"):
        opened(path)
    assert path.read_bytes() == before


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(TraceFileUnusable, match="is no trace file, but a database of something else"):
        opened(path)


def test_a_file_of_another_version_is_refused(path: Path) -> None:
    written(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(TraceFileUnusable, match="has version 99; this coordinator knows version 1"):
        opened(path)


def test_a_write_that_fails_is_counted_and_told_once_and_nothing_else_happens(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(path, num_traces=3, size_bytes=10**6)
    store = TraceStore(LIMITS, file)
    with closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE spans")
    for number in (1, 2):
        store.add(batch(number))
    store.close()
    assert file.num_lost == store.num_unwritten == 20
    (record,) = caplog.records
    assert record.getMessage() == (
        f"traces cannot be written to {path}, and are kept in memory only: no such table: spans"
    )
    assert kept(store) == [request_id(2), request_id(1)]


def test_what_cannot_be_written_fast_enough_is_lost_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "PENDING_SPANS", 4)
    monkeypatch.setattr(trace_file, "DELAY_S", 60.0)
    file = TraceFile(path, num_traces=3, size_bytes=10**6)
    store = TraceStore(LIMITS, file)
    store.add(batch(1))
    assert file.num_lost == 6
    assert len(store.find(request_id(1)).spans) == 10
    store.close()
    assert _count(path, "spans") == 4


def _count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        [number] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert isinstance(number, int)
    return number
