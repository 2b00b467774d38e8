"""Many durations in little room, with quantiles that are at most 1 % off. Pure.

A logarithmic histogram, as in DDSketch (Masson, Rim and Lee, 2019): bucket i holds durations in
(GROWTH^(i-1), GROWTH^i] seconds.
"""

import math
from collections.abc import Iterable

RELATIVE_ERROR = 0.01
_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_LEAST_S = 1e-6
"""What is shorter counts as this; so a duration up to a day falls into one of 1,260 buckets."""
_MOST_S = 86400.0


class LatencySketch:
    """Durations in seconds, each with a count."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = dict[int, int]()

    def add(self, duration_s: float, count: int = 1) -> None:
        """Takes a duration that was seen `count` times."""
        bounded_s = min(max(duration_s, _LEAST_S), _MOST_S)
        bucket = math.ceil(math.log(bounded_s) * _PER_LOG)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    @classmethod
    def merged(cls, sketches: Iterable["LatencySketch"]) -> "LatencySketch":
        """Everything that these hold."""
        merged = cls()
        for sketch in sketches:
            for bucket, count in sketch._counts.items():
                merged._counts[bucket] = merged._counts.get(bucket, 0) + count
        return merged

    def quantile(self, share: float) -> float | None:
        """The duration in seconds that a share (0 to 1) of all does not exceed; None without durations."""
        rank = max(1, math.ceil(share * self.count))
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                # The middle of the bucket, so that neither end is more than RELATIVE_ERROR away.
                return 2 * _GROWTH**bucket / (_GROWTH + 1)
        return None
