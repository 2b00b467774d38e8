"""Counts of `tools/house.py` in small repositories."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tools import house

Repository = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Makes a git repository with these files, all of them tracked."""

    def make(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
        return tmp_path

    return make


def measure(root: Path) -> house.Report:
    return house.measure_code(house.Tree.read(root))


def test_product_code_excludes_generated_and_developer_files(
    repository: Repository,
) -> None:
    root = repository(
        {
            "pyproject.toml": '[tool.setuptools.packages.find]\nwhere = [".", "proto"]\n',
            "room/__init__.py": '"""Nothing but a docstring."""\n',
            "room/table.py": "HEIGHT = 1\n",
            "room/table_pb2.py": "HEIGHT = 1\n",
            "room/table_pb2_grpc.py": "HEIGHT = 1\n",
            "proto/contract/shape.py": "WIDTH = 1\n",
            "tests/test_table.py": "HEIGHT = 1\n",
            "bench/table.py": "HEIGHT = 1\n",
            "tools/table.py": "HEIGHT = 1\n",
        }
    )
    (root / "room" / "untracked.py").write_text("HEIGHT = 1\n")
    assert set(house.Tree.read(root).modules) == {"room.table", "contract.shape"}
    assert measure(root)["folders"] == {
        "proto": {"modules": 1, "code_lines": 1},
        "room": {"modules": 1, "code_lines": 1},
    }


def test_code_lines_exclude_docstrings_comments_and_blanks(repository: Repository) -> None:
    text = '''"""Two lines
of a docstring."""

# A comment.
TEXT = """a string

of three lines"""  # not a docstring


def f() -> int:
    """One line."""
    return 1
'''
    report = measure(repository({"a.py": text}))
    assert (report["lines"], report["code_lines"], report["docstring_lines"]) == (12, 5, 3)
    assert report["docstring_percent"] == 25.0


def test_importers_count_once_however_they_import(repository: Repository) -> None:
    root = repository(
        {
            "p/__init__.py": "from p.shared import X\n",
            "p/shared.py": "X = 1\n",
            "p/single.py": "Y = 1\n",
            "p/user.py": "from . import shared, single\nfrom .single import Y\nimport p.single\n",
        }
    )
    report = measure(root)
    assert report["single_importer_modules"] == ["p/single.py <- p.user"]
    assert report["small_single_importer_modules"] == ["p/single.py"]
    assert house.Tree.read(root).importers()["p.shared"] == ["p", "p.user"]


def test_a_cycle_is_of_imports_at_run_time(repository: Repository) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.c\n"
    root = repository(
        {
            "p/a.py": "import p.b\n",
            "p/b.py": "def f() -> None:\n    import p.c\n",
            "p/c.py": "from p import a\n",
            "p/d.py": f"{guarded}else:\n    import p.e\n",
            "p/e.py": "import p.d\n",
            "p/f.py": f"import p.a\n{guarded}",
        }
    )
    assert measure(root)["import_cycles"] == [["p.a", "p.b", "p.c"], ["p.d", "p.e"]]


def test_a_mirror_is_one_class_of_the_client_and_one_other(repository: Repository) -> None:
    one, two = "class Overloaded: ...\n", "class Overloaded: ...\nclass Frame: ...\nclass _Frame: ...\n"
    report = measure(
        repository({"stageline/client/errors.py": one, "wire/errors.py": two, "wire/frames.py": two})
    )
    assert list(report["duplicate_classes"]) == ["Frame", "Overloaded"]
    assert report["client_mirrors"] == {}


def test_a_listed_mirror_is_no_duplicate(repository: Repository) -> None:
    text = "class Overloaded: ...\n"
    report = measure(repository({"stageline/client/errors.py": text, "wire/errors.py": text}))
    assert report["duplicate_classes"] == {}
    assert list(report["client_mirrors"]) == ["Overloaded"]


def test_sizes_have_their_limits(repository: Repository) -> None:
    body = "    x = 1\n"
    files = {
        "a.py": f"def fits():\n{body * 39}",
        "b.py": f"async def long():\n{body * 40}",
        "c.py": "X = 1\n" * 39,
        "d.py": "X = 1\n" * 600,
        "e.py": "X = 1\n" * 601,
        "p/__init__.py": "X = 1\n",
    }
    report = measure(repository(files))
    assert report["long_functions"] == ["b.py:1 long (41)"]
    assert report["small_modules"] == ["c.py"]
    assert report["large_files"] == ["e.py"]


def test_a_reach_through_passes_an_attribute_of_another_object(repository: Repository) -> None:
    text = """
class A:
    def f(self):
        self._engine.scheduler.next_step()
        self._engine.run()
        self.engine.scheduler.next_step()
        return self._a.b.c.d
"""
    report = measure(repository({"a.py": text}))
    assert report["reach_throughs"] == ["a.py:4 self._engine.scheduler.next_step", "a.py:7 self._a.b.c.d"]


def test_idle_work_is_counted_separately(repository: Repository) -> None:
    root = repository({"a.py": "X = 1\n", "b.py": "X = 1\n", "c.py": "X = 1\n"})

    def recorded(*functions: tuple[str, str, str]) -> dict[str, object]:
        return {
            "seconds": 1.0,
            "functions": [[process, str(root / path), name] for process, path, name in functions],
        }

    idle = recorded(("coordinator", "a.py", "tick"), ("worker-0", "b.py", "beat"))
    busy = recorded(
        ("coordinator", "a.py", "tick"),
        ("coordinator", "a.py", "submit"),
        ("worker-0", "b.py", "beat"),
        ("worker-0", "c.py", "step"),
        ("client", "/elsewhere/c.py", "call"),
    )
    report = house.measure_trace(
        house.Tree.read(root),
        {"request": busy, "request_idle": idle, "death": idle, "death_idle": idle},
    )
    assert report["request_files"] == ["a.py", "b.py", "c.py"]
    assert report["request_files_beside_idle"] == ["c.py"]
    assert report["request_files_with_other_functions"] == ["a.py", "c.py"]
    assert report["request_coordinator_files_with_other_functions"] == ["a.py"]
    assert report["request_code_lines"] == 3
    assert report["death_files_with_other_functions"] == []


def run_house(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, house.__file__, "--root", str(root), "--no-trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_check_names_each_count_above_its_limit(repository: Repository) -> None:
    limits = "[tool.house]\nmodules = 1\ncode_lines = 2\ndocstring_lines = 0\nrequest_files = 1\n"
    root = repository({"pyproject.toml": limits, "a.py": '"""A."""\nX = 1\n', "b.py": "X = 1\n"})
    run = run_house(root, "--check")
    assert run.stderr.splitlines() == [
        "modules: 2, the limit is 1",
        "docstring_lines: 1, the limit is 0",
    ]
    assert (run.returncode, run.stdout) == (1, "")


def test_the_check_passes_at_the_limit(repository: Repository) -> None:
    root = repository({"pyproject.toml": "[tool.house]\nmodules = 1\n", "a.py": "X = 1\n"})
    run = run_house(root, "--check", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["modules"] == 1


@pytest.mark.parametrize("name", ["moduls", "request_fils"])
def test_a_limit_of_an_unknown_count_is_an_error(repository: Repository, name: str) -> None:
    root = repository({"pyproject.toml": f"[tool.house]\n{name} = 1\n", "a.py": "X = 1\n"})
    run = run_house(root, "--check")
    assert run.returncode != 0
    assert f"[tool.house] {name}: unknown count" in run.stderr
