"""Tells the coordinator this worker's metrics, by the standard OTLP MetricsService."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from telemetry.metrics.otlp import encode_metrics
from telemetry.metrics.snapshot import TakeSnapshot
from wire.channels import client_channel

log = logging.getLogger(__name__)

DEADLINE_S = 1.0


class CoordinatorExport:
    """One call per interval; what does not arrive is counted in `num_failed`, and made up for by the next."""

    def __init__(
        self, coordinator: str, take_snapshot: TakeSnapshot, resource: Mapping[str, str], *, interval_s: float
    ) -> None:
        self._coordinator = coordinator
        self._take_snapshot = take_snapshot
        self._resource = resource
        self._interval_s = interval_s
        self.num_failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with client_channel(self._coordinator) as channel:
            stub: Any = MetricsServiceStub(channel)
            while True:
                await asyncio.sleep(self._interval_s)
                await self._export(stub)

    async def _export(self, stub: Any) -> None:
        request = encode_metrics(self._take_snapshot(), self._resource)
        try:
            response: ExportMetricsServiceResponse = await stub.Export(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.debug("metrics not taken: %s: %s", error.code().name, error.details())
            self.num_failed += 1
        else:
            self.num_failed += response.partial_success.rejected_data_points > 0
