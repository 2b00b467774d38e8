"""The last metrics of each worker, as they came over OTLP.

What comes is kept as it is, and read only when somebody asks for it, on the thread that writes the text.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from telemetry.metrics.definitions import WORKER
from telemetry.metrics.metric import Process
from telemetry.metrics.otlp import decode_metrics, resource_attributes
from telemetry.metrics.prometheus import Exposed

KEPT_S = 60.0
"""How long the metrics of a worker that has left are shown."""
MAX_BYTES = 512 * 1024
"""Of one worker's metrics; those of a worker are some 5 kB."""


@dataclass(slots=True)
class _Kept:
    metrics: ResourceMetrics
    seen_s: float


class WorkerMetrics:
    """Bounded: one message for each worker that is known, and for a while of those that have left."""

    def __init__(self, known: Callable[[], Collection[str]]) -> None:
        """`known` are the names of the workers that are here."""
        self._known = known
        self._kept: dict[str, _Kept] = {}

    def take(self, request: ExportMetricsServiceRequest, now_s: float) -> int:
        """Keeps what workers that are here say of themselves. Returns how many points were refused."""
        known = self._known()
        num_refused = 0
        for metrics in request.resource_metrics:
            resource = resource_attributes(metrics)
            name = resource.get("service.instance.id", "")
            is_worker = resource.get("service.name") == Process.WORKER.value
            if not is_worker or name not in known or not self._has_room(name, metrics):
                num_refused += num_points(metrics)
                continue
            self._kept[name] = _Kept(metrics, now_s)
        return num_refused

    def forget_old(self, now_s: float) -> None:
        """Forgets those who have left some time ago."""
        known = self._known()
        for name, kept in list(self._kept.items()):
            if name in known:
                kept.seen_s = now_s
            elif now_s - kept.seen_s > KEPT_S:
                del self._kept[name]

    def last(self) -> dict[str, ResourceMetrics]:
        """By name; nobody changes these messages any more."""
        return {name: kept.metrics for name, kept in sorted(self._kept.items())}

    def _has_room(self, name: str, metrics: ResourceMetrics) -> bool:
        is_there = name in self._kept or len(self._kept) < WORKER.num_values
        return is_there and metrics.ByteSize() <= MAX_BYTES


def exposed_workers(last: dict[str, ResourceMetrics]) -> list[Exposed]:
    """What `WorkerMetrics.last` has given, read; some 100 us for each worker."""
    return [Exposed(name, decode_metrics(metrics, Process.WORKER)) for name, metrics in last.items()]


def num_points(message: ResourceMetrics) -> int:
    """Every kind of metric has its points in `data_points`."""
    metrics = (metric for scope in message.scope_metrics for metric in scope.metrics)
    kinds = ((metric, metric.WhichOneof("data")) for metric in metrics)
    return sum(len(getattr(metric, kind).data_points) for metric, kind in kinds if kind is not None)
