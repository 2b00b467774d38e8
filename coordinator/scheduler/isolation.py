"""Isolates sequences that may have crashed a worker until a token clears them. Pure."""

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
    """Runs suspects apart: the sequences of unfinished steps when a worker was lost.

    While there are suspects, only one group of them runs at a time. A suspect is cleared by its next token,
    because everything that was unfinished at the loss has then been recomputed. Most losses are not caused by
    requests, so new suspects run in groups of about the square root of their number. After another loss, the
    unfinished sequences of the group run alone.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, _Group] = {}
        self._running: _Group | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Make each of `sequences` run alone."""
        for sequence in sequences:
            group = self._suspects.get(sequence)
            if group is None or not group.is_alone:
                self._regroup([sequence], num_rotations=group.num_rotations if group else 0)

    def record_worker_loss(self, unfinished: Iterable[Sequence]) -> None:
        """Isolate the unfinished sequences of a lost worker: in groups, or alone if already suspects."""
        ordered = sorted(unfinished, key=_ORDER)
        for sequence in ordered:
            if (group := self._suspects.get(sequence)) is not None:
                self._regroup([sequence], num_rotations=group.num_rotations)
        new = [sequence for sequence in ordered if sequence not in self._suspects]
        size = isqrt(len(new))
        for start in range(0, len(new), size or 1):
            self._regroup(new[start : start + size])

    def rotate(self, sequences: Iterable[Sequence]) -> None:
        """Move the groups of suspects among `sequences` behind the other groups."""
        for sequence in self._suspects.keys() & set(sequences):
            self._suspects[sequence].num_rotations += 1

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that was cleared or has ended."""
        if (group := self._suspects.pop(sequence, None)) is not None:
            del group.members[sequence]

    def next_sequence(self, queue: Iterable[Sequence], *, is_busy: bool) -> Sequence | None:
        """The next suspect of the queue to run, or None.

        The next group starts only if the pipeline is not `is_busy`, because failures of steps of ended
        sequences must not be attributed to it.
        """
        suspects = [sequence for sequence in queue if sequence in self._suspects]
        if not is_busy:
            first = min(suspects, key=lambda sequence: self._suspects[sequence].num_rotations, default=None)
            self._running = None if first is None else self._suspects[first]
        members = (sequence for sequence in suspects if self._suspects[sequence] is self._running)
        return next(members, None)

    def others(self, queue: Iterable[Sequence]) -> list[Sequence]:
        """Sequences of the queue that are not suspects."""
        return [sequence for sequence in queue if sequence not in self._suspects]

    def on_token(self, sequence: Sequence) -> bool:
        """Clear `sequence` after a token. Returns True if it must wait for remaining suspects."""
        if self._suspects:
            self.discard(sequence)
        return bool(self._suspects)

    def is_alone(self, sequence: Sequence) -> bool:
        """Whether `sequence` is a suspect in a group without others."""
        group = self._suspects.get(sequence)
        return group is not None and group.is_alone

    def _regroup(self, sequences: list[Sequence], *, num_rotations: int = 0) -> None:
        """Move `sequences` into a new group."""
        for sequence in sequences:
            self.discard(sequence)
        group = _Group(sequences, num_rotations=num_rotations, is_alone=len(sequences) == 1)
        self._suspects.update(dict.fromkeys(sequences, group))
