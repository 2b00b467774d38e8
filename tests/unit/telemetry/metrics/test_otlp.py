"""Encoding of snapshots as OTLP messages, and validation of exported points."""

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.metrics.export import ScopeMetrics
from opentelemetry.sdk.resources import Resource

from telemetry.metrics import definitions
from telemetry.metrics.definitions import Metric, Process
from telemetry.metrics.otlp import export_request, known_points, resource_attributes
from tests.metric_points import Values, exported_values, values_of
from tests.unit.telemetry.metrics.snapshots import (
    NOW_NS,
    START_NS,
    coordinator_snapshot,
    worker_snapshot,
)

RESOURCE = {"service.name": "stageline-worker", "service.instance.id": "w0"}


def message(snapshot: ScopeMetrics) -> metrics_pb2.ResourceMetrics:
    data = export_request(snapshot, Resource(RESOURCE)).SerializeToString()
    (found,) = ExportMetricsServiceRequest.FromString(data).resource_metrics
    return found


def metric_of(found: metrics_pb2.ResourceMetrics, metric: Metric) -> metrics_pb2.Metric:
    (exported,) = (data for data in found.scope_metrics[0].metrics if data.name == metric.name)
    return exported


def recorded(snapshot: ScopeMetrics) -> dict[str, Values]:
    values = {metric.name: values_of(snapshot, metric) for metric in definitions.METRICS}
    return {name: found for name, found in values.items() if found}


def test_the_coordinator_reads_exports_of_a_worker() -> None:
    found = message(worker_snapshot())
    assert exported_values(found, Process.WORKER) == recorded(worker_snapshot())
    assert resource_attributes(found) == RESOURCE


def test_sums_are_cumulative_since_the_start() -> None:
    found = message(coordinator_snapshot())
    ended = metric_of(found, definitions.REQUESTS_ENDED)
    assert ended.sum.is_monotonic
    assert ended.sum.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = ended.sum.data_points
    assert (point.start_time_unix_nano, point.time_unix_nano, point.as_int) == (START_NS, NOW_NS, 7)
    assert not metric_of(found, definitions.RESIDENT_MEMORY).sum.is_monotonic
    times = metric_of(found, definitions.REQUEST_TIME).histogram
    assert times.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    (buckets,) = times.data_points
    assert sum(buckets.bucket_counts) == buckets.count == 4
    assert not buckets.HasField("min")
    assert not buckets.HasField("max")
    assert (buckets.start_time_unix_nano, buckets.time_unix_nano) == (START_NS, NOW_NS)


def test_a_stage_is_an_integer_as_in_spans() -> None:
    busy = metric_of(message(worker_snapshot("2")), definitions.BUSY_TIME)
    (attribute,) = busy.sum.data_points[0].attributes
    assert (attribute.key, attribute.value.int_value) == ("stageline.stage.index", 2)
    other = message(worker_snapshot("other"))
    (attribute,) = metric_of(other, definitions.BUSY_TIME).sum.data_points[0].attributes
    assert attribute.value.string_value == "other"
    assert exported_values(other, Process.WORKER)[definitions.BUSY_TIME.name] == {("other",): 1.5}


def test_every_message_has_names_units_and_descriptions_of_the_table() -> None:
    metrics = {metric.name: metric for metric in definitions.METRICS}
    for snapshot in (coordinator_snapshot(), worker_snapshot()):
        scope = message(snapshot).scope_metrics[0]
        assert scope.scope.name == "stageline"
        for exported in scope.metrics:
            metric = metrics[exported.name]
            assert (exported.unit, exported.description) == (metric.unit, metric.description)


def test_metrics_outside_the_table_are_left_out() -> None:
    found = message(worker_snapshot())
    found.scope_metrics[0].metrics.add(name="stageline.unheard.of").sum.data_points.add(as_int=1)
    found.scope_metrics[0].metrics.add(name=definitions.REQUESTS_ENDED.name).sum.data_points.add(as_int=1)
    # A duplicate metric, and one of another kind.
    found.scope_metrics[0].metrics.add(name=definitions.BUSY_TIME.name).sum.data_points.add(as_double=9)
    assert exported_values(found, Process.WORKER) == recorded(worker_snapshot())


def test_invalid_points_are_left_out() -> None:
    found = message(worker_snapshot())
    busy = metric_of(found, definitions.BUSY_TIME)
    good = metrics_pb2.NumberDataPoint.FromString(busy.sum.data_points[0].SerializeToString())
    del busy.sum.data_points[:]
    unlabelled, twice, infinite = (busy.sum.data_points.add() for _ in range(3))
    for point in (unlabelled, twice, infinite):
        point.CopyFrom(good)
    del unlabelled.attributes[:]
    twice.attributes.add(key="stageline.worker.name").value.string_value = "w1"
    infinite.as_double = float("inf")
    metric_of(found, definitions.STAGE_STEP_TIME).histogram.data_points[0].explicit_bounds[0] = 0.25
    metric_of(found, definitions.KV_BLOCKS).sum.data_points[0].attributes[1].value.string_value = "stolen"
    points = dict(known_points(found, Process.WORKER))
    for metric in (definitions.BUSY_TIME, definitions.STAGE_STEP_TIME, definitions.KV_BLOCKS):
        assert points[metric] == {}


def test_series_are_unique_and_bounded() -> None:
    found = message(worker_snapshot())
    points = metric_of(found, definitions.BUSY_TIME).sum.data_points
    for stage in range(2000):
        point = points.add(as_double=1.0)
        point.attributes.add(key="stageline.stage.index").value.int_value = stage % 1000
    stages = dict(known_points(found, Process.WORKER))[definitions.BUSY_TIME]
    assert len(stages) <= definitions.BUSY_TIME.max_series + 1
