"""What workers may tell, how much of it is kept, and for how long."""

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from coordinator.observing.worker_metrics import KEPT_S, MAX_BYTES, WorkerMetrics, exposed_workers
from telemetry.metrics import definitions
from telemetry.metrics.otlp import encode_metrics
from telemetry.metrics.snapshot import MetricPoints
from tests.unit.telemetry.metrics.snapshots import worker_snapshot

NUM_POINTS = 6
"""What a worker tells at once, here."""


def export(name: str, stage: str = "0", service: str = "stageline-worker") -> ExportMetricsServiceRequest:
    resource = {"service.name": service, "service.instance.id": name}
    return encode_metrics(worker_snapshot(stage), resource)


def points(workers: WorkerMetrics) -> dict[str, MetricPoints]:
    """Of the busy time, by worker."""
    return {
        each.worker: points
        for each in exposed_workers(workers.last())
        for points in each.snapshot.metrics
        if points.metric is definitions.BUSY_TIME
    }


def test_the_last_of_each_worker_counts() -> None:
    workers = WorkerMetrics(lambda: {"w0", "w1"})
    for name, stage in (("w1", "1"), ("w0", "0"), ("w0", "2")):
        assert workers.take(export(name, stage), 0.0) == 0
    found = points(workers)
    assert list(found) == ["w0", "w1"]
    assert found["w0"].points[0].labels == ("2",)
    assert found["w1"].points[0].labels == ("1",)


@pytest.mark.parametrize(
    "request_",
    [export("stranger"), export(""), export("w0", service="stageline-coordinator")],
    ids=["unknown", "nameless", "another service"],
)
def test_strangers_are_refused(request_: ExportMetricsServiceRequest) -> None:
    workers = WorkerMetrics(lambda: {"w0"})
    assert workers.take(request_, 0.0) == NUM_POINTS
    assert workers.last() == {}


def test_too_much_is_refused() -> None:
    workers = WorkerMetrics(lambda: {"w0"})
    request = export("w0")
    request.resource_metrics[0].schema_url = "x" * MAX_BYTES
    assert workers.take(request, 0.0) == NUM_POINTS


def test_there_is_room_for_so_many_workers() -> None:
    names = {f"w{index}" for index in range(definitions.WORKER.num_values + 1)}
    workers = WorkerMetrics(lambda: names)
    refused = [workers.take(export(name), 0.0) for name in sorted(names)]
    assert refused == [0] * definitions.WORKER.num_values + [NUM_POINTS]
    assert workers.take(export("w0"), 0.0) == 0


def test_who_has_left_is_shown_for_a_while() -> None:
    here = {"w0", "w1"}
    workers = WorkerMetrics(lambda: here)
    for name in ("w0", "w1"):
        workers.take(export(name), 0.0)
    workers.forget_old(1000.0)
    assert list(workers.last()) == ["w0", "w1"]
    here.remove("w1")
    workers.forget_old(1000.0 + KEPT_S)
    assert list(workers.last()) == ["w0", "w1"]
    workers.forget_old(1000.1 + KEPT_S)
    assert list(workers.last()) == ["w0"]
