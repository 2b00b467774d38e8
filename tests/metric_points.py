"""Values of snapshots and of OTLP messages, by the labels of a metric's definition."""

from dataclasses import dataclass

from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint, ScopeMetrics

from telemetry.metrics.definitions import Metric, Process
from telemetry.metrics.otlp import DataPoint, known_points


@dataclass(frozen=True)
class Buckets:
    """A histogram's counts by bucket and the sum of its values."""

    counts: tuple[int, ...] = ()
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


Values = dict[tuple[str, ...], float | Buckets]


def values_of(snapshot: ScopeMetrics, metric: Metric) -> Values:
    """Empty if the metric has no series."""
    found: Values = {}
    for data in snapshot.metrics:
        if data.name == metric.name:
            assert (data.description, data.unit) == (metric.description, metric.unit)
            for point in data.data.data_points:
                assert point.attributes is not None
                labels = tuple(str(point.attributes[label.attribute]) for label in metric.labels)
                assert len(point.attributes) == len(labels)
                found[labels] = _value(point)  # type: ignore[arg-type]  # no exponential histograms here
    return found


def _value(point: NumberDataPoint | HistogramDataPoint) -> float | Buckets:
    if isinstance(point, NumberDataPoint):
        return point.value
    assert sum(point.bucket_counts) == point.count
    return Buckets(tuple(point.bucket_counts), point.sum)


def exported_values(message: ResourceMetrics, process: Process) -> dict[str, Values]:
    """Accepted points of an OTLP message, by metric name."""
    return {
        metric.name: {labels: _exported_value(point, metric) for labels, point in points.items()}
        for metric, points in known_points(message, process)
    }


def _exported_value(point: DataPoint, metric: Metric) -> float | Buckets:
    if isinstance(point, metrics_pb2.HistogramDataPoint):
        return Buckets(tuple(point.bucket_counts), point.sum)
    return point.as_int if metric.is_integer else point.as_double
