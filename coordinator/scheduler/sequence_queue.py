"""Sequences without blocks, in queue order, of which clients take turns."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from coordinator.scheduler.sequence import Priority, Sequence

_ORDER = attrgetter("order")
_Owner: TypeAlias = tuple[Priority, str]


class SequenceQueue:
    """Sequences by their order, and those of each priority and client.

    The parts of clients are kept, because the queue may have tens of thousands of sequences, and each
    admission asks whose turn it is.
    """

    def __init__(self) -> None:
        self._all: list[Sequence] = []
        self._of: dict[_Owner, list[Sequence]] = {}
        self._last_turns: dict[str, int] = {}
        """Numbers of the last turns of clients in the queue; arrival counts as one."""
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def first(self, count: int) -> Iterator[Sequence]:
        """Return the first `count` sequences."""
        return islice(self._all, count)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its order."""
        insort(self._all, sequence, key=_ORDER)
        insort(self._of.setdefault(_owner(sequence), []), sequence, key=_ORDER)
        self._last_turns.setdefault(sequence.client, self._num_turns)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence whose client has its turn with it. Raises ValueError, as `remove`."""
        self._num_turns += 1
        self._last_turns[sequence.client] = self._num_turns + 1  # behind those who come before the next turn
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is not in the queue."""
        own = self._of.get(_owner(sequence), [])
        for queue in (self._all, own):
            index = bisect_left(queue, sequence.order, key=_ORDER)
            if index == len(queue) or queue[index] is not sequence:
                raise ValueError(f"sequence {sequence.key} is not in the queue")
            del queue[index]
        if not own:
            del self._of[_owner(sequence)]
            if not any((priority, sequence.client) in self._of for priority in Priority):
                del self._last_turns[sequence.client]

    def fairest(self, num_running_of: Mapping[str, int]) -> Sequence | None:
        """Of the head's priority: the first sequence of the client with the fewest running.

        Of clients with equally many, the one whose last turn is the longest ago: a sequence that ends with
        its prompt is not running when the next one is admitted. So a client that fills the queue waits for
        its own requests, and the others do not. Sequences behind one of a higher priority have no turn: they
        would overtake it.
        """
        if not self._all:
            return None
        priority = self._all[0].order.priority
        above = min((own[0].order for (of, _), own in self._of.items() if of > priority), default=None)
        firsts = (own[0] for (of, _), own in self._of.items() if of is priority)
        return min(
            (first for first in firsts if above is None or first.order < above),
            key=lambda sequence: (
                num_running_of.get(sequence.client, 0),
                self._last_turns[sequence.client],
                sequence.order,
            ),
        )


def _owner(sequence: Sequence) -> _Owner:
    return sequence.order.priority, sequence.client
