"""Snapshots as the SDK's exporters take them. Importing this costs a process 2 MB."""

from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry.metrics.definitions import Kind, Metric
from telemetry.metrics.otlp import SCOPE
from telemetry.metrics.registry import Buckets, MetricPoints, Point, Snapshot

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def sdk_metrics(snapshot: Snapshot, resource: Resource) -> MetricsData:
    """All metrics of one process."""
    metrics = [_metric(each, snapshot) for each in snapshot.metrics if each.points]
    scope = ScopeMetrics(scope=InstrumentationScope(SCOPE), metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _metric(points: MetricPoints, snapshot: Snapshot) -> SdkMetric:
    metric = points.metric
    return SdkMetric(metric.name, metric.description, metric.unit, _data(points, snapshot))


def _data(points: MetricPoints, snapshot: Snapshot) -> Sum | Gauge | Histogram:
    metric = points.metric
    if metric.kind is Kind.HISTOGRAM:
        return Histogram([_histogram_point(each, metric, snapshot) for each in points.points], _CUMULATIVE)
    numbers = [_number_point(each, metric, snapshot) for each in points.points]
    if metric.kind is Kind.GAUGE:
        return Gauge(numbers)
    return Sum(numbers, _CUMULATIVE, metric.kind is Kind.COUNTER)


def _number_point(point: Point, metric: Metric, snapshot: Snapshot) -> NumberDataPoint:
    assert not isinstance(point.value, Buckets)
    return NumberDataPoint(
        attributes=_attributes(point, metric),
        start_time_unix_nano=snapshot.start_ns,
        time_unix_nano=snapshot.time_ns,
        value=int(point.value) if metric.is_integer else float(point.value),
    )


def _histogram_point(point: Point, metric: Metric, snapshot: Snapshot) -> HistogramDataPoint:
    assert isinstance(point.value, Buckets)
    return HistogramDataPoint(
        attributes=_attributes(point, metric),
        start_time_unix_nano=snapshot.start_ns,
        time_unix_nano=snapshot.time_ns,
        count=point.value.count,
        sum=point.value.sum,
        bucket_counts=point.value.counts,
        explicit_bounds=metric.bounds,
        min=None,  # type: ignore[arg-type]  # not known; the message leaves them out
        max=None,  # type: ignore[arg-type]
    )


def _attributes(point: Point, metric: Metric) -> Mapping[str, str | int]:
    return {
        label.attribute: int(value) if label.is_integer and value.isdecimal() else value
        for label, value in zip(metric.labels, point.labels, strict=True)
    }
