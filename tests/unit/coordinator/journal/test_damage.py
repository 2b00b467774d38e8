"""A damaged journal is rejected and left as it was; the ends of logs that crashes leave are not damage."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coordinator.journal.database import JournalFile
from coordinator.journal.journal import Journal
from coordinator.journal.records import End, Entry, JournalledRequest, JournalUnusable, RequestProgress
from coordinator.scheduler.sequence import FinishReason
from tests.unit.coordinator.journal.journals import (
    IDENTITY,
    accepted_request,
    crashed,
    host_clocks,
    left_in,
    opened,
)
from wire.ids import RequestId

HEADER_BYTES, FRAME_BYTES = 32, 24 + 4096
NOW = host_clocks(lambda: 1000.0)
AFTER_POWER_LOSS = host_clocks(lambda: 1000.0, boot_id="another boot")
NUM_STEPS = 30


def write_some(journal: Journal) -> list[RequestId]:
    """Rows in every table."""
    ids = [RequestId(bytes([number] * 16)) for number in range(1, 5)]
    for request_id in ids:
        journal.accept(accepted_request(request_id))
    for step in range(NUM_STEPS):
        journal.add_step([Entry(request_id, 0, 100 + step) for request_id in ids[:3]], at=float(step))
    progress = RequestProgress()
    for step in range(NUM_STEPS):
        progress.add(Entry(ids[0], 0, 100 + step), float(step))
    journal.compact([(ids[0], progress)])
    journal.set_deadline(ids[1], 77.0)
    journal.end(ids[3], End(4.5, "RequestCancelled", "was cancelled"))
    journal.set_epoch(17)
    journal.set_served()
    journal.add_step([Entry(ids[1], 0, 7, finish_reason=FinishReason.LENGTH)], at=99.0)
    return ids


@pytest.fixture(scope="module")
def after_kill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a killed coordinator leaves: a log with all that it has written since its start."""
    directory = tmp_path_factory.mktemp("killed")
    journal = Journal(directory / "j.db", IDENTITY, NOW)
    write_some(journal)
    left = crashed(directory / "j.db", directory / "left")
    journal.close()
    return left


@pytest.fixture(scope="module")
def after_stop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a stopped coordinator leaves, without a log."""
    directory = tmp_path_factory.mktemp("stopped")
    journal = Journal(directory / "j.db", IDENTITY, NOW)
    write_some(journal)
    journal.close()
    return directory / "j.db"


def contents(path: Path, clocks: object = NOW) -> list[JournalledRequest]:
    assert clocks is NOW or clocks is AFTER_POWER_LOSS
    journal = Journal(path, IDENTITY, AFTER_POWER_LOSS if clocks is AFTER_POWER_LOSS else NOW)
    try:
        return journal.take_requests()
    finally:
        journal.close()


def files(path: Path) -> dict[str, bytes]:
    return {
        suffix: file.read_bytes() for suffix in ("", "-wal") if (file := Path(f"{path}{suffix}")).exists()
    }


def copy(path: Path, into: Path, change: Callable[[bytearray], None] | None, *, suffix: str = "-wal") -> Path:
    """A copy of the files, one of them changed."""
    into.mkdir()
    for name, content in files(path).items():
        changed = bytearray(content)
        if name == suffix and change is not None:
            change(changed)
        (into / f"{path.name}{name}").write_bytes(changed)
    return into / path.name


def assert_rejected(path: Path, text: str) -> None:
    """Rejected with the reason and the remedy, its files unchanged."""
    before = files(path)
    with pytest.raises(JournalUnusable, match=rf"j\.db is damaged: .*{text}.*; move it away with its -wal"):
        contents(path)
    assert files(path) == before


def test_an_undamaged_copy_is_restored(after_kill: Path, after_stop: Path, tmp_path: Path) -> None:
    killed = contents(copy(after_kill, tmp_path / "killed", None))
    assert killed == contents(copy(after_stop, tmp_path / "stopped", None))
    assert [len(request.progress.choices[0].tokens) for request in killed[:3]] == [30, 31, 30]


@pytest.mark.parametrize("num_bits", [1, 3, 60])
@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_flipped_bits_never_change_what_is_restored(
    after_kill: Path, after_stop: Path, tmp_path: Path, suffix: str, num_bits: int
) -> None:
    source = after_kill if suffix else after_stop
    expected = contents(copy(source, tmp_path / "whole", None))
    num_rejected = 0
    for seed in range(40):
        random = Random(f"{suffix} {num_bits} {seed}")

        def flip(data: bytearray, random: Random = random) -> None:
            for _ in range(num_bits):
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)

        path = copy(source, tmp_path / str(seed), flip, suffix=suffix)
        before = files(path)
        try:
            restored = contents(path)
        except JournalUnusable:
            num_rejected += 1
            assert files(path) == before
        else:
            assert restored == expected, seed
    assert num_rejected == 40 if suffix else num_rejected > 0  # free space of a database has no meaning


@pytest.mark.parametrize("frame", [0, 1, 20, -2, -1])
@pytest.mark.parametrize("place", ["page number", "salts", "checksum", "page"])
def test_a_flipped_bit_in_any_part_of_a_frame_is_damage(
    after_kill: Path, tmp_path: Path, frame: int, place: str
) -> None:
    offset = {"page number": 3, "salts": 10, "checksum": 20, "page": 24 + 4000}[place]

    def flip(log: bytearray) -> None:
        begins = range(HEADER_BYTES, len(log), FRAME_BYTES)
        log[begins[frame] + offset] ^= 1

    assert_rejected(copy(after_kill, tmp_path / "flipped", flip), r"frame \d+ of \d+ in its log is invalid")


@pytest.mark.parametrize("salt", [8, 12])
@pytest.mark.parametrize("frame", [-2, -1])
def test_a_frame_with_a_damaged_salt_and_a_damaged_page_is_damage(
    after_kill: Path, tmp_path: Path, frame: int, salt: int
) -> None:
    def flip(log: bytearray) -> None:
        begin = range(HEADER_BYTES, len(log), FRAME_BYTES)[frame]
        log[begin + salt] ^= 1
        log[begin + 24 + 4000] ^= 1

    assert_rejected(copy(after_kill, tmp_path / "flipped", flip), r"frame \d+ of \d+ in its log is invalid")


@pytest.mark.parametrize("salts", [b"", b"unknown!"])
def test_a_last_commit_whose_number_of_pages_was_zeroed_is_damage(
    after_kill: Path, tmp_path: Path, salts: bytes
) -> None:
    def change(log: bytearray) -> None:
        begin = last_commit(log)
        log[begin + 4 : begin + 8] = bytes(4)
        log[begin + 8 : begin + 8 + len(salts)] = salts

    path = copy(after_kill, tmp_path / "zeroed", change)
    assert_rejected(path, r"in its log is invalid")
    with pytest.raises(JournalUnusable, match="in its log is invalid"):
        contents(path, AFTER_POWER_LOSS)


def test_a_damaged_commit_before_frames_of_a_transaction_without_its_commit_is_damage(
    after_kill: Path, tmp_path: Path
) -> None:
    def flip_and_append(log: bytearray) -> None:
        begin = last_commit(log)
        log += (3).to_bytes(4, "big") + bytes(4) + log[16:24] + bytes(8) + b"\x55" * 4096
        log[begin + 8] ^= 1
        log[begin + 24 + 4000] ^= 1

    assert_rejected(copy(after_kill, tmp_path / "x", flip_and_append), "in its log is invalid")


@pytest.mark.parametrize("num_bytes", [None, 0, 31, HEADER_BYTES, HEADER_BYTES + FRAME_BYTES - 1])
def test_a_journal_that_was_not_closed_and_whose_log_is_missing_is_damage_under_the_same_boot(
    after_kill: Path, tmp_path: Path, num_bytes: int | None
) -> None:
    path = crashed(after_kill, tmp_path / "lost", wal_bytes=num_bytes)
    if num_bytes is None:
        Path(f"{path}-wal").unlink()
    assert_rejected(path, r"its log j\.db-wal is missing or empty")
    assert contents(path, AFTER_POWER_LOSS) == []


def test_a_missing_log_is_damage_after_checkpoints_too(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    journal = Journal(path, IDENTITY, NOW)
    [request_id, *_] = write_some(journal)
    for step in range(1200):
        journal.add_step([Entry(request_id, 0, step)], at=float(step))
        journal.trim()
    left = crashed(path, tmp_path / "left")
    journal.close()
    Path(f"{left}-wal").unlink()
    assert_rejected(left, r"its log j\.db-wal is missing or empty")


def test_a_hard_link_does_not_hide_the_log_of_a_killed_coordinator(after_kill: Path, tmp_path: Path) -> None:
    path = copy(after_kill, tmp_path / "x", None)
    link = tmp_path / "x" / "hard.db"
    os.link(path, link)
    for clocks in (NOW, AFTER_POWER_LOSS):
        with pytest.raises(JournalUnusable, match=r"hard\.db-wal is missing .* 2 names .* by the name with"):
            contents(link, clocks)
    assert len(contents(path)) == 4
    assert len(contents(link)) == 4, "after an orderly stop"


def test_a_killed_journal_that_another_program_has_opened_is_not_damage(
    after_kill: Path, tmp_path: Path
) -> None:
    path = copy(after_kill, tmp_path / "x", None)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT count(*) FROM log").fetchone()
    assert not Path(f"{path}-wal").exists()
    assert len(contents(path)) == 4


def test_every_state_between_the_writes_of_a_start_and_a_stop_can_be_continued(tmp_path: Path) -> None:
    """Copies before each statement that SQLite executes: what a kill there leaves."""
    path, copies = tmp_path / "j.db", list[Path]()
    with opened(path) as journal:
        journal.accept(accepted_request())
    real = sqlite3.connect

    class Recording(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
            if not self.in_transaction:
                copies.append(crashed(path, tmp_path / str(len(copies))))
            return super().execute(sql, parameters)

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return real(*arguments, factory=Recording, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        with opened(path) as journal:
            journal.accept(accepted_request())
            journal.probe().result()
            journal.reconnect()
            journal.set_epoch(3)
    assert len(copies) > 20
    counts = [len(left_in(each)) for each in copies]
    assert counts == sorted(counts)
    assert {counts[0], counts[-1]} == {1, 2}


def test_a_flipped_bit_in_the_header_of_the_log_is_damage(after_kill: Path, tmp_path: Path) -> None:
    for offset in range(HEADER_BYTES):

        def flip(log: bytearray, offset: int = offset) -> None:
            log[offset] ^= 16

        assert_rejected(copy(after_kill, tmp_path / str(offset), flip), "header of its log")


def test_a_log_without_its_database_is_damage(after_kill: Path, tmp_path: Path) -> None:
    path = copy(after_kill, tmp_path / "empty", bytearray.clear, suffix="")
    assert_rejected(path, "it is empty or missing, but its log has")
    path.unlink()
    assert_rejected(path, "it is empty or missing, but its log has")


@pytest.mark.parametrize("table", ["meta", "requests", "deadlines", "ends", "progress", "log"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_missing_row_is_damage(after_stop: Path, tmp_path: Path, table: str, which: str) -> None:
    path = copy(after_stop, tmp_path / "x", None)
    function = "min" if which == "first" else "max"
    change(path, f"DELETE FROM {table} WHERE rowid = (SELECT {function}(rowid) FROM {table})")
    assert_rejected(path, "rows are missing or outdated")


def test_the_number_of_a_missing_step_is_named(after_stop: Path, tmp_path: Path) -> None:
    path = copy(after_stop, tmp_path / "x", None)
    change(path, "DELETE FROM log WHERE number = 7")
    assert_rejected(path, "row 7 of table log is missing: the next one is row 8")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET entries = replace(entries, '105', '106')",
        "UPDATE log SET at = at + 1 WHERE number = 3",
        "UPDATE log SET number = 100 WHERE number = 31",
        "UPDATE requests SET prompt = x'00000000' WHERE number = 2",
        "UPDATE requests SET client = '' WHERE number = 2",
        "UPDATE requests SET attach_digest = x'00' WHERE number = 2",
        "UPDATE deadlines SET deadline_at = NULL",
        "UPDATE ends SET kind = 'ServingError'",
        "UPDATE progress SET output = replace(output, '105', '106')",
        "UPDATE meta SET value = 16 WHERE key = 'epoch'",
    ],
)
def test_a_changed_value_is_damage(after_stop: Path, tmp_path: Path, statement: str) -> None:
    path = copy(after_stop, tmp_path / "x", None)
    change(path, statement)
    assert_rejected(path, "does not match its checksum")


def test_an_older_version_of_a_row_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with opened(path) as journal:
        journal.set_epoch(1)
    with closing(sqlite3.connect(path)) as connection:
        [old] = connection.execute("SELECT key, value, checksum FROM meta WHERE key = 'epoch'").fetchall()
    with opened(path) as journal:
        journal.set_epoch(2)
    change(path, f"UPDATE meta SET value = {old[1]}, checksum = {old[2]} WHERE key = 'epoch'")
    assert_rejected(path, "rows are missing or outdated")


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement).rowcount > 0
        connection.commit()


def test_a_log_cut_anywhere_restores_what_was_committed_before(after_kill: Path, tmp_path: Path) -> None:
    num_bytes = Path(f"{after_kill}-wal").stat().st_size
    sizes = [*range(HEADER_BYTES + FRAME_BYTES, num_bytes - 100, 25_000), num_bytes - 100]
    whole = contents(copy(after_kill, tmp_path / "whole", None))
    restored = [contents(crashed(after_kill, tmp_path / str(size), wal_bytes=size)) for size in sizes]
    for requests in restored:
        for request, left in zip(whole, requests, strict=False):  # a shorter log may have fewer
            assert left.accepted == replace(request.accepted, deadline_at=left.accepted.deadline_at)
            assert tokens_of(left) == tokens_of(request)[: len(tokens_of(left))]
    counts = [(len(requests), sum(len(tokens_of(each)) for each in requests)) for requests in restored]
    assert counts == sorted(counts)
    assert counts[0] == (0, 0)
    assert counts[-1] == (4, 3 * NUM_STEPS), "all but the last step, of which 100 bytes are missing"
    assert len(set(counts)) > 5


def tokens_of(request: JournalledRequest) -> list[int]:
    return [token for choice in request.progress.choices.values() for token in choice.tokens]


def last_commit(log: bytes) -> int:
    """Where the last frame begins; it ends a transaction."""
    begin = len(log) - FRAME_BYTES
    assert int.from_bytes(log[begin + 4 : begin + 8], "big") > 0
    return begin


def test_a_commit_that_was_cut_off_while_it_overwrote_a_former_log_is_not_damage(
    after_kill: Path, tmp_path: Path
) -> None:
    def tear(log: bytearray) -> None:
        begin = last_commit(log)
        log[begin + 1000 :] = b"\x55" * (FRAME_BYTES - 1000) + former_frame(log)

    assert len(contents(copy(after_kill, tmp_path / "torn", tear))) == 4


def former_frame(log: bytes) -> bytes:
    """A frame of the log before this one."""
    count = (int.from_bytes(log[16:20], "big") - 1) % 2**32
    return (3).to_bytes(4, "big") + bytes(4) + count.to_bytes(4, "big") + b"\x55" * (FRAME_BYTES - 12)


def test_blocks_that_a_power_failure_left_unwritten_are_not_damage_after_it(
    after_kill: Path, tmp_path: Path
) -> None:
    def lose_block(log: bytearray) -> None:
        begin = len(log) // 2 // 4096 * 4096
        log[begin : begin + 4096] = bytes(4096)

    restored = contents(copy(after_kill, tmp_path / "power", lose_block), AFTER_POWER_LOSS)
    assert 0 < len(restored) <= 4
    assert_rejected(copy(after_kill, tmp_path / "same-boot", lose_block), "in its log is invalid")


def test_a_flipped_bit_is_damage_after_a_power_failure_too(after_kill: Path, tmp_path: Path) -> None:
    def flip(log: bytearray) -> None:
        log[len(log) // 2] ^= 1

    path = copy(after_kill, tmp_path / "x", flip)
    with pytest.raises(JournalUnusable, match="in its log is invalid"):
        contents(path, AFTER_POWER_LOSS)


@dataclass(frozen=True)
class RestartedLog:
    """Files after a kill whose log began again after a checkpoint, and the former log's content."""

    path: Path
    former: bytes
    num_before: int
    """Tokens of the third request at the checkpoint."""

    def with_block(self, into: Path, number: int, kept: int, rest: bytes) -> Path:
        """A copy whose block has its first `kept` bytes, and then those of `rest`, a file's content."""

        def lose(log: bytearray) -> None:
            begin, end = number * 4096 + kept, (number + 1) * 4096
            log[begin:end] = rest[begin:end]

        return copy(self.path, into, lose)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> RestartedLog:
    directory = tmp_path_factory.mktemp("restarted")
    journal = Journal(directory / "j.db", IDENTITY, NOW)
    ids = write_some(journal)
    with closing(sqlite3.connect(directory / "j.db")) as connection:
        _, num_pages, num_done = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert num_pages == num_done > 10
    former = Path(f"{directory / 'j.db'}-wal").read_bytes()
    for step in range(10):
        journal.add_step([Entry(ids[2], 0, step)], at=float(step))
    left = crashed(directory / "j.db", directory / "left")
    journal.close()
    log = Path(f"{left}-wal").read_bytes()
    assert HEADER_BYTES + 10 * FRAME_BYTES < len(log) < len(former)
    assert int.from_bytes(log[16:20], "big") == (int.from_bytes(former[16:20], "big") + 1) % 2**32
    return RestartedLog(left, former, NUM_STEPS)


@pytest.mark.parametrize(
    ("number", "kept"),
    [(0, HEADER_BYTES), (1, 0), (2, 0), (3, 0), (3, HEADER_BYTES + 3 * FRAME_BYTES - 3 * 4096)],
)
def test_blocks_of_a_former_log_that_were_not_written_over_are_not_damage_after_a_power_failure(
    restarted: RestartedLog, tmp_path: Path, number: int, kept: int
) -> None:
    path = restarted.with_block(tmp_path / "power", number, kept, restarted.former)
    assert_continued(path, restarted.num_before)
    path = restarted.with_block(tmp_path / "same-boot", number, kept, restarted.former)
    assert_rejected(path, "in its log is invalid")


def test_a_block_that_was_written_when_the_log_was_shorter_is_not_damage_after_a_power_failure(
    restarted: RestartedLog, tmp_path: Path
) -> None:
    kept, zeros = HEADER_BYTES + 3 * FRAME_BYTES - 3 * 4096, bytes(4 * 4096)
    path = restarted.with_block(tmp_path / "power", 3, kept, zeros)
    assert_continued(path, restarted.num_before)
    assert_rejected(restarted.with_block(tmp_path / "same-boot", 3, kept, zeros), "in its log is invalid")


def assert_continued(path: Path, num_tokens: int) -> None:
    """All requests, the third one with some of the ten steps behind the checkpoint, but not all."""
    tokens = [tokens_of(request) for request in contents(path, AFTER_POWER_LOSS)]
    assert len(tokens) == 4
    steps = tokens[2][num_tokens:]
    assert len(tokens[2]) >= num_tokens
    assert steps == list(range(len(steps)))
    assert len(steps) < 10


@pytest.mark.parametrize("num_bits", [1, 3, 60])
def test_flipped_bits_in_a_log_that_began_again_are_damage_after_a_power_failure_too(
    restarted: RestartedLog, tmp_path: Path, num_bits: int
) -> None:
    for seed in range(40):
        random = Random(f"{num_bits} {seed}")

        def flip(log: bytearray, random: Random = random) -> None:
            for _ in range(num_bits):
                # A last commit that is wrong is lost after a power failure, if a sector in it has no content.
                log[random.randrange(len(log) - FRAME_BYTES)] ^= 1 << random.randrange(8)

        path = copy(restarted.path, tmp_path / str(seed), flip)
        before = files(path)
        with pytest.raises(JournalUnusable, match="is damaged"):
            contents(path, AFTER_POWER_LOSS)
        assert files(path) == before


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
def test_one_salt_of_the_former_log_is_damage_after_a_power_failure_too(
    restarted: RestartedLog, tmp_path: Path, frame: int
) -> None:
    begin = HEADER_BYTES + frame * FRAME_BYTES
    for salt in (8, 12):

        def change_salt(log: bytearray, at: int = begin + salt, former: int = 8 + salt) -> None:
            log[at : at + 4] = restarted.former[former : former + 4]

        path = copy(restarted.path, tmp_path / str(salt), change_salt)
        with pytest.raises(JournalUnusable, match="in its log is invalid"):
            contents(path, AFTER_POWER_LOSS)


def test_frames_of_a_transaction_without_its_commit_are_not_damage(after_kill: Path, tmp_path: Path) -> None:
    def append(log: bytearray) -> None:
        salts = log[16:24]
        log += (3).to_bytes(4, "big") + bytes(4) + salts + bytes(8) + b"\x55" * 4096

    assert len(contents(copy(after_kill, tmp_path / "x", append))) == 4


def test_the_log_of_a_long_run_restores_everything_after_a_kill(tmp_path: Path) -> None:
    """It began several times again, so its file had frames of former logs."""
    path = tmp_path / "j.db"
    journal = Journal(path, IDENTITY, NOW)
    ids = write_some(journal)
    for step in range(1500):
        journal.add_step([Entry(ids[2], 0, step)], at=float(step))
        if step % 50 == 0:
            journal.trim()
    left = crashed(path, tmp_path / "left")
    journal.close()
    [request] = [each for each in contents(left) if each.accepted.request_id == ids[2]]
    assert request.progress.choices[0].tokens[-3:] == [1497, 1498, 1499]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_to_a_journal_in_use_is_rejected(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    path, other = tmp_path / "j.db", tmp_path / "elsewhere" / "other.db"
    other.parent.mkdir()
    with opened(path) as journal:
        journal.accept(accepted_request())
        link(path, other)
        with pytest.raises(JournalUnusable, match=r"other\.db is in use by another coordinator$"):
            Journal(other, IDENTITY)


def test_a_file_in_place_of_a_moved_journal_in_use_is_rejected(tmp_path: Path) -> None:
    """Its log would have the name of the log in use."""
    path = tmp_path / "j.db"
    with opened(path):
        path.rename(tmp_path / "moved.db")
        with pytest.raises(JournalUnusable, match=r"j\.db is in use by another coordinator$"):
            Journal(path, IDENTITY)


def test_a_rejected_journal_is_free_again(after_stop: Path, tmp_path: Path) -> None:
    path = copy(after_stop, tmp_path / "x", None)
    whole = shutil.copy(path, tmp_path / "whole.db")
    change(path, "DELETE FROM ends")
    assert_rejected(path, "rows are missing")
    shutil.copy(whole, path)
    file = JournalFile(path, IDENTITY, "")
    file.close()
