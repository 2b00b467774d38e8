"""Snapshots <-> OTLP messages, without the SDK: 2 MB that a worker does not need.

Temporality is cumulative: every export has the totals since the process began, so a lost one loses nothing.
"""

import math
from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from telemetry.metrics.definitions import METRICS, Kind, Label, Metric, Process
from telemetry.metrics.registry import Buckets, MetricPoints, Point, Snapshot

SCOPE = "stageline"
_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
_BY_NAME = {metric.name: metric for metric in METRICS}


def encode_metrics(snapshot: Snapshot, resource: Mapping[str, str]) -> ExportMetricsServiceRequest:
    """What `MetricsService.Export` takes; `resource` are the attributes of the process."""
    metrics = [_encode_metric(each, snapshot) for each in snapshot.metrics if each.points]
    return ExportMetricsServiceRequest(
        resource_metrics=[
            metrics_pb2.ResourceMetrics(
                resource=Resource(attributes=[_text(*item) for item in resource.items()]),
                scope_metrics=[
                    metrics_pb2.ScopeMetrics(scope=InstrumentationScope(name=SCOPE), metrics=metrics)
                ],
            )
        ]
    )


def decode_metrics(message: metrics_pb2.ResourceMetrics, process: Process) -> Snapshot:
    """What one process has exported, as far as its metrics and their labels are in the table for `process`;
    anything else is left out.
    """
    start_ns = time_ns = 0
    metrics: dict[str, MetricPoints] = {}
    for scope in message.scope_metrics:
        for each in scope.metrics:
            metric = _BY_NAME.get(each.name)
            if metric is None or process not in metric.processes or each.name in metrics:
                continue
            data_points = list(_data_points(each, metric))[: metric.max_series + 1]
            decoded = [point for point in (_decode_point(data, metric) for data in data_points) if point]
            points = {point.labels: point for point in decoded}
            metrics[each.name] = MetricPoints(metric, tuple(points.values()))
            for data in data_points[:1]:
                start_ns, time_ns = max(start_ns, data.start_time_unix_nano), data.time_unix_nano
    return Snapshot(start_ns, time_ns, tuple(metrics.values()))


def resource_attributes(message: metrics_pb2.ResourceMetrics) -> dict[str, str]:
    """Those that are text."""
    attributes = message.resource.attributes
    return {each.key: each.value.string_value for each in attributes if each.value.HasField("string_value")}


def _encode_metric(points: MetricPoints, snapshot: Snapshot) -> metrics_pb2.Metric:
    metric = points.metric
    message = metrics_pb2.Metric(name=metric.name, description=metric.description, unit=metric.unit)
    if metric.kind is Kind.HISTOGRAM:
        message.histogram.aggregation_temporality = _CUMULATIVE
        message.histogram.data_points.extend(
            [_histogram_point(point, metric, snapshot) for point in points.points]
        )
        return message
    numbers = [_number_point(point, metric, snapshot) for point in points.points]
    if metric.kind is Kind.GAUGE:
        message.gauge.data_points.extend(numbers)
    else:
        message.sum.aggregation_temporality = _CUMULATIVE
        message.sum.is_monotonic = metric.kind is Kind.COUNTER
        message.sum.data_points.extend(numbers)
    return message


def _number_point(point: Point, metric: Metric, snapshot: Snapshot) -> metrics_pb2.NumberDataPoint:
    assert not isinstance(point.value, Buckets)
    message = metrics_pb2.NumberDataPoint(
        attributes=_attributes(point, metric),
        start_time_unix_nano=snapshot.start_ns,
        time_unix_nano=snapshot.time_ns,
    )
    if metric.is_integer:
        message.as_int = int(point.value)
    else:
        message.as_double = point.value
    return message


def _histogram_point(point: Point, metric: Metric, snapshot: Snapshot) -> metrics_pb2.HistogramDataPoint:
    assert isinstance(point.value, Buckets)
    return metrics_pb2.HistogramDataPoint(
        attributes=_attributes(point, metric),
        start_time_unix_nano=snapshot.start_ns,
        time_unix_nano=snapshot.time_ns,
        count=point.value.count,
        sum=point.value.sum,
        bucket_counts=point.value.counts,
        explicit_bounds=metric.bounds,
    )


def _attributes(point: Point, metric: Metric) -> list[KeyValue]:
    return [_attribute(label, value) for label, value in zip(metric.labels, point.labels, strict=True)]


def _attribute(label: Label, value: str) -> KeyValue:
    if label.is_integer and value.isdecimal():
        return KeyValue(key=label.attribute, value=AnyValue(int_value=int(value)))
    return _text(label.attribute, value)


def _text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def _data_points(
    message: metrics_pb2.Metric, metric: Metric
) -> Iterable[metrics_pb2.NumberDataPoint | metrics_pb2.HistogramDataPoint]:
    """None where the message is of another kind than the metric."""
    match metric.kind:
        case Kind.HISTOGRAM:
            return message.histogram.data_points
        case Kind.GAUGE:
            return message.gauge.data_points
        case _:
            return message.sum.data_points


def _decode_point(
    data: metrics_pb2.NumberDataPoint | metrics_pb2.HistogramDataPoint, metric: Metric
) -> Point | None:
    """None for other labels, other buckets, and values that are no numbers."""
    labels = _decode_labels(data.attributes, metric)
    if labels is None:
        return None
    if isinstance(data, metrics_pb2.HistogramDataPoint):
        is_sound = tuple(data.explicit_bounds) == metric.bounds and math.isfinite(data.sum)
        if not is_sound or len(data.bucket_counts) != len(metric.bounds) + 1:
            return None
        return Point(labels, Buckets(tuple(data.bucket_counts), data.sum))
    value = data.as_int if metric.is_integer else data.as_double
    return Point(labels, value) if math.isfinite(value) else None


def _decode_labels(attributes: Iterable[KeyValue], metric: Metric) -> tuple[str, ...] | None:
    values = {each.key: _label_text(each.value) for each in attributes}
    if len(values) != len(metric.labels):
        return None
    labels = [values.get(label.attribute) for label in metric.labels]
    is_known = all(
        value is not None and (not label.values or value in label.values)
        for label, value in zip(metric.labels, labels, strict=True)
    )
    return tuple([value for value in labels if value is not None]) if is_known else None


def _label_text(value: AnyValue) -> str:
    text = str(value.int_value) if value.HasField("int_value") else value.string_value
    return text[:64]
