"""Exported metrics of all processes as the text that Prometheus reads.

OpenTelemetry's PrometheusMetricReader covers neither of our needs: it exposes the metrics of its own process
only, and names labels after attributes (`stageline_stage_index`) instead of by the table (`stage`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, ResourceMetrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as FamilyText
from prometheus_client.registry import Collector

from telemetry.metrics.definitions import WORKER, Kind, Metric, Process
from telemetry.metrics.otlp import Points, known_points

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Exposed:
    """The metrics of one process; `worker` is its name, empty for the process that shows them."""

    worker: str
    message: ResourceMetrics
    shown_by: Process = Process.COORDINATOR

    @property
    def process(self) -> Process:
        return Process.WORKER if self.worker else self.shown_by


def prometheus_text(exposed: Sequence[Exposed], accept: str) -> tuple[bytes, str]:
    """The text and its content type: OpenMetrics if the header `accept` asks for it, else the classic text.

    Takes some 10 us per line; call it on a thread.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_Exposition(exposed)), content_type


class _Exposition(Collector):
    def __init__(self, exposed: Sequence[Exposed]) -> None:
        self._exposed = exposed

    def collect(self) -> Iterable[FamilyText]:
        families: dict[str, _Family] = {}
        for source in self._exposed:
            for metric, points in known_points(source.message, source.process):
                if points:
                    family = families.get(metric.name)
                    if family is None:
                        family = families[metric.name] = _new_family(metric)
                    _add_points(family, metric, points, source.worker)
        return families.values()


def _new_family(metric: Metric) -> _Family:
    names = [label.name for label in metric.labels]
    if Process.WORKER in metric.processes:
        names.insert(0, WORKER.name)
    name, about, unit = metric.prometheus_name, metric.description, metric.prometheus_unit
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(name, about, labels=names, unit=unit)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(name, about, labels=names, unit=unit)
        case _:
            return GaugeMetricFamily(name, about, labels=names, unit=unit)


def _add_points(family: _Family, metric: Metric, points: Points, worker: str) -> None:
    worker_label = (worker,) if Process.WORKER in metric.processes else ()
    for labels, point in points.items():
        values = (*worker_label, *labels)
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(point, HistogramDataPoint)
            family.add_metric(values, _cumulative(point), point.sum)
        else:
            assert not isinstance(point, HistogramDataPoint)
            family.add_metric(values, point.as_int if metric.is_integer else point.as_double)


def _cumulative(point: HistogramDataPoint) -> list[tuple[str, float]]:
    bounds = [*map(str, point.explicit_bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(point.bucket_counts)), strict=True))
