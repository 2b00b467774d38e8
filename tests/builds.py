"""Earlier builds of Stageline, taken from the history of the repository."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repository import REPOSITORY
from wire.channels import PROTOCOL_VERSION

_VERSION_FILE = "wire/channels.py"
_VERSION = re.compile(r"^PROTOCOL_VERSION = (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Build:
    """The source of a commit, run by this environment's Python and libraries."""

    directory: Path
    protocol_version: int

    @property
    def python_path(self) -> str:
        return os.pathsep.join([str(self.directory), str(self.directory / "proto")])

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that make it run this build."""
        env = shutil.which("env")
        assert env is not None
        return (env, f"PYTHONPATH={self.python_path}")


def build_of_previous_protocol(directory: Path) -> Build:
    """The last commit with another protocol version."""
    return _build(f"{_commit_of_this_protocol()}^", directory)


def oldest_build_of_this_protocol(directory: Path) -> Build:
    """The commit that made the protocol version what it is."""
    return _build(_commit_of_this_protocol(), directory)


def _commit_of_this_protocol() -> str:
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("needs git and the history of the repository")
    commit = _git("log", "-1", "--format=%H", "-G^PROTOCOL_VERSION = ", "--", _VERSION_FILE).decode().strip()
    if not commit or not _git("rev-parse", "--verify", "--quiet", f"{commit}^", check=False):
        pytest.skip("the history of the repository does not go back to the last protocol version")
    if _version_at(commit) != PROTOCOL_VERSION:
        pytest.skip(f"protocol version {PROTOCOL_VERSION} is not committed yet")
    return commit


def _build(commit: str, directory: Path) -> Build:
    archive = _git("archive", commit, "--", ".", ":!tests", ":!docs", ":!bench")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return Build(directory, _version_at(commit))


def _version_at(commit: str) -> int:
    match = _VERSION.search(_git("show", f"{commit}:{_VERSION_FILE}").decode())
    assert match is not None
    return int(match[1])


def _git(*arguments: str, check: bool = True) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=check, capture_output=True, timeout=60
    ).stdout
