"""Snapshots as the text that Prometheus reads."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as FamilyText
from prometheus_client.registry import Collector

from telemetry.metrics.definitions import WORKER, Kind, Metric, Process
from telemetry.metrics.registry import Buckets, MetricPoints, Snapshot

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Exposed:
    """The metrics of one process; `worker` is its name, empty for the coordinator."""

    worker: str
    snapshot: Snapshot


def prometheus_text(exposed: Sequence[Exposed], accept: str) -> tuple[bytes, str]:
    """The text and its content type: OpenMetrics where the header `accept` asks for it, the classic text
    otherwise. Takes some 10 us per line: for a thread.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_Exposition(exposed)), content_type


class _Exposition(Collector):
    def __init__(self, exposed: Sequence[Exposed]) -> None:
        self._exposed = exposed

    def collect(self) -> Iterable[FamilyText]:
        families: dict[str, _Family] = {}
        for each in self._exposed:
            for points in each.snapshot.metrics:
                if points.points:
                    _add_points(_family(families, points.metric), points, each.worker)
        return families.values()


def _family(families: dict[str, _Family], metric: Metric) -> _Family:
    family = families.get(metric.name)
    if family is None:
        family = families[metric.name] = _new_family(metric)
    return family


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


def _add_points(family: _Family, points: MetricPoints, worker: str) -> None:
    of_worker = (worker,) if Process.WORKER in points.metric.processes else ()
    for point in points.points:
        labels = (*of_worker, *point.labels)
        if isinstance(point.value, Buckets):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, _cumulative(points.metric.bounds, point.value), point.value.sum)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, point.value)


def _cumulative(bounds: tuple[float, ...], buckets: Buckets) -> list[tuple[str, float]]:
    total = 0.0
    cumulative: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, math.inf), buckets.counts, strict=True):
        total += count
        cumulative.append(("+Inf" if bound == math.inf else str(float(bound)), total))
    return cumulative
