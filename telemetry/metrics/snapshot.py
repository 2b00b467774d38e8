"""The values of all metrics of one process at one moment. Data only."""

from collections.abc import Callable
from dataclasses import dataclass

from telemetry.metrics.metric import Metric


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: how many values fell into each bucket, the one above all bounds last, and their sum."""

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Point:
    """One series; `labels` are the values of the metric's labels, in their order."""

    labels: tuple[str, ...]
    value: float | Buckets


@dataclass(frozen=True, slots=True)
class MetricPoints:
    """All series of one metric."""

    metric: Metric
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Times are Unix times in nanoseconds; counters and histograms count from `start_ns` on."""

    start_ns: int
    time_ns: int
    metrics: tuple[MetricPoints, ...]


TakeSnapshot = Callable[[], Snapshot]
"""To be called on the event loop."""
