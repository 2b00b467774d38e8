"""Runs failed tests of parallel runs again, alone: `python -m tests.again FILE`.

More test processes than cores can take a test's time away. A test that passes alone is listed in the
summary with what it failed with beside others, and fails the run no more. Crashes, tests with drawn
examples, failures of runs that were not parallel, and more than `MOST` failures at once count as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.summary import Failure, Results

MOST = 5

Passes = Callable[[str], bool]


def run_alone(test: str) -> bool:
    """Whether pytest passes this test, with the examples of the tier that has the most."""
    with tempfile.NamedTemporaryFile() as results:
        arguments = ("-m", "pytest", "-q", "--hypothesis-profile", "full", "-o", "faulthandler_timeout=900")
        environment = {**os.environ, "STAGELINE_TEST_RESULTS": results.name}
        finished = subprocess.run([sys.executable, *arguments, test], env=environment, check=False)
        (found,) = Results.read(Path(results.name))
    # A test of a name that pytest does not find, or that is skipped now, did not pass.
    return finished.returncode == 0 and found.counts["passed"] > 0


def again(runs: Sequence[Results], passes: Passes) -> list[Results]:
    """The same runs, where failures that do not repeat have become cured."""
    repeatable = {
        failure.test for run in runs if run.is_parallel for failure in run.failures if not failure.is_final
    }
    if len(repeatable) > MOST:
        print(f"{len(repeatable)} tests failed: none runs again, which at most {MOST} do")
        return list(runs)
    cured = {test for test in sorted(repeatable) if passes(test)}
    return [_with_cured(run, cured) if run.is_parallel else run for run in runs]


def _with_cured(run: Results, tests: set[str]) -> Results:
    def is_cured(failure: Failure) -> bool:
        return failure.test in tests and not failure.is_final

    cured = [failure for failure in run.failures if is_cured(failure)]
    counts = Counter(run.counts)
    for failure in cured:
        counts[failure.outcome] -= 1
        # The test itself had passed where only its setup or teardown failed.
        counts["passed"] += failure.outcome == "failed"
    failures = [failure for failure in run.failures if not is_cured(failure)]
    return Results(run.seconds, counts, failures, run.durations, run.is_parallel, cured)


def main(file: Path) -> None:
    runs = again(Results.read(file), run_alone)
    file.write_text("")
    for run in runs:
        run.append_to(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
