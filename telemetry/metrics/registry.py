"""Metric values of one process and their snapshots, in OpenTelemetry's data model.

Recording is ours because it runs with every step: adding to a number takes some 50 ns, observing a value some
200 ns, where an instrument of the SDK takes several microseconds (docs/telemetry.md has the figures).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    NumberDataPoint,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as MetricData
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry.metrics.definitions import CERTIFICATE_LEFT, OTHER, SERIES_OVERFLOWS, Kind, Metric
from wire.transport import CertificateLife

SCOPE = InstrumentationScope("stageline")
_CUMULATIVE = AggregationTemporality.CUMULATIVE

Attributes = Mapping[str, str | int]
TakeSnapshot = Callable[[], ScopeMetrics]
"""Call it on the event loop. The result does not change afterwards."""


class Number:
    """The value of a counter or gauge."""

    __slots__ = ("_attributes", "_is_integer", "value")

    def __init__(self, metric: Metric, attributes: Attributes) -> None:
        self.value: float = 0
        self._attributes = attributes
        self._is_integer = metric.is_integer

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        """Set a gauge, or a counter to a total that is counted elsewhere."""
        self.value = value

    def point(self, start_ns: int, time_ns: int) -> NumberDataPoint:
        value = int(self.value) if self._is_integer else float(self.value)
        return NumberDataPoint(self._attributes, start_ns, time_ns, value)


class Distribution:
    """The values of a histogram, counted by bucket; the last bucket is for values above all bounds."""

    __slots__ = ("_attributes", "_bounds", "_counts", "_sum")

    def __init__(self, metric: Metric, attributes: Attributes) -> None:
        self._attributes = attributes
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def point(self, start_ns: int, time_ns: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=self._attributes,
            start_time_unix_nano=start_ns,
            time_unix_nano=time_ns,
            count=sum(self._counts),
            sum=self._sum,
            bucket_counts=tuple(self._counts),
            explicit_bounds=self._bounds,
            min=None,  # type: ignore[arg-type]  # not recorded; OTLP leaves them out
            max=None,  # type: ignore[arg-type]
        )


Series = TypeVar("Series", Number, Distribution)


class Family(Generic[Series]):
    """One metric with a series for each combination of label values."""

    def __init__(self, metric: Metric, new_series: Callable[[Metric, Attributes], Series]) -> None:
        self.metric = metric
        self.num_overflows = 0
        self._new_series: Callable[[Metric, Attributes], Series] = new_series
        self._series: dict[tuple[str, ...], Series] = {}

    def of(self, *labels: str) -> Series:
        """The series with these label values, or the OTHER series beyond the limit; hot paths store it."""
        series = self._series.get(labels)
        return self._add(labels) if series is None else series

    def clear(self) -> None:
        """Remove all series."""
        self._series.clear()

    def data(self, start_ns: int, time_ns: int) -> MetricData:
        """A copy of all series."""
        metric = self.metric
        points: list[Any] = [series.point(start_ns, time_ns) for series in self._series.values()]
        data: Histogram | Gauge | Sum
        match metric.kind:
            case Kind.HISTOGRAM:
                data = Histogram(points, _CUMULATIVE)
            case Kind.GAUGE:
                data = Gauge(points)
            case _:
                data = Sum(points, _CUMULATIVE, metric.kind is Kind.COUNTER)
        return MetricData(metric.name, metric.description, metric.unit, data)

    def _add(self, labels: tuple[str, ...]) -> Series:
        expected = self.metric.labels
        if len(labels) != len(expected):
            raise ValueError(f"{self.metric.name} has {len(expected)} labels, got {labels}")
        for label, value in zip(expected, labels, strict=True):
            if label.values and value not in label.values:
                raise ValueError(f"{value!r} is no {label.name} of {self.metric.name}")
        if len(self._series) >= self.metric.max_series:
            self.num_overflows += 1
            labels = (OTHER,) * len(labels)
        return self._series.setdefault(labels, self._new_series(self.metric, self._attributes(labels)))

    def _attributes(self, labels: tuple[str, ...]) -> Attributes:
        return {
            label.attribute: int(value) if label.is_integer and value.isdecimal() else value
            for label, value in zip(self.metric.labels, labels, strict=True)
        }


class Registry:
    """The families of one process; created once, at its start."""

    def __init__(self, *, start_ns: int) -> None:
        """`start_ns` and all times are Unix times in nanoseconds."""
        self._start_ns = start_ns
        self._families: dict[str, Family[Number] | Family[Distribution]] = {}
        self._readers: list[Callable[[], None]] = []
        self._overflows = self.number(SERIES_OVERFLOWS).of()

    def number(self, metric: Metric) -> Family[Number]:
        """Create the family of a counter or gauge; once for each metric."""
        assert metric.kind is not Kind.HISTOGRAM, metric.name
        family: Family[Number] = Family(metric, Number)
        self._register(family)
        return family

    def distribution(self, metric: Metric) -> Family[Distribution]:
        """Create the family of a histogram; once for each metric."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        family: Family[Distribution] = Family(metric, Distribution)
        self._register(family)
        return family

    def read_with(self, reader: Callable[[], None]) -> None:
        """`reader` sets values before each snapshot."""
        self._readers.append(reader)

    def snapshot(self, time_ns: int) -> ScopeMetrics:
        """Copy all values. Metrics without a series are left out."""
        for reader in self._readers:
            reader()
        families = self._families.values()
        self._overflows.set(sum(family.num_overflows for family in families))
        metrics = [family.data(self._start_ns, time_ns) for family in families]
        recorded = [metric for metric in metrics if metric.data.data_points]
        return ScopeMetrics(scope=SCOPE, metrics=recorded, schema_url="")

    def _register(self, family: Family[Number] | Family[Distribution]) -> None:
        name = family.metric.name
        assert name not in self._families, f"two families of {name}"
        self._families[name] = family


def watch_certificate(registry: Registry, life: Callable[[], CertificateLife | None]) -> None:
    """Report how long the certificate of this process is valid, if it has one."""
    family = registry.number(CERTIFICATE_LEFT)

    def read() -> None:
        if (current := life()) is not None:
            family.of().set(current.left_s)

    registry.read_with(read)
