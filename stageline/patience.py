"""How long a client goes on trying. Times are those of a clock that is passed in."""

from stageline.errors import DeadlineExceeded

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Patience:
    """Bounds an outage by `outage_s`, and everything by `timeout_s` after `now_s` (None: no bound)."""

    def __init__(self, *, outage_s: float, timeout_s: float | None, now_s: float) -> None:
        self._outage_s = outage_s
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._outage_ends_s: float | None = None
        self._num_failures = 0

    def time_left_s(self, now_s: float) -> float | None:
        """What a call may take. Raises DeadlineExceeded."""
        if self._deadline_s is None:
            return None
        if now_s >= self._deadline_s:
            raise DeadlineExceeded(f"the timeout of {self._timeout_s:g} s has passed")
        return self._deadline_s - now_s

    def outage_left_s(self, now_s: float) -> float:
        """What the present outage may still take, 0 when it has lasted too long. Raises DeadlineExceeded."""
        time_left_s = self.time_left_s(now_s)
        ends_s = now_s + self._outage_s if self._outage_ends_s is None else self._outage_ends_s
        outage_left_s = max(0.0, ends_s - now_s)
        return outage_left_s if time_left_s is None else min(outage_left_s, time_left_s)

    def fail(self, now_s: float) -> float:
        """A call has failed. Returns the pause before the next one: 0 at first, then more each time."""
        if self._outage_ends_s is None:
            self._outage_ends_s = now_s + self._outage_s
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_failures - 1))
        self._num_failures += 1
        return 0.0 if self._num_failures == 1 else pause_s

    def succeed(self) -> None:
        """Something has come: the outage, if there was one, is over."""
        self._outage_ends_s = None
        self._num_failures = 0
