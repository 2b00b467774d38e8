"""How long to wait for the answer to a step before it counts as lost. Pure."""

import math
from collections import deque

MIN_PATIENCE_S = 2.0
SLOWDOWN = 8.0
"""A step may take so many times as long as nearly all before it, in proportion to what it computes."""

_NUM_KEPT = 512
_NEARLY_ALL = 0.99


class Patience:
    """Learns how long answers are in coming, as a multiple of what steps of their work are predicted to take.

    What counts is the time since the answer before, or since the step was sent if that was later: steps that
    queue in the pipeline do not make each other late.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)

    def observe(self, waited_s: float, predicted_s: float) -> None:
        """An answer came after `waited_s`, to a step that was predicted to take `predicted_s`."""
        if predicted_s > 0:
            self._ratios.append(waited_s / predicted_s)

    def limit_s(self, predicted_s: float, *, unknown_s: float) -> float:
        """When to give up a step; `unknown_s` while nothing is known of such steps."""
        if not self._ratios or predicted_s <= 0:
            return max(MIN_PATIENCE_S, unknown_s)
        ordered = sorted(self._ratios)
        usual = ordered[math.ceil(_NEARLY_ALL * len(ordered)) - 1]
        return max(MIN_PATIENCE_S, SLOWDOWN * usual * predicted_s)
