"""Finds stop strings in text that comes in pieces, and lets no part of one out. Pure.

The rule is about characters, so how the text is cut into pieces changes nothing: the stop string that is
complete first ends the text, and among those that are complete with the same character the one that begins
first. What may still become a stop string, the longest end of the text that some stop string begins with and
is longer than, is held back; everything before it is let go at once.
"""

from bisect import bisect_right
from collections.abc import Sequence

from wire.errors import require


class StopMatcher:
    """Looks for stop strings in one text.

    What `push` returned and what `flush` returns, put together, is the text before the stop string, or the
    whole text when there was none.

    Only what is held back and the new text are looked at: a stop string that is completed now began in what
    is held back or after it. Searches end inside the new text, and each place where it turns out that nothing
    is to be held back from makes that part a character shorter. So a character costs a few native calls, none
    about more text than the longest stop string has, however much text came before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for a stop string without characters. None at all is legal and finds nothing."""
        if "" in stops:
            raise ValueError("a stop string needs at least one character")
        self._stops = sorted(set(stops))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete; nothing is pushed any more."""
        return self._is_stopped

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next text; returns what is certain now, and was not before, to be in no stop string.

        With `may_stop` False a stop string that is completed in `text` is ordinary text; one that only begins
        there and is completed in a later piece is not.
        """
        require(not self._is_stopped, "text after a stop string")
        window = self._held + text
        begin = self._find(window) if may_stop else None
        self._is_stopped = begin is not None
        if begin is None:
            begin = self._begin_of_held(window)
            self._held = window[begin:]
        else:
            self._held = ""
        return window[:begin]

    def flush(self) -> str:
        """What is held back, when the text ends otherwise; nothing after a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> int | None:
        """Where the stop string begins that is completed first in the new text."""
        found = []
        for stop in self._stops:
            # What was complete before this text was let pass.
            begin = window.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None

    def _begin_of_held(self, window: str) -> int:
        """Where the longest end of `window` begins that a stop string begins with and is longer than."""
        for begin in range(max(0, len(window) + 1 - self._longest), len(window)):
            if window[begin] in self._first_characters and self._is_beginning(window[begin:]):
                return begin
        return len(window)

    def _is_beginning(self, text: str) -> bool:
        """Strings that begin with `text` and are longer sort right behind it."""
        index = bisect_right(self._stops, text)
        return index < len(self._stops) and self._stops[index].startswith(text)
