"""The product has no dead code; `make lint` checks the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dead_code(*paths: Path) -> list[str]:
    """What vulture reports of the paths that the project names, or of `paths`."""
    command = [sys.executable, "-m", "vulture", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.mark.full
def test_the_product_has_no_dead_code() -> None:
    assert dead_code() == []


def test_dead_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("def used(): ...\ndef left_over(unread): ...\nLEFT_OVER = used()\n")
    found = dead_code(tmp_path)
    for name in ("function 'left_over'", "variable 'unread'", "variable 'LEFT_OVER'"):
        assert any(name in line for line in found), found
