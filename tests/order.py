"""Which cases of a matrix a tier has, and which files start first."""

from __future__ import annotations

from collections import abc

import pytest

START_FIRST = {
    file: number
    for number, file in enumerate(
        (
            "tests/simulation/test_simulation.py",
            "tests/e2e/test_recovery_kill.py",
            "tests/e2e/test_recovery_bytes.py",
            "tests/e2e/test_responses.py",
            "tests/integration/test_cluster_faults.py",
            "tests/unit/stage_worker/model/test_families.py",
            "tests/unit/coordinator/planner/test_rates.py",
            "tests/unit/coordinator/planner/test_gpu_memory.py",
        )
    )
}
"""Files that take minutes, and their order: one that starts last would run on when all others have ended."""


def assign_tiers(cases: abc.Sequence[pytest.Item]) -> None:
    """Mark the cases of one test with `matrix(n, full=m)`: n stay in `make test`, m others are in
    `make test-full` (all by default), the rest in `make nightly`. Both are spread over all cases, but for
    cases that are marked by hand.
    """
    marker = cases[0].get_closest_marker("matrix")
    assert marker is not None
    daily = [case for case in cases if not case.get_closest_marker("nightly")]
    quick = _spread([case for case in daily if not case.get_closest_marker("full")], marker.args[0])
    others = [case for case in daily if case not in quick]
    full = _spread(others, marker.kwargs.get("full", len(others)))
    for case in others:
        case.add_marker("full" if case in full else "nightly")


def _spread(cases: abc.Sequence[pytest.Item], num_kept: int) -> set[pytest.Item]:
    """At most `num_kept` of the cases, at equal distances."""
    num_kept = min(num_kept, len(cases))
    return {cases[number * len(cases) // num_kept] for number in range(num_kept)}
