"""The decisions that recovery consists of: each must be taken by the schedules of `make nightly`, and none
that the product's table (`coordinator.cluster.transitions`) does not list.

What changes nothing ("-") is listed where it refuses something: what is late, or of an old process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordinator.cluster.transitions import TRANSITIONS, ClusterEvent, ClusterPhase
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


def _parsed(table: str) -> set[Transition]:
    rows = (line.split() for line in table.strip().splitlines())
    return {(before, event, after) for before, event, *afters in rows for after in afters}


EXPECTED = _parsed(_TABLE)
DIRECTED = _parsed(_DIRECTED_TABLE)
"""What the schedules of `tests.simulation.directed` must take."""


def missing(taken: Counter[Transition], wanted: set[Transition] = EXPECTED) -> list[Transition]:
    """What was never decided."""
    return sorted(transition for transition in wanted if not taken[transition])


def unlisted(taken: Iterable[Transition]) -> list[Transition]:
    """What changed something and is not in the table of the product."""
    return sorted(transition for transition in taken if transition[2] != "-" and not _is_legal(transition))


def _is_legal(transition: Transition) -> bool:
    before, event, after = transition
    return ClusterPhase[after] in TRANSITIONS[ClusterPhase[before]].get(ClusterEvent(event), ())
