"""Which generations of a sequence's key are used up in an epoch. Pure."""

from collections import OrderedDict

from wire.ids import SequenceKey

REMEMBERED = 8192
"""Ended sequences that are remembered (some 270 bytes each): more than a stage remembers ended generations,
and more than can end while a result is in flight."""


class UsedGenerations:
    """A request id may come again when its request has ended, and then it must not meet its own past.

    Results of the first one may still be in flight, and a stage refuses a second start of one generation.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[SequenceKey, int] = OrderedDict()

    def next_of(self, key: SequenceKey) -> int:
        """The first generation of `key` that is not used up."""
        return self._last.get(key, -1) + 1

    def note_ended(self, key: SequenceKey, generation: int) -> None:
        """`generation` was the last one of the sequence that has ended."""
        self._last[key] = generation
        self._last.move_to_end(key)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def clear(self) -> None:
        """Another epoch knows nothing of this one."""
        self._last.clear()
