"""Metric values of one process and their snapshots.

Adding to a number takes some 50 ns, observing a value some 200 ns; a snapshot copies all of them.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from telemetry.metrics.definitions import OTHER, SERIES_OVERFLOWS, Kind, Metric


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


class Number:
    """The value of a counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        """For what is read off; of a counter, somebody else's count."""
        self.value = value

    def point_value(self) -> float:
        return self.value


class Distribution:
    """The values of a histogram, counted by bucket; the last bucket is for what is above all bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def point_value(self) -> Buckets:
        return Buckets(tuple(self._counts), self._sum)


Series = TypeVar("Series", Number, Distribution)


class Family(Generic[Series]):
    """One metric with a series for each combination of label values."""

    def __init__(self, metric: Metric, new_series: Callable[[], Series], overflows: Number) -> None:
        self.metric = metric
        self._new_series: Callable[[], Series] = new_series
        self._overflows = overflows
        self._series: dict[tuple[str, ...], Series] = {}

    def of(self, *labels: str) -> Series:
        """The series with these values of the metric's labels; for hot paths to keep.

        Where there are too many series, that of OTHER. Raises ValueError for a value that the metric's
        definition does not have.
        """
        series = self._series.get(labels)
        return self._add(labels) if series is None else series

    def clear(self) -> None:
        """Forgets all series."""
        self._series.clear()

    def points(self) -> MetricPoints:
        points = [Point(labels, series.point_value()) for labels, series in self._series.items()]
        return MetricPoints(self.metric, tuple(points))

    def _add(self, labels: tuple[str, ...]) -> Series:
        expected = self.metric.labels
        if len(labels) != len(expected):
            raise ValueError(f"{self.metric.name} has {len(expected)} labels, got {labels}")
        for label, value in zip(expected, labels, strict=True):
            if label.values and value not in label.values:
                raise ValueError(f"{value!r} is no {label.name} of {self.metric.name}")
        if len(self._series) >= self.metric.max_series:
            self._overflows.add()
            labels = (OTHER,) * len(labels)
        return self._series.setdefault(labels, self._new_series())


class Registry:
    """The families of one process; made once, at its start."""

    def __init__(self, *, start_ns: int) -> None:
        """`start_ns` and all times are Unix times in nanoseconds."""
        self._start_ns = start_ns
        self._families: dict[str, Family[Number] | Family[Distribution]] = {}
        self._readers: list[Callable[[], None]] = []
        self._overflows = Number()
        overflows = self.number(SERIES_OVERFLOWS).of()
        self.read_with(lambda: overflows.set(self._overflows.value))

    def number(self, metric: Metric) -> Family[Number]:
        """The family of a counter or gauge; once for each metric."""
        assert metric.kind is not Kind.HISTOGRAM, metric.name
        family: Family[Number] = Family(metric, Number, self._overflows)
        self._keep(family)
        return family

    def distribution(self, metric: Metric) -> Family[Distribution]:
        """The family of a histogram; once for each metric."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        family: Family[Distribution] = Family(metric, lambda: Distribution(metric.bounds), self._overflows)
        self._keep(family)
        return family

    def read_with(self, reader: Callable[[], None]) -> None:
        """`reader` sets values before each snapshot."""
        self._readers.append(reader)

    def snapshot(self, now_ns: int) -> Snapshot:
        """All values as of now, which nobody changes any more."""
        for reader in self._readers:
            reader()
        return Snapshot(self._start_ns, now_ns, tuple([each.points() for each in self._families.values()]))

    def _keep(self, family: Family[Number] | Family[Distribution]) -> None:
        name = family.metric.name
        assert name not in self._families, f"two families of {name}"
        self._families[name] = family
