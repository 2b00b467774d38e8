"""When a worker that has ended is started again. Pure."""

import signal
from collections import deque

from stage_worker.device_errors import DEVICE_FAILED_EXIT_CODE

MAX_RESTARTS = 5
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class RestartPolicy:
    """Of one worker: at most `MAX_RESTARTS` within `WINDOW_S`, each after twice the delay before."""

    def __init__(self) -> None:
        self._restarts_s: deque[float] = deque()

    @staticmethod
    def is_unexpected(exit_code: int) -> bool:
        """Whether another process may do better: its device has failed, or a signal has ended it. What it was
        told (0), or could not do as it was started (1, 2), would only repeat itself.
        """
        return exit_code == DEVICE_FAILED_EXIT_CODE or exit_code in _KILLED

    def next_delay_s(self, now_s: float) -> float | None:
        """How long to wait before this restart, which is counted; None when there were too many."""
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= MAX_RESTARTS:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** len(self._restarts_s))
        self._restarts_s.append(now_s)
        return delay_s


_KILLED = frozenset(-number for number in signal.Signals)
