"""A cluster of mock stages with its metrics scraped as by Prometheus."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from prometheus_client.parser import text_string_to_metric_families

from coordinator.observability.metrics import CoordinatorMetrics
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import WorkerConfig
from telemetry.settings import MetricsExport, TelemetrySettings
from tests.integration.cluster import DEADLINE_S, Cluster

VOCAB_SIZE = 512
HIDDEN = 32
TELEMETRY = TelemetrySettings(metrics=MetricsExport(to_coordinator_interval_s=0.02))


class Scraped:
    """Samples of one scrape, by name and labels."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def get(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` with these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def has(self, name: str, **labels: str) -> bool:
        return any(
            sample.name == name and labels.items() <= sample.labels.items() for sample in self._samples
        )


class MetricsCluster(Cluster):
    """Workers w0, w1, ... take `times` in turn and export metrics 50 times a second."""

    def __init__(self, *times: str, num_stages: int, **settings: Any) -> None:
        self._times = [MockSpec.parse(text) for text in times]
        defaults = {"max_kv_tokens": 4096, "telemetry": TELEMETRY}
        super().__init__(
            None,
            mock=self._times[0],
            layers=(2,) * num_stages,
            mock_model=f"layers={2 * num_stages},hidden={HIDDEN},vocab={VOCAB_SIZE}",
            **(defaults | settings),
        )

    def worker_config(self, name: str, *arguments: Any, **more: Any) -> WorkerConfig:
        config = super().worker_config(name, *arguments, **more)
        return replace(config, mock=self._times[int(name.removeprefix("w")) % len(self._times)])

    async def __aenter__(self) -> Self:
        add_MetricsServiceServicer_to_server(_Receiver(self.server.metrics), self.server._server)
        return await super().__aenter__()

    async def scrape(self) -> Scraped:
        text, _ = await self.server.metrics.metrics_text("")
        return Scraped(text.decode())

    async def scrape_until(self, holds: Callable[[Scraped], bool]) -> Scraped:
        """Scrape until `holds`; return that scrape."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(scraped := await self.scrape()):
                await asyncio.sleep(0.01)
        return scraped


class _Receiver(MetricsServiceServicer):
    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self._metrics = metrics

    async def Export(  # noqa: N802
        self, request: ExportMetricsServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportMetricsServiceResponse:
        response = ExportMetricsServiceResponse()
        response.partial_success.rejected_data_points = self._metrics.take(request)
        return response


def stages(num_stages: int) -> Sequence[str]:
    """Values of the label `stage`."""
    return [str(stage) for stage in range(num_stages)]
