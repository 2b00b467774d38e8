"""Who may read a file with a secret: its user alone, or, for a file of root, the group too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from certificates.private_files import read_private

NOBODY = 65534


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"abc")
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_file_of_its_user_alone_is_read(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    assert read_private(secret, max_bytes=3) == b"abc"


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o604, 0o777])
def test_a_file_of_others_too_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(
        PermissionError, match=f"has mode {mode:04o}, must be 0600 or stricter: run chmod 600"
    ):
        read_private(secret, max_bytes=3)


def test_a_large_file_and_a_directory_are_refused(secret: Path) -> None:
    secret.chmod(0o600)
    with pytest.raises(OSError, match="is too large, the limit is 2 bytes"):
        read_private(secret, max_bytes=2)
    with pytest.raises(OSError, match="is not a regular file"):
        read_private(secret.parent, max_bytes=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root")
@pytest.mark.parametrize(
    ("owner", "mode", "end"),
    [
        (0, 0o440, "b'abc'"),
        (0, 0o444, "must be 0640 or stricter"),
        (NOBODY, 0o440, "must be 0600 or stricter"),
    ],
)
def test_a_service_reads_credentials_that_systemd_gives_it(owner: int, mode: int, end: str) -> None:
    """It lets the service's user read a file of root by an access list, which shows as the group's mode."""
    # Below tmp_path, another user reads nothing.
    folder = Path("/dev/shm") / f"credentials-{os.getpid()}-{owner}-{mode}"
    folder.mkdir()
    try:
        path = folder / "token"
        path.write_bytes(b"abc")
        os.chown(path, owner, NOBODY)
        path.chmod(mode)
        program = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from certificates.private_files import read_private\n"
            f"os.setgid({NOBODY}), os.setuid({NOBODY})\n"
            "try:\n"
            "    print(read_private(Path(sys.argv[1]), max_bytes=9))\n"
            "except PermissionError as error:\n"
            "    print(error)\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
        )
        assert end in ran.stdout
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
