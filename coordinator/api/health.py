"""`grpc.health.v1` of the coordinator, SERVING only while tokens can be produced, and its condition."""

import asyncio
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.cluster.controller import Controller
from coordinator.cluster.transitions import ClusterPhase
from stageline_rpc.v1 import inference_pb2
from wire.condition import Condition
from wire.interceptors import HealthServicer

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_DRAINING = Condition("draining", is_stopping=True)
_CONDITIONS: Mapping[ClusterPhase, Condition] = {
    ClusterPhase.WAITING_FOR_WORKERS: Condition("waiting for workers"),
    ClusterPhase.LOADING: Condition("workers are loading"),
    ClusterPhase.STARTING_EPOCH: Condition("starting an epoch"),
    ClusterPhase.CHECKING: Condition("the self-check is running"),
    ClusterPhase.SERVING: Condition("no new requests are served"),
    ClusterPhase.BLOCKED: Condition("blocked: `stageline status` has the reason"),
}
"""While no new requests are served."""


def condition_of(controller: Controller) -> Condition:
    """Whether new requests are served, and why not. Called from any thread."""
    if controller.availability.is_ending:
        return _DRAINING
    if controller.availability.serves_new:
        return Condition("serving", is_ready=True)
    return _CONDITIONS[controller.state.phase]


class CoordinatorHealth:
    """Health of the whole server, and of the Inference service by name."""

    def __init__(self, condition: Callable[[], Condition]) -> None:
        self._servicer = HealthServicer(condition)
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
