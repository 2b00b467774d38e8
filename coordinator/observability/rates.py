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
"""Minimum duration; with it a duration up to a day falls into one of 1,260 buckets."""
_MOST_S = 86400.0


class LatencySketch:
    """Durations in seconds, each with a count."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = dict[int, int]()

    def add(self, duration_s: float, count: int = 1) -> None:
        """Add a duration `count` times."""
        bounded_s = min(max(duration_s, _LEAST_S), _MOST_S)
        bucket = math.ceil(math.log(bounded_s) * _PER_LOG)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    @classmethod
    def merged(cls, sketches: Iterable["LatencySketch"]) -> "LatencySketch":
        """Sum of sketches."""
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
                # the middle of the bucket: both ends are within RELATIVE_ERROR
                return 2 * _GROWTH**bucket / (_GROWTH + 1)
        return None


KEPT_S = 300
RECENT_S = 10
"""Window of current rates and quantiles."""


@dataclass(slots=True)
class Second:
    """Counts of one second of the monotonic clock, from `start_s` on.

    `num_unfinished` counts requests that failed or were cancelled.
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
    """Quantiles of durations in seconds; None without durations."""

    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, sketch: LatencySketch) -> "Quantiles":
        return cls(sketch.count, sketch.quantile(0.5), sketch.quantile(0.95), sketch.quantile(0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSecond:
    """Final counts of one second."""

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
    """Rates per second over the last `window_s` seconds, and latencies of the tokens in them."""

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
    """Counts of each second with activity."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._recent = deque[Second](maxlen=RECENT_S)
        self._past = deque[PastSecond](maxlen=KEPT_S)

    def at(self, now_s: float) -> Second:
        """The current second, to be updated."""
        start_s = math.floor(now_s)
        if self._recent and self._recent[-1].start_s == start_s:
            return self._recent[-1]
        if self._recent:
            self._past.append(PastSecond.of(self._recent[-1]))
        self._recent.append(Second(start_s))
        return self._recent[-1]

    def kept(self, now_s: float) -> tuple[PastSecond, ...]:
        """Seconds of the last `KEPT_S`, oldest first; the last may be the current one."""
        present = [PastSecond.of(second) for second in list(self._recent)[-1:]]
        return tuple([second for second in (*self._past, *present) if second.start_s > now_s - KEPT_S])

    def rates(self, now_s: float) -> Rates:
        """Rates over the last nine whole seconds and the current one."""
        first_s = math.floor(now_s) - RECENT_S + 1
        recent = [second for second in self._recent if second.start_s >= first_s]
        window_s = max(now_s - max(first_s, self._began_s), 1e-3)
        return Rates(
            window_s=window_s,
            generated_tokens=sum(second.num_generated_tokens for second in recent) / window_s,
            prefill_tokens=sum(second.num_prefill_tokens for second in recent) / window_s,
            steps=sum(second.num_steps for second in recent) / window_s,
            accepted=sum(second.num_accepted for second in recent) / window_s,
            finished=sum(second.num_finished for second in recent) / window_s,
            unfinished=sum(second.num_unfinished for second in recent) / window_s,
            first_token=Quantiles.of(LatencySketch.merged(second.first_token for second in recent)),
            inter_token=Quantiles.of(LatencySketch.merged(second.inter_token for second in recent)),
        )
