"""`grpc.health.v1`, whose errors carry a reason code as ours do."""

from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from wire.errors import ServiceNotFound


class _Aborting:
    """The part of a call's context that grpc's servicer uses for a service without a health."""

    def __init__(self, service: str) -> None:
        self._service = service

    async def abort(self, code: grpc.StatusCode) -> NoReturn:
        raise ServiceNotFound(f"service {self._service[:100]!r} has no health here")


class HealthServicer(health_aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Raises ServiceNotFound where grpc's own servicer aborts without details."""

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> health_pb2.HealthCheckResponse:
        return await super().Check(request, _Aborting(request.service))
