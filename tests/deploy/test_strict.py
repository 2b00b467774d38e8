"""STRICT=1: what is skipped fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_processes import ROOT

pytestmark = pytest.mark.deploy

SKIPPED = """\
import pytest

def test_lacks_a_program():
    pytest.skip("no helm")

def test_passes():
    pass

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
"""


@pytest.mark.parametrize(
    ("strict", "summary"), [("", "1 passed, 1 skipped, 1 xfailed"), ("1", "1 failed, 1 passed, 1 xfailed")]
)
def test_a_skip_fails_with_strict(strict: str, summary: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "deploy" / "conftest.py").read_text())
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "STRICT": strict, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert summary in finished.stdout
    assert ("skipped with STRICT=1" in finished.stdout) == bool(strict)
