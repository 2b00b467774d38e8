"""Sequences that may have killed a worker: tried apart from all others until a token clears each. Pure."""

from collections.abc import Iterable
from math import isqrt
from operator import attrgetter

from coordinator.scheduler.sequence import Sequence

_ORDER = attrgetter("order")


class _Group:
    """Suspects that run together; how often this group has given way to the others."""

    def __init__(self, members: Iterable[Sequence], *, num_rotations: int = 0, is_alone: bool = True) -> None:
        self.members = dict.fromkeys(members)
        self.num_rotations = num_rotations
        self.is_alone = is_alone


class Isolation:
    """After the death of a worker, the sequences of its unfinished steps are suspects.

    While there are any, one group of them runs at a time and nothing else does. A suspect that gets its next
    token has computed again all that was unfinished when the worker died, so it is one no more. Most deaths
    have nothing to do with requests, so new suspects run in groups of about the square root of their number;
    when a worker dies again, those that were unfinished then run alone.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, _Group] = {}
        self._running: _Group | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Each of these runs alone next."""
        for sequence in sequences:
            group = self._suspects.get(sequence)
            if group is None or not group.is_alone:
                self._put([sequence], num_rotations=group.num_rotations if group else 0)

    def record_worker_loss(self, unfinished: Iterable[Sequence]) -> None:
        """These were in steps that a dead worker left unfinished. Those that were suspects already run alone
        from now on.
        """
        ordered = sorted(unfinished, key=_ORDER)
        for sequence in ordered:
            if (group := self._suspects.get(sequence)) is not None:
                self._put([sequence], num_rotations=group.num_rotations)
        new = [sequence for sequence in ordered if sequence not in self._suspects]
        size = isqrt(len(new))
        for start in range(0, len(new), size or 1):
            self._put(new[start : start + size])

    def rotate(self, sequences: Iterable[Sequence]) -> None:
        """As far as these are suspects, the others come first."""
        for sequence in self._suspects.keys() & set(sequences):
            self._suspects[sequence].num_rotations += 1

    def discard(self, sequence: Sequence) -> None:
        """It has ended, or is cleared."""
        if (group := self._suspects.pop(sequence, None)) is not None:
            del group.members[sequence]

    def next_of(self, queue: Iterable[Sequence], *, is_busy: bool) -> Sequence | None:
        """Who runs next; None while none of the queue may. Another group begins only when nothing `is_busy`:
        what has ended may still be computed, and must not be blamed on whoever comes next.
        """
        suspects = [sequence for sequence in queue if sequence in self._suspects]
        if not is_busy:
            first = min(suspects, key=lambda each: self._suspects[each].num_rotations, default=None)
            self._running = None if first is None else self._suspects[first]
        members = (sequence for sequence in suspects if self._suspects[sequence] is self._running)
        return next(members, None)

    def others(self, queue: Iterable[Sequence]) -> list[Sequence]:
        """Who of the queue is no suspect."""
        return [each for each in queue if each not in self._suspects]

    def must_requeue(self, sequence: Sequence) -> bool:
        """`sequence` has got a token: it is no suspect any more, and waits if there are others."""
        self.discard(sequence)
        return self.is_active

    def is_alone(self, sequence: Sequence) -> bool:
        """It is a suspect that nothing else runs beside."""
        group = self._suspects.get(sequence)
        return group is not None and group.is_alone

    def _put(self, sequences: list[Sequence], *, num_rotations: int = 0) -> None:
        """Into a group of their own, out of those in which they are."""
        for sequence in sequences:
            self.discard(sequence)
        group = _Group(sequences, num_rotations=num_rotations, is_alone=len(sequences) == 1)
        self._suspects.update(dict.fromkeys(sequences, group))
