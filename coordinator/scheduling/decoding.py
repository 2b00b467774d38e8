"""The sequences that decode, and their share of each step. Pure."""

from operator import attrgetter

from coordinator.scheduling.pace import DecodeLoad
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.work import decodes_cost

_ORDER = attrgetter("order")


class Decoding:
    """All sequences in DECODE, of which some are *ready*: their newest token is here and in no step yet.

    Those that came together must not stay in one step while the other stages idle, so a step takes ready
    ones, first come, first served, until it has its even share of the cost of all. What it takes less, or
    more, than that is made up for by the next step.
    """

    def __init__(self) -> None:
        self._costs: dict[Sequence, int] = {}
        self._total = 0
        self._ready: list[Sequence] = []
        self._owed = 0.0

    @property
    def load(self) -> DecodeLoad:
        return DecodeLoad(len(self._costs), self._total)

    def make_ready(self, sequence: Sequence) -> None:
        """`sequence` decodes, and a token of it has come."""
        cost = decodes_cost(1, sequence.num_tokens)
        self._total += cost - self._costs.get(sequence, 0)
        self._costs[sequence] = cost
        self._ready.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """`sequence` decodes no more, if it did."""
        cost = self._costs.pop(sequence, None)
        if cost is None:
            return
        self._total -= cost
        if sequence in self._ready:
            self._ready.remove(sequence)

    def take(self, num_steps: int, *, most: int) -> list[Sequence]:
        """What belongs into the next of `num_steps` steps, at most `most` sequences, first in order first."""
        share, count = self._total / num_steps, 0
        owed = share + self._owed
        for sequence in self._ready:
            cost = self._costs[sequence]
            if count == most or (count and owed < cost / 2):
                break
            owed -= cost
            count += 1
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._owed = max(-share, owed) if self._ready and count < most else 0.0
        taken.sort(key=_ORDER)
        return taken

    def clear(self) -> None:
        """Nobody decodes."""
        self._owed = 0.0
        self._costs.clear()
        self._ready.clear()
        self._total = 0
