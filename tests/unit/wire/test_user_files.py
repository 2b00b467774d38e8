"""Cache, state and secret files of a user."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from wire import user_files
from wire.user_files import (
    NoHomeDirectory,
    find_cache_directory,
    find_state_directory,
    read_secret,
    state_directory,
    token_path,
    token_paths,
    user_cache_directory,
    write_secret,
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/var/c"}, "/var/c/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": ""}, "/home/a/.cache/stageline"),
    ],
)
def test_the_cache_follows_the_xdg_specification(environment: dict[str, str], expected: str) -> None:
    assert user_cache_directory(environment) == Path(expected)


def test_written_files_are_private_and_readable_by_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    for secret in ("first", "second"):
        write_secret(path, secret)
        assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_file_accessible_to_others_is_rejected(tmp_path: Path, mode: int) -> None:
    write_secret(tmp_path / "secret", "x")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(PermissionError, match=rf"has mode {mode:04o}, must be 0600 or stricter"):
        read_secret(tmp_path / "secret")


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(OSError, match="not a regular file"):
        read_secret(tmp_path / "fifo")
    write_secret(tmp_path / "large", "x" * 5000)
    with pytest.raises(OSError, match="the limit is 4096 bytes"):
        read_secret(tmp_path / "large")


def test_tokens_are_named_after_addresses(tmp_path: Path) -> None:
    assert token_path(tmp_path, "127.0.0.1:7480").name == "127.0.0.1_7480"
    assert token_path(tmp_path, "localhost:7480").name == "127.0.0.1_7480"
    assert token_path(tmp_path, "[::1]:1").name == "..1_1"
    found = [path.name for path in token_paths(tmp_path, "127.0.0.1:1")]
    assert found == ["127.0.0.1_1", "0.0.0.0_1", ".._1"]
    assert [path.name for path in token_paths(tmp_path, "10.0.0.7:1")] == ["10.0.0.7_1"]


def test_the_state_directory_is_private_to_the_user() -> None:
    assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/stageline")
    assert state_directory({"XDG_STATE_HOME": "relative", "HOME": "/y"}) == Path("/y/.local/state/stageline")
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert state_directory({}) == Path(home, ".local/state/stageline")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a passwd entry, as in containers with arbitrary user ids."""

    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(user_files.pwd, "getpwuid", no_entry)


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"XDG_STATE_HOME": "a", "XDG_CACHE_HOME": "a"}])
def test_a_user_without_home_has_no_directories_and_is_told_which_variable_to_set(
    environment: dict[str, str],
) -> None:
    assert find_state_directory(environment) is None
    assert find_cache_directory(environment) is None
    with pytest.raises(NoHomeDirectory, match=r"HOME is not set and user id .* set XDG_STATE_HOME"):
        state_directory(environment)
    with pytest.raises(NoHomeDirectory, match="set XDG_CACHE_HOME to a directory"):
        user_cache_directory(environment)


@pytest.mark.usefixtures("no_home")
def test_variables_stand_for_a_missing_home() -> None:
    assert find_state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/stageline")
    assert find_cache_directory({"HOME": "/h"}) == Path("/h/.cache/stageline")
