"""Files with prompts are created readable by their owner only."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.journal.journal import Journal
from coordinator.journal.records import JournalUnusable
from tests.unit.coordinator.journal.journals import IDENTITY, accepted_request


def open_journal(path: Path) -> Journal:
    """A journal with entries in the database and its write-ahead log."""
    journal = Journal(path, IDENTITY)
    journal.accept(accepted_request())
    return journal


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(path: Path) -> dict[str, int]:
    """File modes of the database and its side files, by suffix."""
    found = {file.name.removeprefix(path.name): file for file in path.parent.glob(f"{path.name}*")}
    return {suffix: stat.S_IMODE(file.stat().st_mode) for suffix, file in found.items()}


@pytest.mark.usefixtures("umask")
def test_only_the_owner_may_read_a_new_file_and_its_side_files(tmp_path: Path) -> None:
    opened = open_journal(tmp_path / "x.db")
    found = modes(tmp_path / "x.db")
    opened.close()
    assert {suffix: found[suffix] for suffix in ("", "-wal", "-shm")} == {
        "": 0o600,
        "-wal": 0o600,
        "-shm": 0o600,
    }
    assert found[".lock"] & 0o077 == 0


def test_the_file_is_private_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, seen = tmp_path / "x.db", sqlite3.connect, list[tuple[int, int]]()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        status = path.stat()
        seen.append((stat.S_IMODE(status.st_mode), status.st_size))
        return real(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    open_journal(path).close()
    assert seen[0] == (0o600, 0)


def test_an_existing_file_readable_by_others_is_restricted_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.db"
    first = open_journal(path)
    kept = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
    first.close()
    for suffix, content in kept.items():  # state after a crash
        Path(f"{path}{suffix}").write_bytes(content)
        Path(f"{path}{suffix}").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        opened = open_journal(path)
        found = modes(path)
        opened.close()
    assert {found[suffix] for suffix in ("", "-wal", "-shm")} == {0o600}
    assert f"changed mode of {path} from 0644 to 0600: it contains prompts in plain text" in caplog.messages
    assert any(f"{path}-wal from 0644 to 0600" in message for message in caplog.messages)


def test_a_link_is_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link.db", tmp_path / "elsewhere.db"
    link.symlink_to(target)
    opened = open_journal(link)
    found = modes(target)
    opened.close()
    assert {found[suffix] for suffix in ("", "-wal", "-shm")} == {0o600}


@pytest.mark.parametrize("name", ["loop.db", "loop.db/j.db"])
def test_a_loop_of_links_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.db").symlink_to(tmp_path / "other.db")
    (tmp_path / "other.db").symlink_to(tmp_path / "loop.db")
    with pytest.raises(JournalUnusable, match=r"db cannot be written: Too many levels of symbolic links$"):
        Journal(tmp_path / name, IDENTITY)


def test_a_file_of_something_else_is_rejected_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE somebodys (thing)")
    other.commit()
    other.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(JournalUnusable):
        open_journal(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_bytes() == before
