"""OTLP messages of metrics: written by the SDK's encoder, read against the table of definitions.

Temporality is cumulative: every export has the totals since the process began, so a lost one loses nothing.
"""

import math
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, NumberDataPoint
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource

from telemetry.metrics.definitions import METRICS, Kind, Metric, Process

DataPoint = NumberDataPoint | HistogramDataPoint
Points = dict[tuple[str, ...], DataPoint]
"""Points by the values of the metric's labels, in their order."""

_BY_NAME = {metric.name: metric for metric in METRICS}
_MAX_LABEL_CHARACTERS = 64


def metrics_data(snapshot: ScopeMetrics, resource: Resource) -> MetricsData:
    """A snapshot as the SDK's exporters and encoder take it."""
    process = ResourceMetrics(resource=resource, scope_metrics=[snapshot], schema_url="")
    return MetricsData([process])


def export_request(snapshot: ScopeMetrics, resource: Resource) -> ExportMetricsServiceRequest:
    """A snapshot as `MetricsService.Export` takes it."""
    return encode_metrics(metrics_data(snapshot, resource))


def resource_attributes(message: metrics_pb2.ResourceMetrics) -> dict[str, str]:
    """The text attributes of the process."""
    attributes = message.resource.attributes
    return {pair.key: pair.value.string_value for pair in attributes if pair.value.HasField("string_value")}


def known_points(message: metrics_pb2.ResourceMetrics, process: Process) -> list[tuple[Metric, Points]]:
    """The exported metrics that the table has for `process`, each once, with their valid points."""
    known: dict[str, tuple[Metric, Points]] = {}
    for scope in message.scope_metrics:
        for exported in scope.metrics:
            metric = _BY_NAME.get(exported.name)
            if metric is not None and process in metric.processes and exported.name not in known:
                known[exported.name] = (metric, _valid_points(exported, metric))
    return list(known.values())


def _valid_points(exported: metrics_pb2.Metric, metric: Metric) -> Points:
    points: Points = {}
    for point in list(_data_points(exported, metric))[: metric.max_series + 1]:
        labels = _labels(point.attributes, metric)
        if labels is not None and _is_valid(point, metric):
            points[labels] = point
    return points


def _data_points(exported: metrics_pb2.Metric, metric: Metric) -> Iterable[DataPoint]:
    """Empty if the exported metric is of another kind."""
    match metric.kind:
        case Kind.HISTOGRAM:
            return exported.histogram.data_points
        case Kind.GAUGE:
            return exported.gauge.data_points
        case _:
            return exported.sum.data_points


def _is_valid(point: DataPoint, metric: Metric) -> bool:
    """Whether the value is finite, and the buckets are the table's."""
    if isinstance(point, NumberDataPoint):
        return metric.is_integer or math.isfinite(point.as_double)
    has_bounds = tuple(point.explicit_bounds) == metric.bounds
    return has_bounds and len(point.bucket_counts) == len(metric.bounds) + 1 and math.isfinite(point.sum)


def _labels(attributes: Iterable[KeyValue], metric: Metric) -> tuple[str, ...] | None:
    """None unless the attributes are the metric's labels, with allowed values."""
    values = {pair.key: _label_text(pair.value) for pair in attributes}
    if len(values) != len(metric.labels):
        return None
    labels: list[str] = []
    for label in metric.labels:
        value = values.get(label.attribute)
        if value is None or (label.values and value not in label.values):
            return None
        labels.append(value)
    return tuple(labels)


def _label_text(value: AnyValue) -> str:
    text = str(value.int_value) if value.HasField("int_value") else value.string_value
    return text[:_MAX_LABEL_CHARACTERS]
