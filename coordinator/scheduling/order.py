"""Who comes first: first come, first served within a class, and waiting ages. Pure."""

from enum import IntEnum
from typing import NamedTuple


class Priority(IntEnum):
    """Classes of requests; the value is how many ages a request is treated as older than it is."""

    LOW = -1
    NORMAL = 0
    HIGH = 1


class QueueOrder(NamedTuple):
    """Sequences are served in ascending order; the largest gives up its blocks first.

    `due_s` is the arrival moved by the class, so that the order of two sequences never changes while they
    wait, and a request is overtaken only by those of a higher class that came within so many ages after it.
    """

    due_s: float
    arrival: int
    choice: int = 0


def queue_order(
    priority: Priority, *, arrived_s: float, arrival: int, choice: int = 0, age_s: float
) -> QueueOrder:
    """`arrival` numbers the requests as they come and decides between equals; `age_s` is worth one class."""
    return QueueOrder(arrived_s - priority * age_s, arrival, choice)
