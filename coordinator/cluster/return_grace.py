"""How long those who were lost may take to come back before the others do without them. Pure."""

from coordinator.cluster.actions import Shrink, StartTimer

RETURN_GRACE_S = 0.5
"""How long a lost worker may take to come back before its layers are shared out among the others: enough for
one whose connection broke. A process that has to start again takes longer, and the others serve meanwhile.
"""
REJOIN_S = 1.0
"""How long workers may take to find a coordinator that is back, before it does without the others."""


class ReturnGrace:
    """Of the last loss; one before it counts no more."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._num_losses = 0
        self.is_running = False

    def await_all(self) -> StartTimer:
        """Nobody is here yet, and whoever was before may come."""
        self.is_running = True
        return StartTimer(max(self._grace_s, REJOIN_S), Shrink(self._num_losses))

    def note_loss(self, *, is_granted: bool) -> None:
        """A worker is lost; unless that `is_granted`, nobody waits for it."""
        self._num_losses += 1
        self.is_running = is_granted

    def timer(self) -> StartTimer:
        """When it is over."""
        return StartTimer(self._grace_s, Shrink(self._num_losses))

    def end(self, timer: Shrink) -> bool:
        """Its time is over; False for an older one."""
        if timer.num_losses != self._num_losses:
            return False
        self.is_running = False
        return True
