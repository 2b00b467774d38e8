"""Who comes first: first come, first served within a class, and waiting ages. Pure."""

from enum import IntEnum
from typing import NamedTuple

CHOICES_PER_AGE = 64
"""The last of so many choices queues one age behind the first."""


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
    """`arrival` numbers the requests as they come and decides between equals; `age_s` is worth one class.

    Each further choice of a request queues as if it had arrived a little later, so that a request with many
    choices does not hold up all requests behind it.
    """
    return QueueOrder(arrived_s + age_s * (choice / CHOICES_PER_AGE - priority), arrival, choice)
