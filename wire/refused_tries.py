"""Bounds what a peer gains by presenting wrong secrets again and again. Pure."""

from collections import OrderedDict, deque

MAX_TRIES = 10
WINDOW_S = 60.0
MAX_PEERS = 256


class RefusedTries:
    """Times of the last refusals, by host of the peer; the host refused longest ago is forgotten first.

    Only wrong secrets count, and a right one always passes: an attacker locks out nobody on its own host.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, host: str, now_s: float) -> int:
        """One more refusal; how many there are within the window, up to MAX_TRIES + 1."""
        times = self._refused.setdefault(host, deque(maxlen=MAX_TRIES + 1))
        self._refused.move_to_end(host)
        times.append(now_s)
        while len(self._refused) > MAX_PEERS:
            self._refused.popitem(last=False)
        return sum(now_s - each < WINDOW_S for each in times)
