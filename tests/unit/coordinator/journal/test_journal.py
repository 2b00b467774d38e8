"""What a journal keeps, how long, and its errors when it cannot be used."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.journal import journal as module
from coordinator.journal.database import SCHEMA_VERSION, ServedIdentity
from coordinator.journal.journal import Journal
from coordinator.journal.records import (
    End,
    Entry,
    JournalFailed,
    JournalUnusable,
    RequestProgress,
    decode_progress,
    decode_tokens,
    encode_progress,
    encode_tokens,
)
from coordinator.scheduler.sequence import FinishReason
from tests.unit.coordinator.journal.journals import (
    IDENTITY,
    accepted_request,
    entries_of,
    left_in,
    opened,
)
from wire.ids import RequestId
from wire.steps import TokenLogprobs

SCORE = TokenLogprobs(7, -0.1, 2, ((8, -0.05), (7, -0.1)))


def test_accepted_requests_are_restored_unchanged(tmp_path: Path) -> None:
    path, first, second = tmp_path / "j.db", accepted_request(), accepted_request(num_tokens=1)
    entries = [
        Entry(request_id=first.request_id, choice=0, prompt_logprobs=(SCORE, SCORE)),
        Entry(request_id=first.request_id, choice=0, token=7, logprobs=SCORE, num_cached_tokens=2),
        Entry(request_id=first.request_id, choice=1, token=2**32 - 1, num_restarts=1),
    ]
    with opened(path) as journal:
        journal.accept(first)
        journal.accept(second)
        journal.add_step(entries[:2], at=2.5)
        journal.add_step(entries[2:], at=3.5)
        journal.set_deadline(second.request_id, 99.25)
        journal.end(second.request_id, End(4.5, "RequestCancelled", "was cancelled"))
        journal.set_epoch(17)
    with opened(path) as journal:
        one, two = journal.take_requests()
        assert journal.epoch == 17
    assert one.accepted == first
    assert one.progress.prompt_logprobs == [SCORE, SCORE]
    assert one.progress.choices[0].tokens == [7]
    assert one.progress.choices[0].logprobs == [SCORE]
    assert one.progress.choices[0].num_cached_tokens == 2
    assert one.progress.choices[1].tokens == [2**32 - 1]
    assert one.progress.choices[1].num_restarts == 1
    assert (one.progress.last_at, one.end) == (3.5, None)
    assert two.accepted.deadline_at == 99.25
    assert two.end == End(4.5, "RequestCancelled", "was cancelled")


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_restored(tokens: list[int]) -> None:
    assert decode_tokens(encode_tokens(tokens)) == tuple(tokens)


@given(st.lists(entries_of(RequestId(b""))))
def test_progress_is_restored(entries: list[Entry]) -> None:
    progress = RequestProgress()
    for at, entry in enumerate(entries):
        progress.add(entry, float(at))
    assert decode_progress(encode_progress(progress)) == progress


def test_old_steps_are_deleted_once_no_request_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_ROWS", 100)
    path = tmp_path / "j.db"
    live, gone = accepted_request(), accepted_request()
    progress, sizes = RequestProgress(), []
    with opened(path) as journal:
        journal.accept(live)
        journal.accept(gone)
        for at in range(3000):
            entry = Entry(request_id=live.request_id, choice=0, token=at, logprobs=SCORE)
            progress.add(entry, at)
            journal.add_step([entry], at=at)
            if at == 10:
                journal.forget([gone.request_id])
            if at % 50 == 49:
                if due := journal.due_to_compact():
                    assert due == [live.request_id]
                    journal.compact([(live.request_id, progress)])
                journal.trim()
                sizes.append(num_log_rows(path))
    assert max(sizes) <= 201
    [left] = left_in(path)
    assert left.progress == progress


def num_log_rows(path: Path) -> int:
    connection = sqlite3.connect(path)
    [number] = connection.execute("SELECT count(*) FROM log").fetchone()
    connection.close()
    return int(number)


def test_the_file_stays_small_however_many_requests_pass(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    sizes = []
    with opened(path) as journal:
        for number in range(2000):
            accepted = accepted_request(num_tokens=1000)
            journal.accept(accepted)
            journal.add_step([Entry(request_id=accepted.request_id, choice=0, token=1)], at=1.0)
            if number % 10 == 9:
                journal.forget(journal.ids[:-5])
                journal.trim()
                if (running := journal._checkpoints._running) is not None:
                    running.result()  # a loop that only writes is faster than the disk
                sizes.append(path.stat().st_size + Path(f"{path}-wal").stat().st_size)
    assert max(sizes[100:]) < 1.5 * max(sizes[:100])
    assert path.stat().st_size < 400_000


def test_two_coordinators_never_have_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with opened(path) as journal:
        journal.accept(accepted_request())
        with pytest.raises(JournalUnusable, match=r"j\.db is in use by another coordinator$"):
            Journal(path, IDENTITY)
        journal.accept(accepted_request())
    assert len(left_in(path)) == 2


@pytest.mark.parametrize(
    ("identity", "text"),
    [(ServedIdentity("0" * 32, "f32"), "0{32} in f32"), (ServedIdentity("f" * 32, "bf16"), "f{32} in bf16")],
)
def test_a_journal_of_another_model_is_rejected_and_unchanged(
    tmp_path: Path, identity: ServedIdentity, text: str
) -> None:
    path = tmp_path / "j.db"
    with opened(path) as journal:
        journal.accept(accepted_request())
    before = path.read_bytes()
    with pytest.raises(JournalUnusable, match=rf"j\.db is of another model: f{{32}} in f32, not {text}$"):
        Journal(path, identity)
    assert path.read_bytes() == before
    assert len(left_in(path)) == 1


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_journal_of_another_version_is_rejected_and_unchanged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "j.db"
    opened_once(path)
    change(path, f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(
        JournalUnusable,
        match=f"has version {version}, this coordinator supports version {SCHEMA_VERSION}: "
        "finish its requests with the release that wrote it, or move it away to start without it$",
    ):
        Journal(path, IDENTITY)
    assert path.read_bytes() == before


def test_a_foreign_database_is_rejected_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    change(path, "CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(JournalUnusable, match=r"j\.db is another program's database, not a journal$"):
        Journal(path, IDENTITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["no database at all", "a torn page", "entries that are no JSON"])
def test_a_damaged_file_is_rejected_by_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "j.db"
    if damage == "no database at all":
        path.write_bytes(b"once upon a time" * 100)
    else:
        with opened(path) as journal:
            journal.accept(accepted := accepted_request(num_tokens=5000))
            journal.add_step([Entry(request_id=accepted.request_id, choice=0, token=1)], at=1.0)
    if damage == "a torn page":
        data = bytearray(path.read_bytes())
        for page in range(2 * 4096, len(data), 4096):
            data[page : page + 64] = b"\xff" * 64
        path.write_bytes(data)
    if damage == "entries that are no JSON":
        change(path, "UPDATE log SET entries = '[['")
    with pytest.raises(
        JournalUnusable, match=r"j\.db is damaged: .*; move it away with its -wal file to start without it$"
    ):
        Journal(path, IDENTITY)


@pytest.mark.parametrize("place", ["is/not/there.db", "."])
def test_an_unwritable_path_is_rejected(tmp_path: Path, place: str) -> None:
    with pytest.raises(JournalUnusable, match="cannot be written: "):
        Journal(tmp_path / place, IDENTITY)


def test_a_rejected_journal_can_be_opened_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    opened_once(path)
    with pytest.raises(JournalUnusable):
        Journal(path, ServedIdentity("0" * 32, "f32"))
    opened_once(path)


def test_a_full_disk_is_an_error_and_keeps_earlier_writes(tmp_path: Path) -> None:
    path, accepted = tmp_path / "j.db", accepted_request()
    with opened(path) as journal:
        journal.accept(accepted)
        fill_disk(journal)
        with pytest.raises(JournalFailed, match=r"j\.db cannot be written: database or disk is full$"):
            journal.accept(accepted_request(num_tokens=100_000))
    [left] = left_in(path)
    assert left.accepted == accepted


def test_a_finished_request_has_its_reason() -> None:
    progress = RequestProgress()
    entry = Entry(request_id=RequestId(b""), choice=0, token=1, finish_reason=FinishReason.LENGTH)
    progress.add(entry, 1.0)
    assert progress.choices[0].finish_reason is FinishReason.LENGTH


def fill_disk(journal: Journal) -> None:
    """The file may not grow further."""
    [pages] = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")


def opened_once(path: Path) -> None:
    with opened(path):
        pass


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_the_next_coordinator_reads_that_the_journal_has_served(tmp_path: Path) -> None:
    with opened(tmp_path / "j.db") as journal:
        assert not journal.has_served
        journal.set_served()
        journal.set_served()
        assert journal.has_served
    with opened(tmp_path / "j.db") as journal:
        assert journal.has_served
