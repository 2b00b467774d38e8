"""How requests have ended."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTotals:
    """Requests that have ended, since the coordinator started. `orphaned` of the cancelled ones were found by
    the sweeper.
    """

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    orphaned: int = 0
