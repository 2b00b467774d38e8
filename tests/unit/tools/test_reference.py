"""docs/reference/ describes the code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import REPOSITORY
from tools.reference import DIRECTORY, DOCUMENTS, main

TOOL = REPOSITORY / "tools" / "reference.py"


@pytest.mark.full
def test_the_reference_is_up_to_date() -> None:
    check = subprocess.run([sys.executable, TOOL, "--check"], check=False)
    assert check.returncode == 0, "run: python tools/reference.py"


def test_a_document_that_differs_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tools.reference.ROOT", tmp_path.parent)
    monkeypatch.setattr("tools.reference.DIRECTORY", tmp_path)
    monkeypatch.setattr("tools.reference.DOCUMENTS", {"flags": lambda: "new"})
    (tmp_path / "flags.md").write_text("old")
    assert main(["--check"]) == 1
    assert "flags.md" in capsys.readouterr().err
    assert (tmp_path / "flags.md").read_text() == "old"
    assert (main([]), main(["--check"])) == (0, 0)


def test_every_document_is_generated() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.md")} == set(DOCUMENTS) - {"../models"}
