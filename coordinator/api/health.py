"""`grpc.health.v1` of the coordinator: SERVING only while tokens can be produced."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stageline_rpc.v1 import inference_pb2
from wire.interceptors import HealthServicer

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class CoordinatorHealth:
    """Health of the whole server, and of the Inference service by name."""

    def __init__(self) -> None:
        self._servicer = HealthServicer()
        self._news: asyncio.Queue[bool] = asyncio.Queue()
        self._reporter: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Register the service as NOT_SERVING."""
        await self._report(is_serving=False)
        self._reporter = asyncio.create_task(self._run(), name="health")

    def set_serving(self, is_serving: bool) -> None:
        self._news.put_nowait(is_serving)

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
            self._reporter = None
        await self._report(is_serving=False)

    async def _run(self) -> None:
        while True:
            await self._report(is_serving=await self._news.get())

    async def _report(self, *, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)
