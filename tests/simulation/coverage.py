"""The decisions that recovery consists of: each must be taken by the schedules of `make test`, and no other.

What changes nothing ("-") is listed where it refuses something: what is late, or of an old process.
"""

from __future__ import annotations

from collections import Counter

from tests.simulation.observed import Transition

_TABLE = """
WAITING_FOR_WORKERS  join          - LOADING
WAITING_FOR_WORKERS  lose          -
WAITING_FOR_WORKERS  elapsed       - LOADING
WAITING_FOR_WORKERS  loaded        -
WAITING_FOR_WORKERS  epoch_failed  -
WAITING_FOR_WORKERS  epoch_late    -
WAITING_FOR_WORKERS  hop_failed    -
LOADING              join          - LOADING
LOADING              lose          - LOADING WAITING_FOR_WORKERS
LOADING              drain         LOADING
LOADING              elapsed       -
LOADING              loaded        - STARTING_EPOCH
LOADING              load_failed   - LOADING
LOADING              epoch_failed  -
LOADING              hop_failed    -
STARTING_EPOCH       join          - LOADING
STARTING_EPOCH       lose          LOADING WAITING_FOR_WORKERS
STARTING_EPOCH       epoch_ready   - SERVING CHECKING
STARTING_EPOCH       link_open     - SERVING CHECKING
STARTING_EPOCH       results_open  -
STARTING_EPOCH       epoch_failed  -
STARTING_EPOCH       hop_failed    -
CHECKING             checked       STARTING_EPOCH LOADING BLOCKED
SERVING              join          - LOADING
SERVING              lose          LOADING WAITING_FOR_WORKERS
SERVING              drain         LOADING
SERVING              elapsed       - LOADING
SERVING              epoch_ready   -
SERVING              epoch_failed  - STARTING_EPOCH
SERVING              epoch_late    -
SERVING              hop_failed    STARTING_EPOCH
"""
_DIRECTED_TABLE = """
WAITING_FOR_WORKERS  drain         WAITING_FOR_WORKERS
LOADING              load_failed   BLOCKED
BLOCKED              drain         BLOCKED
BLOCKED              lose          WAITING_FOR_WORKERS
SERVING              drain         SERVING
SERVING              drained       WAITING_FOR_WORKERS
CHECKING             checked       STARTING_EPOCH LOADING BLOCKED
"""
_RARE_TABLE = """
WAITING_FOR_WORKERS  load_failed   BLOCKED
WAITING_FOR_WORKERS  join          WAITING_FOR_WORKERS
LOADING              join          WAITING_FOR_WORKERS
LOADING              lose          BLOCKED
LOADING              load_failed   WAITING_FOR_WORKERS
LOADING              drained       WAITING_FOR_WORKERS LOADING
LOADING              elapsed       LOADING
STARTING_EPOCH       join          STARTING_EPOCH WAITING_FOR_WORKERS
STARTING_EPOCH       lose          BLOCKED
STARTING_EPOCH       drain         LOADING STARTING_EPOCH
STARTING_EPOCH       drained       WAITING_FOR_WORKERS LOADING
STARTING_EPOCH       elapsed       LOADING
STARTING_EPOCH       epoch_failed  STARTING_EPOCH
STARTING_EPOCH       epoch_late    STARTING_EPOCH LOADING
STARTING_EPOCH       hop_failed    STARTING_EPOCH LOADING
CHECKING             join          LOADING CHECKING
CHECKING             lose          LOADING WAITING_FOR_WORKERS
CHECKING             drain         LOADING CHECKING
CHECKING             elapsed       LOADING
CHECKING             epoch_failed  STARTING_EPOCH
CHECKING             hop_failed    STARTING_EPOCH
SERVING              join          SERVING WAITING_FOR_WORKERS BLOCKED
SERVING              lose          - BLOCKED
SERVING              loaded        -
SERVING              drained       LOADING
SERVING              hop_failed    LOADING
SERVING              doubted       STARTING_EPOCH
BLOCKED              join          LOADING WAITING_FOR_WORKERS BLOCKED
BLOCKED              elapsed       LOADING
"""


def _parsed(table: str) -> set[Transition]:
    rows = (line.split() for line in table.strip().splitlines())
    return {(before, event, after) for before, event, *afters in rows for after in afters}


EXPECTED = _parsed(_TABLE)
DIRECTED = _parsed(_DIRECTED_TABLE)
"""What the schedules of `tests.simulation.directed` must take."""
RARE = _parsed(_RARE_TABLE)
"""Legal, and seen in long runs: tests/unit/coordinator/cluster takes each of these decisions by itself."""


def missing(taken: Counter[Transition], wanted: set[Transition] = EXPECTED) -> list[Transition]:
    """What was never decided."""
    return sorted(each for each in wanted if not taken[each])


def unlisted(taken: Counter[Transition]) -> list[Transition]:
    """What changed something and is not in the table."""
    return sorted(each for each in taken if each not in EXPECTED | DIRECTED | RARE and each[2] != "-")
