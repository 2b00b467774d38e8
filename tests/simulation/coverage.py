"""The decisions that recovery consists of: each must be taken by the schedules of `make test`, and no other.

What changes nothing ("-") is listed where it refuses something: what is late, or of an old process.
"""

from __future__ import annotations

from collections import Counter

from tests.simulation.observed import Transition

_TABLE = """
WAITING_FOR_WORKERS  join          - LOADING
WAITING_FOR_WORKERS  lose          -
WAITING_FOR_WORKERS  loaded        -
WAITING_FOR_WORKERS  epoch_failed  -
LOADING              join          - LOADING
LOADING              lose          - LOADING WAITING_FOR_WORKERS BLOCKED
LOADING              loaded        - STARTING_EPOCH
LOADING              load_failed   BLOCKED LOADING
LOADING              epoch_failed  -
STARTING_EPOCH       join          - LOADING
STARTING_EPOCH       lose          LOADING WAITING_FOR_WORKERS
STARTING_EPOCH       epoch_ready   - SERVING
STARTING_EPOCH       link_open     - SERVING
STARTING_EPOCH       results_open  -
STARTING_EPOCH       epoch_failed  - STARTING_EPOCH
SERVING              join          - LOADING
SERVING              lose          - LOADING WAITING_FOR_WORKERS BLOCKED
SERVING              loaded        -
SERVING              epoch_ready   -
SERVING              epoch_failed  - STARTING_EPOCH
BLOCKED              join          LOADING
BLOCKED              lose          WAITING_FOR_WORKERS
"""
_RARE_TABLE = """
BLOCKED              join          WAITING_FOR_WORKERS
STARTING_EPOCH       lose          BLOCKED
WAITING_FOR_WORKERS  load_failed   BLOCKED
"""


def _parsed(table: str) -> set[Transition]:
    rows = (line.split() for line in table.strip().splitlines())
    return {(before, event, after) for before, event, *afters in rows for after in afters}


EXPECTED = _parsed(_TABLE)
RARE = _parsed(_RARE_TABLE)
"""Known, but too rare for every run."""


def missing(taken: Counter[Transition]) -> list[Transition]:
    """What was never decided."""
    return sorted(each for each in EXPECTED if not taken[each])


def unlisted(taken: Counter[Transition]) -> list[Transition]:
    """What changed something and is not in the table."""
    return sorted(each for each in taken if each not in EXPECTED | RARE and each[2] != "-")
