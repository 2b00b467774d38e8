"""`python -m tests.churn --minutes 30 --rate 20`: detects memory growth of the coordinator.

With `--refusals 10000`, of a gateway, after that many refused or failed requests of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.churn.refusals import run_refusals
from tests.churn.run import ChurnConfig, run_churn
from tests.temporary import INTERRUPTED, LOGS_HELP, end_in_order, unused_directory


def main() -> int:
    """Returns 0 if memory and objects are stable and every request ended as expected, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (default 30)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="order and content of the requests (default 1)")
    parser.add_argument("--refusals", type=int, metavar="N", help="refused requests of each kind instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples and counts to FILE")
    parser.add_argument("--logs", type=unused_directory, metavar="DIR", help=LOGS_HELP)
    given = parser.parse_args()
    if given.minutes <= 0 or given.rate <= 0:
        parser.error("--minutes and --rate must be positive")
    say = functools.partial(print, flush=True)
    config = ChurnConfig(
        seconds=given.minutes * 60, rate=given.rate, seed=given.seed, logs=given.logs, say=say
    )
    end_in_order()
    if given.refusals is not None:
        return _refusals(given.refusals, given.logs, say)
    try:
        report = asyncio.run(run_churn(config))
    except KeyboardInterrupt:
        return INTERRUPTED
    if given.json is not None:
        given.json.write_text(json.dumps(report.fields()))
    for problem in report.problems[:20]:
        say(f"PROBLEM: {problem}")
    say(report.line())
    return 0 if report.has_passed else 1


def _refusals(number: int, logs: Path | None, say: Callable[[str], None]) -> int:
    try:
        report = asyncio.run(run_refusals(number, logs=logs, say=say))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if report.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
