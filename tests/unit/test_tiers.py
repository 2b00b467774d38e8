"""Tiers of tests: each test is in one of them, and several runs end with one summary."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.again import MOST, again
from tests.fake_processes import ROOT
from tests.order import START_FIRST, assign_tiers
from tests.parallel import FileScheduling
from tests.summary import CRASHED, Failure, Results, main

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


class Case:
    """A collected test with markers."""

    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self._marks = [mark.mark for mark in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self._marks if mark.name == name), None)

    def add_marker(self, name: str) -> None:
        self._marks.append(getattr(pytest.mark, name).mark)

    @property
    def tiers(self) -> str:
        return " ".join(sorted(chosen_by({mark.name for mark in self._marks})))


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (pytest.mark.matrix(2), ["test", "test-full", "test", "test-full", "test-full"]),
        (pytest.mark.matrix(1, full=2), ["test", "test-full", "nightly", "test-full", "nightly"]),
        (pytest.mark.matrix(0, full=1), ["test-full", "nightly", "nightly", "nightly", "nightly"]),
        (pytest.mark.matrix(9), ["test", "test", "test", "test", "test-full"]),
    ],
)
def test_cases_of_a_matrix_are_spread_over_tiers(matrix: pytest.MarkDecorator, expected: list[str]) -> None:
    cases = [*(Case(matrix) for _ in range(4)), Case(matrix, pytest.mark.full)]
    by_hand = Case(matrix, pytest.mark.nightly)
    assign_tiers([by_hand, *cases])  # type: ignore[list-item]
    assert [case.tiers for case in cases] == expected
    assert by_hand.tiers == "nightly"


def test_processes_are_given_files_clusters_or_single_tests() -> None:
    scope = FileScheduling._split_scope
    scheduling = FileScheduling.__new__(FileScheduling)
    for file in ("unit/test_tiers.py", "e2e/test_up.py", "unit/stage_worker/model/test_families.py"):
        assert scope(scheduling, f"tests/{file}::test_a[x::y]") == f"tests/{file}"
    assert scope(scheduling, "tests/e2e/served/test_parity.py::test_a") == "tests/e2e/served"
    for file in ("gpu/test_families.py", "e2e/test_chaos.py"):
        assert scope(scheduling, f"tests/{file}::test_a[x]") == f"tests/{file}::test_a[x]"


def test_files_that_start_first_exist() -> None:
    assert [file for file in START_FIRST if not (ROOT / file).exists()] == []


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
    failure = Failure("failed", "b.py::test_b", "assert 1 == 2", is_final=False)
    Results(10.5, Counter(passed=4, failed=1), [failure], [(3.5, "call b.py::test_b")]).append_to(file)
    capsys.readouterr()
    assert main(file) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "3.50s call b.py::test_b",
        "2.50s call a.py::test_a",
        "FAILED b.py::test_b",
        "    assert 1 == 2",
        "1 failed, 7 passed, 1 skipped in 100.50s (0:01:40)",
    ]


FAILING = """
from pathlib import Path
import pytest
from hypothesis import given, strategies as st

def fails_once(name):
    file = Path(__file__).with_name(name)
    has_failed = file.exists()
    file.touch()
    assert has_failed, f"the first {name}"

def test_fails_beside_others():
    fails_once("time")

@given(st.none())
def test_draws_another_example(drawn):
    fails_once("example")

def test_fails_always():
    assert 1 == 2

def test_passes():
    pass
"""


@pytest.mark.full
@pytest.mark.parametrize(("workers", "cured"), [(2, {"beside_others"}), (0, set())])
def test_what_failed_in_a_parallel_run_runs_again_alone(
    workers: int, cured: set[str], tmp_path: Path
) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    file = tmp_path / "results"
    environment = {**os.environ, "STAGELINE_TEST_RESULTS": str(file), "PYTHONPATH": str(ROOT)}
    for arguments in (("pytest", f"-n{workers}"), ("tests.again", str(file))):
        command = [sys.executable, "-m", *arguments]
        subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=120)
    total = Results.sum(Results.read(file))
    assert {failure.test.partition("test_fails_")[2] for failure in total.cured} == cured
    assert {failure.reason.splitlines()[0] for failure in total.cured} <= {"AssertionError: the first time"}
    assert len(total.failures) == 3 - len(cured)
    assert (total.counts["failed"], total.counts["passed"]) == (3 - len(cured), 1 + len(cured))


def test_a_crash_and_many_failures_count_as_they_are() -> None:
    asked: list[str] = []

    def passes(test: str) -> bool:
        asked.append(test)
        return True

    crash = Failure("failed", "a.py::test_a", f"worker 'gw1' {CRASHED} 'a.py::test_a'", is_final=True)
    failures = [Failure("failed", f"b.py::test_{number}", "", is_final=False) for number in range(MOST + 1)]
    runs = [Results(1.0, Counter(failed=1), [crash], is_parallel=True)]
    assert again(runs, passes) == runs
    runs = [Results(1.0, Counter(failed=MOST + 1), failures, is_parallel=True)]
    assert again(runs, passes) == runs
    assert not asked
    (run,) = again([Results(1.0, Counter(failed=MOST), failures[:MOST], is_parallel=True)], passes)
    assert (run.failures, run.cured, run.counts) == ([], failures[:MOST], Counter(failed=0, passed=MOST))


def test_a_run_that_ends_without_failed_tests_but_not_in_order_is_a_failure() -> None:
    results = Results.of_reports({}, 1.0, is_parallel=True, exit_status=pytest.ExitCode.INTERNAL_ERROR)
    assert [failure.reason for failure in results.failures] == ["ended with status 3, INTERNAL_ERROR"]


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
