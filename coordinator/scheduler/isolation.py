"""Isolates sequences that may have crashed a worker until a token clears each. Pure."""

from collections.abc import Iterable
from math import isqrt
from operator import attrgetter

from coordinator.scheduler.sequence import Sequence

_ORDER = attrgetter("order")


class _Group:
    """Suspects that run together."""

    def __init__(self, members: Iterable[Sequence], *, num_rotations: int = 0, is_alone: bool = True) -> None:
        self.members = dict.fromkeys(members)
        self.num_rotations = num_rotations
        self.is_alone = is_alone


class Isolation:
    """After a worker was lost, the sequences of its unfinished steps are suspects.

    While there are suspects, one group of them runs at a time and nothing else does. A suspect that gets its
    next token has recomputed everything that was unfinished when the worker was lost, and is cleared. Most
    losses have nothing to do with requests, so new suspects run in groups of about the square root of their
    number; when another worker is lost, the sequences that were unfinished then run alone.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, _Group] = {}
        self._running: _Group | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Makes each of `sequences` run alone next."""
        for sequence in sequences:
            group = self._suspects.get(sequence)
            if group is None or not group.is_alone:
                self._put([sequence], num_rotations=group.num_rotations if group else 0)

    def record_worker_loss(self, unfinished: Iterable[Sequence]) -> None:
        """Isolates the unfinished sequences of a lost worker; those that were suspects already run alone."""
        ordered = sorted(unfinished, key=_ORDER)
        for sequence in ordered:
            if (group := self._suspects.get(sequence)) is not None:
                self._put([sequence], num_rotations=group.num_rotations)
        new = [sequence for sequence in ordered if sequence not in self._suspects]
        size = isqrt(len(new))
        for start in range(0, len(new), size or 1):
            self._put(new[start : start + size])

    def rotate(self, sequences: Iterable[Sequence]) -> None:
        """Puts suspects among `sequences` behind the other groups."""
        for sequence in self._suspects.keys() & set(sequences):
            self._suspects[sequence].num_rotations += 1

    def discard(self, sequence: Sequence) -> None:
        """Clears a sequence, or forgets one that has ended."""
        if (group := self._suspects.pop(sequence, None)) is not None:
            del group.members[sequence]

    def next_of(self, queue: Iterable[Sequence], *, is_busy: bool) -> Sequence | None:
        """The next sequence to run; None while none of the queue may run.

        Another group begins only when nothing `is_busy`: steps of ended sequences may still be computed, and
        must not be attributed to the next group.
        """
        suspects = [sequence for sequence in queue if sequence in self._suspects]
        if not is_busy:
            first = min(suspects, key=lambda each: self._suspects[each].num_rotations, default=None)
            self._running = None if first is None else self._suspects[first]
        members = (sequence for sequence in suspects if self._suspects[sequence] is self._running)
        return next(members, None)

    def others(self, queue: Iterable[Sequence]) -> list[Sequence]:
        """The sequences of the queue that are no suspects."""
        return [sequence for sequence in queue if sequence not in self._suspects]

    def must_requeue(self, sequence: Sequence) -> bool:
        """Clears `sequence`, which got a token; True if it must wait for remaining suspects."""
        self.discard(sequence)
        return self.is_active

    def is_alone(self, sequence: Sequence) -> bool:
        """`sequence` is a suspect that runs alone."""
        group = self._suspects.get(sequence)
        return group is not None and group.is_alone

    def _put(self, sequences: list[Sequence], *, num_rotations: int = 0) -> None:
        """Moves `sequences` into a group of their own."""
        for sequence in sequences:
            self.discard(sequence)
        group = _Group(sequences, num_rotations=num_rotations, is_alone=len(sequences) == 1)
        self._suspects.update(dict.fromkeys(sequences, group))
