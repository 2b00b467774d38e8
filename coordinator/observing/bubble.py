"""How much of a pipeline's time its stages idle. Pure; all times in seconds."""

from collections import deque
from dataclasses import dataclass

WINDOW_S = 10


@dataclass(slots=True)
class _Second:
    index: int
    active_s: float = 0.0
    computed_s: float = 0.0


class BubbleWindow:
    """The last ten seconds, by the second.

    Bubble = 1 - computed / active, where `active` is the time with at least one step in flight, and
    `computed` the mean over all stages of the time that answered steps were computed there. A step counts
    when it is answered, so of steps that take longer than the window the share is a rough one.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)

    def add(self, now_s: float, *, active_s: float, computed_s: float = 0.0) -> None:
        """`active_s` have passed with steps in flight; a step was answered that has cost each stage
        `computed_s` on average.
        """
        second = self._at(int(now_s))
        second.active_s += active_s
        second.computed_s += computed_s

    def share(self, now_s: float) -> float | None:
        """In [0, 1]; None where nothing was in flight."""
        recent = [each for each in self._seconds if each.index > now_s - WINDOW_S]
        active_s = sum(each.active_s for each in recent)
        if active_s <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - sum(each.computed_s for each in recent) / active_s))

    def _at(self, index: int) -> _Second:
        if not self._seconds or self._seconds[-1].index != index:
            self._seconds.append(_Second(index))
        return self._seconds[-1]
