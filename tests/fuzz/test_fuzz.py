"""Some cases of every surface, and all that once failed; `make fuzz` runs 100,000."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import DEFAULT_CASES, LEAST_CASES
from tests.fuzz.harness import run_cases, shares
from tests.fuzz.surfaces import SURFACES

SEED = 17
NUM_CASES = shares(SURFACES.values(), 3_000)


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_takes_anything_without_a_lasting_trace(name: str) -> None:
    surface = SURFACES[name]
    with surface.opened() as opened:
        findings = run_cases(surface, opened, SEED, surface.numbers(NUM_CASES[name])).findings
    assert not findings, "\n".join(f"{finding.line()}\n{finding.problem}" for finding in findings)


def test_a_whole_run_has_enough_cases_of_every_surface() -> None:
    assert min(shares(SURFACES.values(), DEFAULT_CASES).values()) >= LEAST_CASES
