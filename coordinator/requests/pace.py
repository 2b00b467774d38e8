"""How fast requests leave, for those who are told to come again. Pure."""

_SHORTEST_S = 0.1
_LONGEST_S = 30.0
_UNKNOWN_S = 1.0
_WEIGHT = 0.2


class Pace:
    """A moving average of the time between two requests that end."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last_s: float | None = None

    def note_end(self, now_s: float) -> None:
        """A request has ended."""
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            average_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = average_s + _WEIGHT * (interval_s - average_s)
        self._last_s = now_s

    @property
    def retry_after_s(self) -> float:
        """When there is a place again, as far as the past can tell: between 0.1 and 30 seconds from now."""
        interval_s = _UNKNOWN_S if self._interval_s is None else self._interval_s
        return min(max(interval_s, _SHORTEST_S), _LONGEST_S)
