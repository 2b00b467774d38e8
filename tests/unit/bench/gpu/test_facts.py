from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import facts


def test_missing_and_too_old_packages_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\ndependencies = ["no-such-package>=1,<2", "torch>=2.6,<3", "numpy>=99.1",\n'
        '"uvloop>=0.21,<1; sys_platform != \'win32\'", "jinja2>=3.1.6,<4"]\n'
    )
    missing = facts.missing_packages(file)
    assert missing[0] == "no-such-package"
    assert missing[1].startswith("numpy>=99.1 (installed: ")
    assert len(missing) == 2


def test_every_requirement_of_the_project_is_understood() -> None:
    assert facts.missing_packages() == []


def test_a_host_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C compiler" in str(facts.missing_compiler())
