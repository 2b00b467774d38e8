"""Sequences that may have killed a worker, and run alone until one token proves that they did not. Pure."""

from collections.abc import Iterable

from coordinator.scheduling.sequence import Sequence


class Isolation:
    """After the death of a worker, the sequences of its unfinished steps are suspects.

    While there are any, one of them runs at a time and nothing else does. A suspect that gets its next token
    has computed again all that was unfinished when the worker died, so it is one no more.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, int] = {}
        """With how often each has given way."""

    @property
    def is_active(self) -> bool:
        return bool(self._suspects)

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """These were in steps that a dead worker left unfinished."""
        for sequence in sequences:
            self._suspects.setdefault(sequence, 0)

    def give_way(self, sequences: Iterable[Sequence]) -> None:
        """As far as these are suspects, the others come first."""
        for sequence in self._suspects.keys() & set(sequences):
            self._suspects[sequence] += 1

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._suspects.pop(sequence, None)

    def next_of(self, queue: Iterable[Sequence]) -> Sequence | None:
        """Who runs next, alone; None while none of the queue is a suspect."""
        suspects = (each for each in queue if each in self._suspects)
        return min(suspects, key=self._suspects.__getitem__, default=None)

    def others(self, queue: Iterable[Sequence]) -> list[Sequence]:
        """Who of the queue is no suspect."""
        return [each for each in queue if each not in self._suspects]

    def must_make_way(self, sequence: Sequence) -> bool:
        """`sequence` has got a token: it is no suspect any more, and waits if there are others."""
        self._suspects.pop(sequence, None)
        return self.is_active

    def is_suspect(self, sequence: Sequence) -> bool:
        return sequence in self._suspects
