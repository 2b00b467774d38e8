"""Rates and latency quantiles per second over five minutes. Pure.

A logarithmic histogram, as in DDSketch (Masson, Rim and Lee, 2019): bucket i holds durations in
(GROWTH^(i-1), GROWTH^i] seconds.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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


KEPT_S = 300
RECENT_S = 10
"""What rates and quantiles of "now" are over."""


@dataclass(slots=True)
class Second:
    """What is counted in one second of the monotonic clock, from `start_s` on.

    `num_unfinished` are requests that ended with an error or were cancelled.
    """

    start_s: int
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    num_finished: int = 0
    num_unfinished: int = 0
    first_token: LatencySketch = field(default_factory=LatencySketch)
    inter_token: LatencySketch = field(default_factory=LatencySketch)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of durations, in seconds; None where there was none."""

    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, sketch: LatencySketch) -> "Quantiles":
        """What a sketch holds."""
        return cls(sketch.count, sketch.quantile(0.5), sketch.quantile(0.95), sketch.quantile(0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSecond:
    """What a second has come to."""

    start_s: int
    num_generated_tokens: int
    num_prefill_tokens: int
    num_steps: int
    num_accepted: int
    num_finished: int
    num_unfinished: int
    first_token: Quantiles
    inter_token: Quantiles

    @classmethod
    def of(cls, second: Second) -> "PastSecond":
        """As far as it has come."""
        return cls(
            start_s=second.start_s,
            num_generated_tokens=second.num_generated_tokens,
            num_prefill_tokens=second.num_prefill_tokens,
            num_steps=second.num_steps,
            num_accepted=second.num_accepted,
            num_finished=second.num_finished,
            num_unfinished=second.num_unfinished,
            first_token=Quantiles.of(second.first_token),
            inter_token=Quantiles.of(second.inter_token),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the last `window_s` seconds, each per second, and the waits for tokens that ended in them."""

    window_s: float
    generated_tokens: float
    prefill_tokens: float
    steps: float
    accepted: float
    finished: float
    unfinished: float
    first_token: Quantiles
    inter_token: Quantiles


class PerSecond:
    """The seconds in which something happened; others are left out."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._recent = deque[Second](maxlen=RECENT_S)
        self._past = deque[PastSecond](maxlen=KEPT_S)

    def at(self, now_s: float) -> Second:
        """The present second, to be added to."""
        start_s = math.floor(now_s)
        if self._recent and self._recent[-1].start_s == start_s:
            return self._recent[-1]
        if self._recent:
            self._past.append(PastSecond.of(self._recent[-1]))
        self._recent.append(Second(start_s))
        return self._recent[-1]

    def kept(self, now_s: float) -> tuple[PastSecond, ...]:
        """Those of the last `KEPT_S`, oldest first; the last one may be the present second."""
        present = [PastSecond.of(each) for each in list(self._recent)[-1:]]
        return tuple([each for each in (*self._past, *present) if each.start_s > now_s - KEPT_S])

    def rates(self, now_s: float) -> Rates:
        """Over the last nine whole seconds and what there is of the present one."""
        first_s = math.floor(now_s) - RECENT_S + 1
        recent = [each for each in self._recent if each.start_s >= first_s]
        window_s = max(now_s - max(first_s, self._began_s), 1e-3)
        return Rates(
            window_s=window_s,
            generated_tokens=sum(each.num_generated_tokens for each in recent) / window_s,
            prefill_tokens=sum(each.num_prefill_tokens for each in recent) / window_s,
            steps=sum(each.num_steps for each in recent) / window_s,
            accepted=sum(each.num_accepted for each in recent) / window_s,
            finished=sum(each.num_finished for each in recent) / window_s,
            unfinished=sum(each.num_unfinished for each in recent) / window_s,
            first_token=Quantiles.of(LatencySketch.merged(each.first_token for each in recent)),
            inter_token=Quantiles.of(LatencySketch.merged(each.inter_token for each in recent)),
        )
