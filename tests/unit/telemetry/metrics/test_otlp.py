"""OTLP messages: there and back, against the SDK's own encoder, and what a stranger may send."""

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics as encode_sdk
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.resources import Resource

from telemetry.metrics import definitions
from telemetry.metrics.definitions import Process
from telemetry.metrics.otlp import decode_metrics, encode_metrics, resource_attributes
from telemetry.metrics.registry import MetricPoints, Snapshot
from telemetry.metrics.sdk_form import sdk_metrics
from tests.unit.telemetry.metrics.snapshots import (
    NOW_NS,
    START_NS,
    coordinator_snapshot,
    worker_snapshot,
)

RESOURCE = {"service.name": "stageline-worker", "service.instance.id": "w0"}


def message(snapshot: Snapshot) -> metrics_pb2.ResourceMetrics:
    data = encode_metrics(snapshot, RESOURCE).SerializeToString()
    (found,) = ExportMetricsServiceRequest.FromString(data).resource_metrics
    return found


def metric_of(found: metrics_pb2.ResourceMetrics, name: str) -> metrics_pb2.Metric:
    (metric,) = (each for each in found.scope_metrics[0].metrics if each.name == name)
    return metric


def recorded(snapshot: Snapshot) -> tuple[MetricPoints, ...]:
    return tuple(each for each in snapshot.metrics if each.points)


def test_what_a_worker_sends_arrives() -> None:
    found = message(worker_snapshot())
    decoded = decode_metrics(found, Process.WORKER)
    assert decoded.metrics == recorded(worker_snapshot())
    assert (decoded.start_ns, decoded.time_ns) == (START_NS, NOW_NS)
    assert resource_attributes(found) == RESOURCE


def test_sums_are_cumulative_and_say_since_when() -> None:
    found = message(coordinator_snapshot())
    ended = metric_of(found, definitions.REQUESTS_ENDED.name)
    assert ended.sum.is_monotonic
    assert ended.sum.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = ended.sum.data_points
    assert (point.start_time_unix_nano, point.time_unix_nano, point.as_int) == (START_NS, NOW_NS, 7)
    assert not metric_of(found, definitions.RESIDENT_MEMORY.name).sum.is_monotonic
    times = metric_of(found, definitions.REQUEST_TIME.name).histogram
    assert times.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert sum(times.data_points[0].bucket_counts) == times.data_points[0].count == 4


def test_a_stage_is_an_integer_as_in_spans() -> None:
    busy = metric_of(message(worker_snapshot("2")), definitions.BUSY_TIME.name)
    (attribute,) = busy.sum.data_points[0].attributes
    assert (attribute.key, attribute.value.int_value) == ("stageline.stage.index", 2)
    other = metric_of(message(worker_snapshot("other")), definitions.BUSY_TIME.name)
    assert other.sum.data_points[0].attributes[0].value.string_value == "other"
    assert decode_metrics(message(worker_snapshot("other")), Process.WORKER).metrics


def test_the_sdk_says_the_same() -> None:
    for snapshot in (coordinator_snapshot(), worker_snapshot()):
        (ours,) = encode_metrics(snapshot, RESOURCE).resource_metrics
        (sdk,) = encode_sdk(sdk_metrics(snapshot, Resource(RESOURCE))).resource_metrics
        for metric in sdk.scope_metrics[0].metrics:
            for point in metric.gauge.data_points:
                # Of a gauge it leaves out since when, which has no meaning there.
                point.start_time_unix_nano = START_NS
        assert sdk.scope_metrics[0].metrics == ours.scope_metrics[0].metrics
        assert resource_attributes(sdk) == resource_attributes(ours)


def test_what_is_not_in_the_table_is_left_out() -> None:
    found = message(worker_snapshot())
    found.scope_metrics[0].metrics.add(name="stageline.unheard.of").sum.data_points.add(as_int=1)
    found.scope_metrics[0].metrics.add(name=definitions.REQUESTS_ENDED.name).sum.data_points.add(as_int=1)
    # The same again, and of another kind.
    found.scope_metrics[0].metrics.add(name=definitions.BUSY_TIME.name).sum.data_points.add(as_double=9)
    assert decode_metrics(found, Process.WORKER).metrics == recorded(worker_snapshot())


def test_points_that_make_no_sense_are_left_out() -> None:
    found = message(worker_snapshot())
    busy = metric_of(found, definitions.BUSY_TIME.name)
    good = metrics_pb2.NumberDataPoint.FromString(busy.sum.data_points[0].SerializeToString())
    del busy.sum.data_points[:]
    unlabelled, twice, infinite = (busy.sum.data_points.add() for _ in range(3))
    for point in (unlabelled, twice, infinite):
        point.CopyFrom(good)
    del unlabelled.attributes[:]
    twice.attributes.add(key="stageline.worker.name").value.string_value = "w1"
    infinite.as_double = float("inf")
    steps = metric_of(found, definitions.STAGE_STEP_TIME.name)
    steps.histogram.data_points[0].explicit_bounds[0] = 0.25
    blocks = metric_of(found, definitions.KV_BLOCKS.name)
    blocks.sum.data_points[0].attributes[1].value.string_value = "stolen"
    decoded = {each.metric.name: each.points for each in decode_metrics(found, Process.WORKER).metrics}
    for name in (definitions.BUSY_TIME, definitions.STAGE_STEP_TIME, definitions.KV_BLOCKS):
        assert decoded[name.name] == ()


def test_a_series_is_there_once_and_there_are_not_too_many() -> None:
    found = message(worker_snapshot())
    points = metric_of(found, definitions.BUSY_TIME.name).sum.data_points
    for stage in range(2000):
        point = points.add(as_double=1.0)
        point.attributes.add(key="stageline.stage.index").value.int_value = stage % 1000
    decoded = {each.metric.name: each.points for each in decode_metrics(found, Process.WORKER).metrics}
    labels = [point.labels for point in decoded[definitions.BUSY_TIME.name]]
    assert len(labels) == len(set(labels)) <= definitions.BUSY_TIME.max_series + 1
