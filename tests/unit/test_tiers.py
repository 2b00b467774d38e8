"""Tiers of tests: each test is in one of them, and several runs end with one summary."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.fake_processes import ROOT
from tests.summary import Results, main

MAKEFILE = (ROOT / "Makefile").read_text()
TIERS = dict(
    re.findall(
        r"^(test[a-z-]*|nightly): venv[^\n]*\n\t.*-m \"?([^\"\n]+?)\"?"
        r"(?: tests/(?:gpu|kernels|clients|deploy))?$",
        MAKEFILE,
        re.M,
    )
)


def test_there_are_nine_tiers() -> None:
    others = {f"test-{name}" for name in ("full", "chaos", "bench", "gpu", "kernels", "clients", "deploy")}
    assert TIERS.keys() == {"test", "nightly", *others}


@pytest.mark.parametrize(
    "marker", ["matrix", "full", "chaos", "bench", "nightly", "gpu", "kernels", "clients", "deploy"]
)
def test_a_test_runs_in_one_tier(marker: str) -> None:
    assert len(chosen_by({marker})) == 1


def test_property_tests_run_again_with_more_examples() -> None:
    assert chosen_by({"hypothesis"}) == {"test", "test-full", "nightly"}


def chosen_by(markers: set[str]) -> set[str]:
    """The tiers that run a test with these markers."""
    return {
        tier
        for tier, expression in TIERS.items()
        if Expression.compile(expression).evaluate(lambda name, **_: name in markers)
    }


def test_runs_add_up_to_one_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results"
    Results(90.0, Counter(passed=3, skipped=1), [], [(2.5, "call a.py::test_a")]).append_to(file)
    assert main(file) == 0
    Results(
        10.5, Counter(passed=4, failed=1), ["FAILED b.py::test_b"], [(3.5, "call b.py::test_b")]
    ).append_to(file)
    capsys.readouterr()
    assert main(file) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "3.50s call b.py::test_b",
        "2.50s call a.py::test_a",
        "FAILED b.py::test_b",
        "1 failed, 7 passed, 1 skipped in 100.50s (0:01:40)",
    ]


def test_a_summary_of_no_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    assert main(tmp_path / "results") == 1


HANGING = """
import asyncio

async def wait_for_ever():
    await asyncio.Event().wait()

async def test_hangs():
    await wait_for_ever()

def test_passes():
    pass
"""


@pytest.mark.full
def test_a_test_that_hangs_fails_with_what_it_waits_for_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("-n1", "-p", "tests.overdue", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "faulthandler_timeout=2", *options, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout
    assert re.search(r"test_hanging.py::test_hangs has not ended.*in wait_for_ever", done.stderr, re.S)
    assert "most recent call first" in done.stderr, "the stacks of its threads"
