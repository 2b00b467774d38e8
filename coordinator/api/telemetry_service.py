"""`stageline.v1.Telemetry`: decodes, makes one domain call, encodes."""

from typing import Any

import grpc

from coordinator.api.activity import ActivityReporter
from coordinator.api.intake import refuse_unknown_fields
from stageline_rpc.v1 import telemetry_pb2, telemetry_pb2_grpc
from wire.errors import RequestNotFound

Context = grpc.aio.ServicerContext[Any, Any]


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    """What `stageline top` and `stageline trace` ask."""

    def __init__(self, activity: ActivityReporter) -> None:
        self._activity = activity

    async def GetActivity(  # noqa: N802
        self, request: telemetry_pb2.GetActivityRequest, context: Context
    ) -> telemetry_pb2.GetActivityResponse:
        refuse_unknown_fields(request)
        return await self._activity.activity(request)

    async def ListTraces(  # noqa: N802
        self, request: telemetry_pb2.ListTracesRequest, context: Context
    ) -> telemetry_pb2.ListTracesResponse:
        refuse_unknown_fields(request)
        return telemetry_pb2.ListTracesResponse()

    async def GetTrace(  # noqa: N802
        self, request: telemetry_pb2.GetTraceRequest, context: Context
    ) -> telemetry_pb2.GetTraceResponse:
        refuse_unknown_fields(request)
        raise RequestNotFound(f"no trace of request {request.request_id!r} is kept")
