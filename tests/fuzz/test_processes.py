"""Findings of a process are kept, whatever becomes of it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.harness import CORPUS
from tests.fuzz.planted import NUM_KINDS, PLANTED
from tests.fuzz.processes import run_surface
from tests.fuzz.surfaces import SURFACES

SEED = 10
NUM_CASES = 6
PROBLEMS = {
    0: "KeyError: 'a planted fault'",
    1: "the process was ended by SIGABRT",
    2: "the process ended with exit code 7",
}


@pytest.mark.full
def test_each_kind_of_fault_is_found_and_all_cases_are_run(capfd: pytest.CaptureFixture[str]) -> None:
    kinds = Counter(PLANTED.case(SEED, number)[0] for number in range(NUM_CASES))
    assert len(kinds) == NUM_KINDS, "choose another seed"
    tally = run_surface(PLANTED.name, SEED, NUM_CASES)
    assert tally.num_cases == NUM_CASES
    found = Counter(finding.line().rpartition(f"case={finding.number}: ")[2] for finding in tally.findings)
    # The first of equal errors; processes that end are each a finding of their own.
    assert found == {PROBLEMS[0]: 1, PROBLEMS[1]: kinds[1], PROBLEMS[2]: kinds[2]}
    for finding in tally.findings:
        assert PROBLEMS[PLANTED.case(SEED, finding.number)[0]] in finding.problem


def test_a_run_begins_with_what_once_failed() -> None:
    for folder in CORPUS.iterdir():
        surface = SURFACES[folder.name]
        files = sorted(folder.glob("*.case"))
        cases = [surface.case(1, number) for number in surface.numbers(2)]
        assert cases[: len(files)] == [file.read_bytes() for file in files]
        assert len(cases) == len(files) + 2
